"""Serve's side of scaling, with Serve's own context and its own wrapper around policies."""

from dataclasses import replace
from typing import Any

import pytest
from ray.serve import autoscaling_policy
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from serve_app import signal_board
from serve_app.config import Scaling
from serve_app.policy import as_numbers, card_signals, from_numbers, queue_depth
from serve_app.scaling import Signals

# What Serve does with every policy: its delays, factors and cold start. Not public; a change must be noticed here.
wrapped = autoscaling_policy._apply_autoscaling_config

QUIET = Signals(replicas=4, running=0, waiting=0, kv_usage=0.0, held=0, slots=8)


class Point:
    """As Serve's ``TimeStampedValue``."""

    def __init__(self, timestamp: float, value: float) -> None:
        self.timestamp = timestamp
        self.value = value


class Serve:
    """As much of Serve's controller as a policy sees: one deployment, its own defaults for delays, one tick a call."""

    def __init__(self, policy: Any, *, target: int, **bounds: int) -> None:
        self.config = AutoscalingConfig(**bounds)
        self.policy = wrapped(policy)
        self.target = target
        self.state: dict[str, Any] = {}
        self.metrics: dict[str, Any] = {}
        self.queued = 0.0

    def tick(self, running: int | None = None) -> int:
        context = AutoscalingContext(
            deployment_id=None,  # type: ignore[arg-type]
            deployment_name="Model",
            app_name="m",
            current_num_replicas=self.target if running is None else running,
            target_num_replicas=self.target,
            running_replicas=list({r for by in self.metrics.values() for r in by}),
            total_num_requests=self.queued,
            total_queued_requests=None,
            aggregated_metrics=None,
            raw_metrics=self.metrics,
            capacity_adjusted_min_replicas=self.config.min_replicas,
            capacity_adjusted_max_replicas=self.config.max_replicas,
            policy_state=self.state,
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=None,
            config=self.config,
        )
        self.target, self.state = self.policy(context)
        return self.target


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> "list[float]":
    """``time.monotonic`` of the policies: ``clock[0]``."""
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(signal_board, "_BOARD", {})
    return now


def told(signals: Signals, scaling: Scaling, stamp: float) -> None:
    signal_board.tell("m", as_numbers(signals, scaling), stamp)


def test_numbers_survive_the_way_through_serve() -> None:
    """Serve carries floats by name; bounds, flags and what is not known come out as they went in."""
    for signals in (QUIET, Signals(1, 2, 3, 0.5, 4, 5, placeable=0)):
        for scaling in (Scaling(), Scaling(target_queue=0.5, idle_s=3, wait_for_nodes=True)):
            assert from_numbers(as_numbers(signals, scaling)) == (signals, scaling)


def test_serves_own_delays_and_factors_are_switched_off(clock: list[float]) -> None:
    """What was decided is done in that tick, up and down, although the file leaves Serve's 30 s and 600 s in place."""
    serve = Serve(queue_depth, target=1, min_replicas=1, max_replicas=8)
    busy = Signals(replicas=1, running=8, waiting=8, kv_usage=0.5, held=40, slots=8)
    seen = []
    for _ in range(4):
        told(busy, Scaling(), clock[0])
        seen.append(serve.tick())
        clock[0] += 1
    assert seen[:2] == [1, 5]
    serve.target = 4
    for _ in range(8):
        told(QUIET, Scaling(down_after_s=1), clock[0])
        serve.tick()
        clock[0] += 1
    assert serve.target == 1


def test_serve_wakes_a_model_and_the_policy_lets_it_start(clock: list[float]) -> None:
    """One pending call at zero is Serve's own cold start. While somebody waits nothing puts it to sleep, however long
    it takes; afterwards it sleeps once idle."""
    serve = Serve(queue_depth, target=0, min_replicas=0, max_replicas=2)
    scaling = Scaling(idle_s=5)
    empty = Signals(replicas=0, running=0, waiting=0, kv_usage=0.0, held=0, slots=8)
    told(empty, scaling, clock[0])
    assert serve.tick() == 0
    serve.queued = 1
    assert serve.tick() == 1
    serve.queued = 0  # the call is made anew every few seconds
    for second in range(60):
        # The gateway's word of the request that it holds may come a little after Serve's own.
        told(replace(empty, held=int(second > 2)), scaling, clock[0])
        assert serve.tick(running=0) == 1
        clock[0] += 1
    seen = []
    for _ in range(8):
        told(Signals(1, 0, 0, 0.0, 0, 8), scaling, clock[0])
        seen.append(serve.tick())
        clock[0] += 1
    assert (seen[0], seen[-1]) == (1, 0)


def test_a_model_that_nobody_waits_for_does_not_start_for_ever(clock: list[float]) -> None:
    """Its client left, or it cannot start: after ``idle_s`` it is asleep again, for the next request to wake."""
    serve = Serve(queue_depth, target=0, min_replicas=0, max_replicas=2)
    empty = Signals(replicas=0, running=0, waiting=0, kv_usage=0.0, held=0, slots=8)
    told(empty, Scaling(idle_s=30), clock[0])
    serve.tick()
    serve.queued = 1
    serve.tick()
    serve.queued = 0
    seen = []
    for _ in range(40):
        told(empty, Scaling(idle_s=30), clock[0])
        seen.append(serve.tick(running=0))
        clock[0] += 1
    assert seen == [1] * 30 + [0] * 10


def test_what_is_not_known_changes_nothing(clock: list[float]) -> None:
    """Before the card speaks, and after it fell silent."""
    serve = Serve(queue_depth, target=3, min_replicas=0, max_replicas=4)
    assert serve.tick() == 3
    told(QUIET, Scaling(down_after_s=0, idle_s=0), clock[0])
    clock[0] += signal_board.STALE_S
    assert serve.tick() == 3


def test_a_fault_inside_keeps_the_number(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """An exception would keep Serve from looking at the next application."""
    serve = Serve(queue_depth, target=3, min_replicas=1, max_replicas=4)
    signal_board.tell("m", {"running": 1.0}, 1.0)
    assert serve.tick() == 3
    card = Serve(card_signals, target=1, min_replicas=1, max_replicas=1)
    card.metrics = {"running": {"r": [object()]}}
    assert card.tick() == 1


def test_the_cards_newest_numbers_are_what_the_model_is_scaled_on(clock: list[float]) -> None:
    """Two cards while one is replaced: the one that spoke last counts, as a whole."""
    card = Serve(card_signals, target=1, min_replicas=1, max_replicas=1)
    old, new = as_numbers(QUIET, Scaling()), as_numbers(QUIET, Scaling(idle_s=7))
    card.metrics = {
        name: {"old": [Point(1.0, 0.0), Point(2.0, old[name])], "new": [Point(3.0, new[name])]} for name in old
    }
    assert card.tick() == 1
    numbers = signal_board.read("m")
    assert numbers is not None
    assert from_numbers(numbers) == (QUIET, Scaling(idle_s=7))
