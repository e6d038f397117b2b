"""The scaling policy: properties that hold whatever comes, and what a fleet does over time under a load."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.config import Scaling
from serve_app.scaling import UP_AFTER_S, EngineStats, Fleet, Signals, State, decide

SOON = Scaling(down_after_s=60, idle_s=60)
times = st.none() | st.floats(0, 1e6)
counts = st.integers(0, 5000)


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    least = draw(st.integers(0, 50))
    most = draw(st.integers(max(1, least), 1000))
    return Fleet(draw(st.integers(0, 1000)), draw(st.integers(0, 1000)), least, most)


signals = st.builds(
    Signals,
    replicas=st.integers(0, 1000),
    running=counts,
    waiting=counts,
    kv_usage=st.floats(0, 1000),
    held=counts,
    slots=st.integers(1, 1024),
    placeable=st.none() | st.integers(0, 100),
)
states = st.builds(
    State,
    capacity=st.none() | st.floats(1, 1000),
    queued_since=times,
    grew=times,
    small_since=times,
    small_peak=st.integers(0, 1000),
    used=times,
    asleep=st.booleans(),
)


@settings(deadline=None)
@given(st.none() | signals, fleets(), states, st.floats(0, 1e6))
def test_within_bounds_whatever_comes(found: Signals | None, fleet: Fleet, state: State, now: float) -> None:
    """Never outside of the bounds, never more than have room, never an exception."""
    wanted, _ = decide(found, fleet, Scaling(), state, now)
    assert fleet.least <= wanted <= fleet.most
    before = min(max(fleet.wanted, fleet.least), fleet.most)
    if found is None:
        assert wanted == before
    elif found.placeable is not None:
        assert wanted <= before + found.placeable


@settings(deadline=None)
@given(signals, fleets(), states, st.floats(0, 1e6), counts, counts, counts, st.floats(0, 100))
def test_more_load_never_means_fewer_replicas(
    found: Signals, fleet: Fleet, state: State, now: float, running: int, waiting: int, held: int, kv: float
) -> None:
    """Monotone in everything that is load, all else equal."""
    more = replace(
        found,
        running=found.running + running,
        waiting=found.waiting + waiting,
        held=found.held + held,
        kv_usage=found.kv_usage + kv,
    )
    less, _ = decide(found, fleet, Scaling(), state, now)
    assert decide(more, fleet, Scaling(), state, now)[0] >= less


@dataclass
class World:
    """Engines that run ``capacity`` requests at once each (``slots`` is what their arguments say), and take ``start_s``
    to start. The load is so many requests at once, as from clients that ask again when they are answered."""

    capacity: int = 64
    slots: int = 256
    start_s: float = 30.0
    kv: bool = False  # what bounds them shows as a full KV cache
    least: int = 1
    most: int = 8

    def run(self, load: Callable[[float], int], seconds: float, first: int | None = None) -> list[int]:
        """Replicas wanted, second by second."""
        wanted = self.least if first is None else first
        ready = [0.0] * wanted
        state, log = State(), []
        for now in range(int(seconds)):
            requests = load(now)
            answering = sum(at <= now for at in ready)
            running = min(requests, answering * self.capacity)
            queue = requests - running
            waiting = min(queue, 8 * answering)
            kv = running / self.capacity if self.kv else 0.0
            found = Signals(answering, running, waiting, kv, queue - waiting, self.slots)
            if not (answering or wanted) and requests:
                wanted = 1  # Serve's own step: a lease call is pending
            else:
                wanted, state = decide(found, Fleet(answering, wanted, self.least, self.most), SOON, state, float(now))
            ready = sorted(ready)[:wanted] + [now + self.start_s] * (wanted - len(ready))
            log.append(wanted)
        return log


def turns(log: list[int]) -> int:
    """How often the fleet changed its direction."""
    steps = [b - a for a, b in itertools.pairwise(log) if a != b]
    return sum((a > 0) != (b > 0) for a, b in itertools.pairwise(steps))


@pytest.mark.parametrize("kv", [False, True])
@pytest.mark.parametrize("slots", [64, 256])
@pytest.mark.parametrize("load", [0, 1, 40, 63, 64, 65, 100, 129, 200, 400, 511, 700])
def test_constant_load_settles(load: int, slots: int, kv: bool) -> None:
    """One change of direction at most, then none at all: up as far as is needed, and perhaps back by what was too much.
    Also where an engine runs far fewer requests than its arguments allow."""
    log = World(slots=slots, kv=kv).run(lambda _: load, 2000)
    assert turns(log) <= 1
    assert len(set(log[600:])) == 1
    queue = max(0, load - 64 * log[-1])
    assert queue <= SOON.target_queue * log[-1] or log[-1] == 8


def test_one_four_one() -> None:
    """Up with the load, down a window after it went."""
    log = World(most=4).run(lambda now: 250 if 100 <= now < 500 else 20, 1000)
    assert (log[99], log[499], log[-1]) == (1, 4, 1)
    assert turns(log) == 1
    assert log.index(1, 500) >= 500 + SOON.down_after_s


def test_zero_one_zero() -> None:
    """Woken by the first request, however long the start takes; asleep ``idle_s`` after the last one, and no sooner."""
    log = World(least=0, start_s=100).run(lambda now: int(100 <= now < 400), 600)
    assert set(log[:100]) == {0}
    assert set(log[100 : 400 + int(SOON.idle_s) - 1]) == {1}
    assert set(log[400 + int(SOON.idle_s) :]) == {0}


def test_nothing_wakes_by_itself() -> None:
    """Three idle windows after it fell asleep it still sleeps, and a model that is deployed asleep stays so."""
    assert set(World(least=0).run(lambda _: 0, 3 * 60)) == {0}


def test_a_new_state_puts_nothing_to_sleep() -> None:
    """Serve forgets the state when the file is deployed again: an idle model that runs is idle from then on."""
    log = World(least=0).run(lambda _: 0, 200, first=1)
    assert log.index(0) == SOON.idle_s


@pytest.mark.parametrize(
    "found",
    [
        Signals.of([EngineStats(running=4, waiting=20)], held=0, slots=4),
        Signals.of([EngineStats(running=4)], held=20, slots=4),
        Signals.of([EngineStats(running=40, kv_usage=0.97)], held=0, slots=256),
    ],
    ids=["engine", "gateway", "cache"],
)
def test_a_burst_is_answered_within_a_second(found: Signals) -> None:
    """From when the signals show it: after ``UP_AFTER_S``, and not before, for a step's queue is no burst."""
    state, seen = State(), []
    for tick in range(15):
        wanted, state = decide(found, Fleet(1, 1, 1, 4), Scaling(), state, tick / 10)
        seen.append(wanted)
    assert seen.index(2) == UP_AFTER_S * 10
