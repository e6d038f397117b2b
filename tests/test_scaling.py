"""What holds of the scaling policy for every input, and what it does in a closed loop with a fluid model of engines."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app import scaling
from serve_app.config import Scaling
from serve_app.scaling import EngineStats, Fleet, Signals, State, decide

DEFAULTS = Scaling()
TICK_S = 1.0

# Mostly what may happen, so that rules meet; now and then what may not.
numbers = st.floats(0, 20) | st.floats(0, 1e308)
counts = st.integers(0, 2000) | st.integers(0, 10**12)
times = st.floats(0, 2000)


@st.composite
def signals(draw: st.DrawFn) -> Signals:
    return Signals(
        replicas=draw(st.integers(0, 1000)),
        running=draw(counts),
        waiting=draw(counts),
        kv_usage=draw(numbers),
        held=draw(counts),
        slots=draw(counts),
        placeable=draw(st.none() | st.integers(0, 1000)),
        tokens_s=draw(numbers),
    )


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    least = draw(st.integers(0, 100))
    most = draw(st.integers(max(1, least), 1000))
    return Fleet(draw(st.integers(0, 1000)), draw(st.integers(0, 1000)), least, most)


scalings = st.builds(
    Scaling,
    target_queue=numbers,
    down_after_s=numbers,
    idle_s=numbers,
    wait_for_nodes=st.booleans(),
)
maybe = st.none() | times
states = st.builds(
    State,
    capacity=st.none() | st.floats(min_value=1, max_value=1e308),
    speed=st.none() | st.floats(min_value=0, max_value=1e308, exclude_min=True),
    learned=maybe,
    full_since=maybe,
    replicas=st.none() | st.integers(0, 1000),
    trend=st.floats(min_value=-1e308, max_value=1e308),
    mark_s=maybe,
    mark_requests=counts,
    busy_since=maybe,
    grew=maybe,
    small_since=maybe,
    small_peak=st.integers(0, 1000),
    used=maybe,
)


@given(signals(), fleets(), scalings, states, times)
def test_within_its_bounds_whatever_comes(
    now_there: Signals, fleet: Fleet, scaling: Scaling, state: State, now: float
) -> None:
    """It never raises, stays within least and most, and adds no more than the cluster has room for."""
    wanted, _ = decide(now_there, fleet, scaling, state, now)
    assert fleet.least <= wanted <= fleet.most
    if now_there.placeable is not None and not scaling.wait_for_nodes:
        assert wanted <= max(fleet.least, fleet.wanted + now_there.placeable)


def test_room_is_counted_from_what_is_wanted() -> None:
    """A floor that was raised above what is wanted does not count as placed: with room for one, one is added."""
    crowd = Signals(replicas=0, running=0, waiting=0, kv_usage=0.0, held=9, slots=1, placeable=1)
    state = State(replicas=0, full_since=0.0)
    assert decide(crowd, Fleet(running=0, wanted=0, least=1, most=4), DEFAULTS, state, 100.0)[0] == 1
    assert decide(crowd, Fleet(running=0, wanted=1, least=1, most=4), DEFAULTS, state, 100.0)[0] == 2


@given(fleets(), states, times)
def test_without_signals_nothing_changes(fleet: Fleet, state: State, now: float) -> None:
    """A controller that has just started knows nothing: it neither adds nor takes away."""
    assert decide(None, fleet, DEFAULTS, state, now) == (min(max(fleet.wanted, fleet.least), fleet.most), state)


@given(signals(), fleets(), scalings, states, times, counts, counts, numbers)
def test_more_load_never_means_fewer_replicas(
    now_there: Signals,
    fleet: Fleet,
    scaling: Scaling,
    state: State,
    now: float,
    waiting: int,
    held: int,
    kv_usage: float,
) -> None:
    """More waiting, more held or a fuller cache, all else alike: at least as many."""
    for more in (
        replace(now_there, waiting=now_there.waiting + waiting),
        replace(now_there, held=now_there.held + held),
        replace(now_there, kv_usage=max(now_there.kv_usage, kv_usage)),
    ):
        fewer, _ = decide(now_there, fleet, scaling, state, now)
        assert decide(more, fleet, scaling, state, now)[0] >= fewer


@dataclass
class Engines:
    """A fluid model of one model's engines: work flows in at a constant rate and each replica does ``speed`` tokens/s.

    At utilisation u < 1 a replica runs ``full * u ** bend`` requests: ``bend`` 1 where a request takes as long on a
    busy engine as on an idle one, more where it takes longer (prompts, decode steps of large batches). Beyond, it runs
    ``full`` and the rest waits. ``kv_full``: its cache's usage then.
    """

    speed: float = 20_000.0
    tokens: float = 1500.0  # per request
    full: float = 250.0
    bend: float = 1.0
    kv_full: float = 0.4
    slots: int = 256
    start_s: float = 60.0
    replicas: int = 1
    waiting: float = 0.0
    tokens_s: float = 0.0
    starting: list[float] = field(default_factory=list)

    def step(self, load: float, wanted: int, now: float) -> None:
        """``load``: replicas' worth of work that arrives."""
        here = self.replicas + len(self.starting)
        self.starting += [now + self.start_s] * (wanted - here)
        while self.replicas + len(self.starting) > wanted:
            if self.starting:
                self.starting.pop()
            else:
                self.replicas -= 1
        self.replicas += sum(at <= now for at in self.starting)
        self.starting = [at for at in self.starting if at > now]
        can = self.replicas * self.speed
        comes = load * self.speed
        done = can if self.waiting > 0 else min(comes, can)
        waiting = max(0.0, self.waiting + (comes - done) / self.tokens * TICK_S)
        self.waiting = min(waiting, 512.0 + 8 * self.replicas)
        self.tokens_s += (done - self.tokens_s) * TICK_S / 10
        self.busy = done / can if can else 0.0

    def signals(self, placeable: int | None = None) -> Signals:
        running = self.full * self.busy**self.bend
        engines = [EngineStats(round(running), 0, self.kv_full * running / self.full)] * self.replicas
        held = round(self.waiting)
        found = Signals.of(engines, held, self.slots, placeable)
        return replace(found, tokens_s=self.tokens_s)


