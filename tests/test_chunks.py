"""When tokens share an event, and for how long the first of them waits."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.model.chunks import EVENTS_S, PAUSE_S, Pace, Pause, hold_s

streams = st.integers(1, 2000)
steps = st.floats(0.0005, 1.0)
longest = st.floats(0.0, 0.2)


@given(streams, steps, longest)
def test_no_token_waits_longer_than_stated(count: int, step_s: float, longest_s: float) -> None:
    """And not at all while every token may have its own event."""
    held = hold_s(count, step_s, longest_s)
    assert 0 <= held <= longest_s
    assert held == 0 or count / step_s > EVENTS_S


@given(streams, steps)
def test_events_are_bounded_where_the_wait_is_not(count: int, step_s: float) -> None:
    """One event per stream and wait, or per step where that is longer: never more than the bound."""
    every_s = max(step_s, hold_s(count, step_s, 1e9))
    assert count / every_s <= EVENTS_S * 1.001


@pytest.mark.parametrize("count", [1, 5])
def test_few_streams_get_every_token_by_itself(count: int) -> None:
    """With steps of 3 ms, as a small model makes them on a fast GPU."""
    pace = paced(0.003, 1000)
    pace.streams = count
    assert pace.hold_s() == 0


def paced(step_s: float, times: int, now: float = 0.0) -> Pace:
    times_told = iter([now + i * step_s for i in range(times + 1)])
    pace = Pace(0.02, clock=lambda: next(times_told))
    for _ in range(times):
        pace.step()
    return pace


def test_the_wait_follows_the_load() -> None:
    """Within dozens of steps; a pause between requests is no slow step, and before the first step nothing waits."""
    now = 0.0
    pace = Pace(0.02, clock=lambda: now)
    pace.streams = 256
    assert pace.hold_s() == 0
    for _ in range(50):
        now += 0.005
        pace.step()
    assert pace.hold_s() == 0.02
    now += 100 * PAUSE_S
    pace.step()
    assert pace.hold_s() == 0.02
    for _ in range(50):
        now += 0.2
        pace.step()
    assert pace.hold_s() == 0
    pace.streams = 20
    for _ in range(50):
        now += 0.005
        pace.step()
    assert pace.hold_s() == pytest.approx(0.01)
    pace.longest_s = 0.0
    assert pace.hold_s() == 0


async def test_a_pause_ends_with_its_stream() -> None:
    """At once, whether the end comes in it or before it; and by itself where the stream goes on."""
    pause = Pause()
    await pause.take(0.001)
    waiting = asyncio.create_task(pause.take(3600))
    await asyncio.sleep(0)
    assert not waiting.done()
    pause.end()
    await waiting
    await pause.take(3600)
