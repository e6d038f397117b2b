"""The simulator of scaling: what goes in comes out, the same every time."""

from random import Random
from typing import Any
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st
from ray.serve import autoscaling_policy
from ray.serve.autoscaling_policy import default_autoscaling_policy

from loadtest.scaling import traces
from loadtest.scaling.fleet import Fleet, ModelSpec, Pool
from loadtest.scaling.replay import Run, replay
from loadtest.scaling.scenarios import LLAMA_8B
from loadtest.scaling.systems import Modelyard, Serve, ServeSettings, Static

MINUTES = 300.0
# What Serve does around every policy. Not public; a change must be noticed here.
SERVES_WRAPPER = autoscaling_policy._apply_autoscaling_config


def run(system: object, seed: int = 1) -> Run:
    spec = ModelSpec("chat", LLAMA_8B, 1, 4, start_s=20.0)
    requests = traces.synthetic(traces.ramp(1, 30, MINUTES), MINUTES, seed)
    return replay({spec: requests}, system, gpus=4, seconds=MINUTES, seed=seed)["chat"]  # type: ignore[arg-type]


def test_every_request_ends_once() -> None:
    """Answered whole, first token before last, or refused; under each system."""
    for system in (Modelyard, Serve, lambda _fleet: Static(4)):
        for request in run(system).requests:
            if request.refused:
                assert request.ended_s is None
            else:
                assert request.first_s is not None
                assert request.ended_s is not None
                assert request.at_s <= request.first_s <= request.ended_s
                assert request.done == request.output


def test_a_static_fleet_costs_what_it_holds() -> None:
    """Four GPUs for the whole time, and nobody waits for long."""
    found = run(lambda _fleet: Static(4))
    assert abs(found.gpu_s - 4 * MINUTES) < 4
    assert not any(request.refused for request in found.requests)


def test_a_seed_decides_everything() -> None:
    """Two runs are equal, and another seed is another run."""
    first, again, other = run(Modelyard), run(Modelyard), run(Modelyard, seed=2)
    assert [r.ended_s for r in first.requests] == [r.ended_s for r in again.requests]
    assert first.wanted == again.wanted
    assert [r.at_s for r in first.requests] != [r.at_s for r in other.requests]


@given(st.lists(st.integers(0, 60), min_size=5, max_size=60), st.integers(0, 1))
def test_serves_policy_is_replayed_as_serve_runs_it(loads: list[int], least: int) -> None:
    """The same loads, ten seconds apart, through the simulator's copy of Serve's delays and through Serve's own
    wrapper: the same replicas at every tick."""
    spec = ModelSpec("chat", LLAMA_8B, least, 8, start_s=0.0)
    fleet = Fleet(spec, Pool(8), Random(1))
    fleet.begin(1)
    simulated = Serve(fleet, ServeSettings(look_back_s=1.0, interval_s=1.0))
    state: dict[str, Any] = {}
    real = fleet.wanted
    for tick, load in enumerate(loads):
        now = 10.0 * tick
        context = simulated.context(now, float(load))
        context.policy_state, context.target_num_replicas = state, real
        with mock.patch("time.time", return_value=now):
            real, state = SERVES_WRAPPER(default_autoscaling_policy)(context)
        real = min(max(real, least), 8)  # by whoever calls the wrapper
        fleet.wanted = simulated.decide(now, float(load))
        assert fleet.wanted == real
