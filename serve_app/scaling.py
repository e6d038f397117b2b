"""How many replicas a model should have. Pure: signals, bounds, state and time go in, a number comes out.

``decide`` follows the queue: requests that wait in the engines and at the gateways. It adds replicas within seconds
of a queue that lasts, sized by how many requests one replica was seen to run at once, and takes them away slowly, only
where what ran at the worst moment of a whole window would fit into fewer with room to spare. The serving policy
(``serve_app.policy``) and the simulator (``loadtest``) call the same function.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil

from serve_app.config import Scaling

# Waiting requests must last so long before replicas are added: an engine that takes in a burst has a queue for a step.
UP_AFTER_S = 1.0
# The number of replicas may double once in so long, while the queue lasts.
UP_EVERY_S = 5.0
# A KV cache this full makes the engine put running requests back into its queue.
KV_HIGH = 0.9
# Fewer replicas only where they would be no fuller than this: less than what adds one, so that one does not follow
# the other.
FULL_AFTER_DOWN = 0.7


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One engine now. ``running`` and ``waiting``: requests (those that the engine put back count as waiting).
    ``kv_usage``: share of the KV cache in use, 0 to 1."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0


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
        )

    @property
    def queue(self) -> int:
        return self.waiting + self.held

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

    ``capacity``: requests that one replica runs at once, as seen when some had to wait. ``queued_since``: since when
    there are too many waiting. ``grew``: when replicas were added last. ``small_since``, ``small_peak``: since when
    fewer would do, and how many at least at the worst moment since then. ``used``: when there was a request last.
    ``asleep``: nothing was wanted when this was looked at last.
    """

    capacity: float | None = None
    queued_since: float | None = None
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
    grown, state = _grow(signals, before, starting, scaling, state, now)
    if signals.placeable is not None and not scaling.wait_for_nodes:
        grown = min(grown, before + max(0, signals.placeable))
    grown = min(grown, fleet.most)
    if grown > before:
        return grown, replace(state, grew=now, small_since=None, asleep=False)
    wanted, state = _shrink(signals, before, starting, fleet, scaling, state, now)
    return wanted, replace(state, asleep=wanted == 0)


def _grow(
    signals: Signals, before: int, starting: bool, scaling: Scaling, state: State, now: float
) -> tuple[int, State]:
    replicas = max(1, signals.replicas)
    allowed = scaling.target_queue * replicas
    full = signals.kv_usage > KV_HIGH * replicas
    if signals.queue <= allowed and not full:
        seen = signals.running / replicas
        capacity = max(state.capacity, seen) if state.capacity is not None else None
        return before, replace(state, queued_since=None, capacity=capacity)
    since = now if state.queued_since is None else state.queued_since
    state = replace(state, queued_since=since)
    if now - since < UP_AFTER_S:
        return before, state
    need = max(ceil((signals.requests - allowed) / _capacity(signals, state)), ceil(signals.kv_usage / KV_HIGH))
    if not starting:
        need = max(need, before + 1)
    if signals.replicas and signals.running:
        state = replace(state, capacity=max(1.0, signals.running / signals.replicas))
    if state.grew is not None and now - state.grew < UP_EVERY_S:
        return before, state
    return max(before, min(need, max(1, 2 * before))), state


def _shrink(
    signals: Signals, before: int, starting: bool, fleet: Fleet, scaling: Scaling, state: State, now: float
) -> tuple[int, State]:
    idle = signals.requests == 0 and (state.used is None or now - state.used >= scaling.idle_s)
    if idle and fleet.least == 0 and before <= 1:
        return 0, replace(state, small_since=None)
    full = max(signals.requests / _capacity(signals, state), signals.kv_usage)
    enough = max(fleet.least, 1, ceil(full / FULL_AFTER_DOWN))
    if enough >= before or starting or state.queued_since is not None:
        return before, replace(state, small_since=None)
    if state.small_since is None:
        return before, replace(state, small_since=now, small_peak=enough)
    peak = max(state.small_peak, enough)
    if now - state.small_since < scaling.down_after_s:
        return before, replace(state, small_peak=peak)
    return peak, replace(state, small_since=None)


def _capacity(signals: Signals, state: State) -> float:
    """Requests that one replica runs at once."""
    return state.capacity if state.capacity is not None else max(1, signals.slots)
