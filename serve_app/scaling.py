"""How many replicas a model should have. Pure: signals, bounds, state and time go in, a number comes out.

``decide`` adds replicas within seconds where requests wait, in the engines and at the gateways, or soon would: as many
as what was seen of one replica says that the load needs. It takes them away slowly, only where what ran at the worst
moment of a whole window would fit into fewer with room to spare. The serving policy (``serve_app.policy``) and the
simulator (``loadtest.scaling``) call the same function; ``docs/scaling.md`` explains the rules.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil

from serve_app.config import Scaling

# Load must be too high for so long before replicas are added: an engine that takes in a burst has a queue for a step.
UP_AFTER_S = 1.0
# Then their number may double (or grow by UP_STEP) once in so long, up to what the load needs.
UP_EVERY_S = 5.0
UP_STEP = 4
# Busier than this, replicas are added before a queue forms: a start takes longer than a queue is bearable.
FULL_UP = 0.85
# Fewer replicas only where they would be no busier than this: less than what adds one, so that one does not follow
# the other.
FULL_DOWN = 0.7
# A KV cache this full makes the engine put running requests back into its queue.
KV_HIGH = 0.9
# What one replica can do shows once engines have been full for so long; tokens/s are an average over as much.
LEARN_S = 10.0
# Before it has shown, so many requests count as full, or this share of an engine's slots if that is more, since engines
# slow down long before their slots are taken; and at most this share of the replicas is taken away at once.
UNSEEN_REQUESTS = 16
UNSEEN_FULL = 0.25
UNSEEN_DOWN = 0.25
# The growth of the requests is measured over so long, and replicas are added for as many requests as there would be
# after AHEAD_S of it: about as long as a request spends in a full engine. A queue that lasts for TREND_S although there
# should be enough replicas adds one.
TREND_S = 5.0
AHEAD_S = 15.0
# A queue that will be gone within so long adds none.
CLEAR_S = 60.0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One engine now. ``running`` and ``waiting``: requests (those that the engine put back count as waiting).
    ``kv_usage``: share of the KV cache in use, 0 to 1. ``tokens_s``: prompt and generated tokens per second, over about
    the last ten seconds; 0 where it is not known."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    tokens_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Signals:
    """One model now. ``replicas``: those whose engines are counted in ``running``, ``waiting`` and ``kv_usage``, which
    are sums. ``held``: requests that wait at gateways. ``slots``: requests that one engine runs at once at most.
    ``placeable``: further replicas that the cluster has room for; None: not known."""

    replicas: int
    running: int
    waiting: int
    kv_usage: float
    held: int
    slots: int
    placeable: int | None = None
    tokens_s: float = 0.0

    @classmethod
    def of(cls, engines: Iterable[EngineStats], held: int, slots: int, placeable: int | None = None) -> "Signals":
        all_ = tuple(engines)
        return cls(
            replicas=len(all_),
            running=sum(e.running for e in all_),
            waiting=sum(e.waiting for e in all_),
            kv_usage=sum(e.kv_usage for e in all_),
            held=held,
            slots=slots,
            placeable=placeable,
            tokens_s=sum(e.tokens_s for e in all_),
        )

    @property
    def queue(self) -> int:
        return self.waiting + self.held

    @property
    def load(self) -> EngineStats | None:
        """Of all engines together, with the mean of ``kv_usage``; None: there is none."""
        if not self.replicas:
            return None
        return EngineStats(self.running, self.waiting, self.kv_usage / self.replicas, self.tokens_s)

    @property
    def requests(self) -> int:
        return self.running + self.queue


@dataclass(frozen=True, slots=True)
class Fleet:
    """``running``: replicas that answer. ``wanted``: what was decided last. ``least``, ``most``: the bounds."""

    running: int
    wanted: int
    least: int
    most: int


@dataclass(frozen=True, slots=True)
class State:
    """What ``decide`` remembers between two calls. Times are in seconds on the caller's clock.

    ``capacity``, ``speed``: requests that one replica runs at once and tokens/s that it computes, as seen when the
    engines were full; ``learned``: the ``full_since`` in which they were seen. ``full_since``: since when the engines
    of ``replicas`` replicas are full; ``busy_since``: since when they are nearly so. ``trend``: requests/s by which the
    requests grow; ``mark_s``, ``mark_requests``: when that was measured last, and the requests then. ``grew``: when
    replicas were added, or began to answer, last. ``small_since``, ``small_peak``: since when fewer would do, and how
    many at least at the worst moment since then. ``used``: when there was a request last. ``asleep``: nothing was
    wanted when this was looked at last.
    """

    capacity: float | None = None
    speed: float | None = None
    learned: float | None = None
    full_since: float | None = None
    replicas: int | None = None
    trend: float = 0.0
    mark_s: float | None = None
    mark_requests: int = 0
    busy_since: float | None = None
    grew: float | None = None
    small_since: float | None = None
    small_peak: int = 0
    used: float | None = None
    asleep: bool = False


def decide(signals: Signals | None, fleet: Fleet, scaling: Scaling, state: State, now: float) -> tuple[int, State]:
    """How many replicas to want, within the bounds. ``signals`` None (nothing is known): as many as before."""
    before = min(max(fleet.wanted, fleet.least), fleet.most)
    if signals is None:
        return before, state
    starting = fleet.running < fleet.wanted
    # Also a model that somebody else woke, or that was here before this was.
    if signals.requests or (state.asleep and before) or (state.used is None and fleet.running):
        state = replace(state, used=now)
    state = _watch(signals, before, scaling, state, now)
    most = fleet.most
    if signals.placeable is not None and not scaling.wait_for_nodes:
        most = min(most, max(before, fleet.wanted + max(0, signals.placeable)))
    wanted = min(_grown(signals, before, starting, scaling, state, now), most)
    if wanted > before:
        state = replace(state, grew=now, small_since=None)
    else:
        wanted, state = _shrink(signals, before, starting, fleet, scaling, state, now)
    return wanted, _learn(signals, replace(state, asleep=wanted == 0), now)


def _watch(signals: Signals, before: int, scaling: Scaling, state: State, now: float) -> State:
    """Notes how fast the requests grow, since when the engines are full, and since when they are nearly so."""
    if signals.replicas != state.replicas:
        # Others share the work now: what was measured is void.
        grew = now if state.replicas is not None and signals.replicas > state.replicas else state.grew
        state = replace(state, replicas=signals.replicas, full_since=None, grew=grew, mark_s=None, trend=0.0)
    if state.mark_s is None:
        state = replace(state, mark_s=now, mark_requests=signals.requests)
    elif now - state.mark_s >= TREND_S:
        trend = (signals.requests - state.mark_requests) / (now - state.mark_s)
        state = replace(state, trend=trend, mark_s=now, mark_requests=signals.requests)
    replicas = max(1, signals.replicas)
    full = signals.queue > scaling.target_queue * replicas or signals.kv_usage > KV_HIGH * replicas
    busy = _load(signals, state) > FULL_UP * before
    return replace(
        state,
        full_since=_since(state.full_since, full, now),
        busy_since=_since(state.busy_since, busy, now),
    )


def _grown(signals: Signals, before: int, starting: bool, scaling: Scaling, state: State, now: float) -> int:
    """As many as before, or as many as a load that has been too high for long enough needs."""
    full = _lasts(state.full_since, UP_AFTER_S, now) and state.trend * CLEAR_S >= -signals.queue
    busy = _lasts(state.busy_since, LEARN_S, now) and state.trend >= 0
    early = state.grew is not None and now - state.grew < UP_EVERY_S
    if early or not signals.requests or not (full or busy):
        return before
    most = before + max(before, UP_STEP)
    need = 0 if state.capacity is None else _whole(_load(signals, state) / FULL_UP, most)
    if full:
        replicas = max(1, signals.replicas)
        requests = signals.requests - scaling.target_queue * replicas + max(0.0, state.trend) * AHEAD_S
        need = max(need, _whole(requests / max(_capacity(signals, state), signals.running / replicas), most))
    # What is known of a replica says that there are enough: then one more, and see.
    if not starting and (state.capacity is None or (full and _lasts(state.full_since, TREND_S, now))):
        need = max(need, before + 1)
    return max(before, need)


def _shrink(
    signals: Signals, before: int, starting: bool, fleet: Fleet, scaling: Scaling, state: State, now: float
) -> tuple[int, State]:
    """As many as before, or as few as were enough at every moment of the window."""
    idle = signals.requests == 0 and _lasts(state.used, scaling.idle_s, now)
    if idle and fleet.least == 0 and before <= 1:
        return 0, replace(state, small_since=None)
    enough = max(fleet.least, 1, _whole(_load(signals, state) / FULL_DOWN, before))
    if enough >= before or starting or _lasts(state.full_since, UP_AFTER_S, now):
        return before, replace(state, small_since=None)
    if state.small_since is None:
        return before, replace(state, small_since=now, small_peak=enough)
    peak = min(before, max(state.small_peak, enough))
    if now - state.small_since < scaling.down_after_s:
        return before, replace(state, small_peak=peak)
    if state.speed is None:
        peak = max(peak, min(before - 1, ceil(before * (1 - UNSEEN_DOWN))))
    return peak, replace(state, small_since=None)


def _learn(signals: Signals, state: State, now: float) -> State:
    """What one replica can do: the most that is seen while the engines are full, since at a queue's end some of them
    have nothing left to do. As long as nothing is known, what they do when replicas are added counts."""
    since = state.busy_since if state.capacity is None and state.full_since is None else state.full_since
    if not (signals.replicas and signals.running and _lasts(since, LEARN_S, now)):
        return state
    capacity, speed = max(1.0, signals.running / signals.replicas), signals.tokens_s / signals.replicas
    if state.learned == since:
        capacity, speed = max(capacity, state.capacity or 0.0), max(speed, state.speed or 0.0)
    return replace(state, capacity=capacity, speed=speed or None, learned=since)


def _load(signals: Signals, state: State) -> float:
    """How many replicas the work keeps busy. Tokens tell it best: at half of the work an engine computes half of the
    tokens, but runs far less than half of the requests, since each is done sooner."""
    work = signals.tokens_s / state.speed if state.speed else signals.requests / _capacity(signals, state)
    return max(work, signals.kv_usage)


def _capacity(signals: Signals, state: State) -> float:
    """Requests that one replica runs at once."""
    if state.capacity is not None:
        return state.capacity
    return max(1.0, min(signals.slots, UNSEEN_REQUESTS), UNSEEN_FULL * signals.slots)


def _since(since: float | None, true: bool, now: float) -> float | None:
    return (now if since is None else since) if true else None


def _lasts(since: float | None, seconds: float, now: float) -> bool:
    return since is not None and now - since >= seconds


def _whole(replicas: float, most: int) -> int:
    """Rounded up, within 0 and ``most``: also where ``replicas`` is infinite."""
    return ceil(min(max(replicas, 0.0), most))
