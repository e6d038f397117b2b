"""The simulator of scaling: what goes in comes out, the same every time."""

from loadtest.scaling import traces
from loadtest.scaling.fleet import ModelSpec
from loadtest.scaling.replay import Run, replay
from loadtest.scaling.scenarios import CHAT
from loadtest.scaling.systems import Modelyard, Serve, Static

MINUTES = 300.0


def run(system: object, seed: int = 1) -> Run:
    spec = ModelSpec("chat", CHAT, 1, 4, start_s=20.0)
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