def closed_loop(
    engines: Engines,
    load: Callable[[float], float],
    seconds: float,
    *,
    least: int = 1,
    most: int = 1000,
    first: int | None = None,
    scaling: Scaling = DEFAULTS,
) -> list[int]:
    """What was wanted at each tick."""
    wanted, state, log = first if first is not None else least, State(), []
    engines.replicas = wanted
    for tick in range(int(seconds / TICK_S)):
        now = tick * TICK_S
        engines.step(load(now), wanted, now)
        if engines.replicas == 0 and load(now) > 0:
            wanted = max(1, wanted)  # Serve's own cold start
        else:
            fleet = Fleet(engines.replicas, wanted, least, most)
            wanted, state = decide(engines.signals(), fleet, scaling, state, now)
        log.append(wanted)
    return log


def turns(wanted: list[int]) -> int:
    """How often it changes its direction."""
    ways = [b > a for a, b in pairwise(wanted) if a != b]
    return sum(a != b for a, b in pairwise(ways))


engines = st.builds(
    Engines,
    speed=st.floats(2_000, 50_000),
    tokens=st.floats(200, 8_000),
    full=st.floats(4, 256),
    bend=st.floats(1, 8),
    kv_full=st.floats(0.05, 1.0),
    start_s=st.floats(15, 300),
)


@settings(max_examples=25, deadline=None)
@given(engines, st.floats(0.05, 30))
def test_constant_load_settles(plant: Engines, load: float) -> None:
    """Up from one replica, perhaps down once from too many, and then never again: also where an engine's capacity is
    far below its slots, by its cache or by its prompts. What remains is enough, and not twice as many."""
    log = closed_loop(plant, lambda now: load, 4000)
    assert turns(log) <= 1
    assert len(set(log[-1000:])) == 1
    assert load <= log[-1] <= max(2, 2 * load + 1)


@settings(max_examples=15, deadline=None)
@given(engines, st.floats(0.1, 0.6), st.integers(2, 20))
def test_a_restarted_controller_does_not_throw_a_fleet_away(plant: Engines, busy: float, first: int) -> None:
    """It has forgotten what a replica can do: it takes away a quarter at a time, or one, until it knows."""
    log = closed_loop(plant, lambda now: busy * first, 1000, first=first)
    assert min(log) >= min(first - 1, 0.75 * first)


def test_one_four_one() -> None:
    """Up with the load and down with it; three bursts later it still is one where one is enough."""

    def load(now: float) -> float:
        return 2.6 if now % 3000 < 600 else 0.3

    log = closed_loop(Engines(bend=4), load, 9000)
    assert all(3 <= log[at] <= 8 for at in (590, 3590, 6590))
    assert all(log[at] == 1 for at in (2990, 5990, 8990))
    assert turns(log) == 5


def test_zero_one_zero() -> None:
    """The first request wakes it (Serve's own step), it stays while there are some, and sleeps ``idle_s`` later."""

    def load(now: float) -> float:
        return 0.2 if 100 <= now < 700 else 0.0

    log = closed_loop(Engines(), load, 2000, least=0, first=0)
    last = 699
    assert set(log[:100]) == {0}
    assert log.index(0, 100) == last + DEFAULTS.idle_s
    assert set(log[100 : last + int(DEFAULTS.idle_s)]) == {1}
    assert set(log[last + int(DEFAULTS.idle_s) :]) == {0}


def test_asleep_stays_asleep() -> None:
    """A model that is deployed with ``min_replicas: 0`` starts nothing until it is asked."""
    assert set(closed_loop(Engines(), lambda now: 0.0, 1000, least=0, first=0)) == {0}


def test_new_state_puts_nothing_to_sleep() -> None:
    """A redeployed file makes Serve forget the state: an idle model that runs keeps its replica for ``idle_s``."""
    log = closed_loop(Engines(), lambda now: 0.0, 1000, least=0, first=1)
    assert log.index(0) >= DEFAULTS.idle_s


def test_a_request_now_and_then_keeps_it_awake() -> None:
    """Three idle windows with a request just before each of them ends: no change at all."""
    state, window = State(), DEFAULTS.idle_s
    for tick in range(int(3 * window)):
        asked = tick % (window - 2) == 0
        found = Signals.of([EngineStats(running=int(asked))], 0, 256)
        wanted, state = decide(found, Fleet(1, 1, 0, 4), DEFAULTS, state, float(tick))
        assert wanted == 1


@pytest.mark.parametrize(
    "found",
    [
        Signals.of([EngineStats(running=4, waiting=20)], 0, 4),
        Signals.of([EngineStats(running=30, waiting=10)], 0, 256),
        Signals.of([EngineStats(running=4)], 20, 4),
        Signals.of([EngineStats(running=40, kv_usage=0.97)], 0, 256),
    ],
    ids=["slots", "prompts", "gateway", "cache"],
)
def test_a_burst_is_answered_within_a_second(found: Signals) -> None:
    """From when the signals show it: ``UP_AFTER_S``, and not before."""
    idle = Signals.of([EngineStats(running=1)], 0, 256)
    state, ticks = State(), []
    for tick in range(120):
        now = tick / 10
        wanted, state = decide(found if now >= 10 else idle, Fleet(1, 1, 1, 8), DEFAULTS, state, now)
        ticks.append(wanted)
    first = next(i for i, wanted in enumerate(ticks) if wanted > 1) / 10
    assert scaling.UP_AFTER_S <= first - 10 <= scaling.UP_AFTER_S + 0.1


def test_a_step_of_the_engine_is_no_burst() -> None:
    """A queue that is gone within a second adds nothing, however often it comes back."""
    state = State()
    for tick in range(600):
        now = tick / 10
        found = Signals.of([EngineStats(running=20, waiting=50 if now % 2 < 0.8 else 0, tokens_s=10_000)], 0, 256)
        wanted, state = decide(found, Fleet(1, 1, 1, 8), DEFAULTS, state, now)
        assert wanted == 1


def test_grows_before_a_queue_forms() -> None:
    """Once a replica's limits are known, a slow ramp never has a queue; with none to spare, it never has enough."""
    ramp = Engines(bend=4)
    log = closed_loop(ramp, lambda now: min(6.0, 1.2 + max(0.0, now - 600) / 300), 2400)
    assert ramp.waiting == 0
    assert 6 / scaling.FULL_UP <= log[-1] <= 10


def test_a_fleet_that_is_hit_by_three_times_its_load_is_sized_at_once() -> None:
    """From six busy replicas to what eighteen can do: within half a minute, not one by one."""
    plant = Engines(bend=4)
    log = closed_loop(plant, lambda now: 18.0 if now >= 1000 else 6.0, 1300)
    assert log[990] <= 12
    assert log[1030] >= 18
