"""The arithmetic of the load tests, without a cluster."""

import io

import pytest
from rich.console import Console

from loadtest import figures
from loadtest.fairness import simulation
from loadtest.figures import HANDLE, MODELYARD, REST, Round


def _round(system: figures.System, cpu_s: dict[str, float], chunks: int = 1000, seconds: float = 2.0) -> Round:
    return Round(system.key, chunks, seconds, cpu_s, ttft_s=(0.2, 0.4), ttft_alone_s=(0.003,), load_average=1.0)


def _rounds(gateway_s: float) -> list[Round]:
    ours = {"HAProxy": 0.01, "gateway replica": gateway_s, "engine replica": 9.0, REST: 9.0}
    theirs = {"Serve's proxy": 0.2, "ingress replica": 0.3, "engine replica": 9.0}
    return [_round(MODELYARD, ours), _round(HANDLE, theirs)]


def test_cost_counts_proxy_and_gateway_and_nothing_else() -> None:
    """Milliseconds per 1,000 chunks, whatever the number of chunks, without the engine and the rest of Ray."""
    cpu_s = {"HAProxy": 0.02, "gateway replica": 0.06, "engine replica": 1.0, REST: 1.0}
    found = figures.cost([_round(MODELYARD, cpu_s, chunks=2000)], MODELYARD)
    assert found.median == pytest.approx(40.0)


def test_the_ratio_is_that_of_the_medians() -> None:
    """One disturbed round of either system does not move it."""
    disturbed = [_round(MODELYARD, {"gateway replica": 5.0}), _round(HANDLE, {"ingress replica": 50.0})]
    assert figures.ratio(_rounds(0.04) * 2 + disturbed) == pytest.approx(0.1)


@pytest.mark.parametrize(("gateway_s", "met"), [(0.08, True), (0.10, False)])
def test_the_goal_is_a_fifth(gateway_s: float, met: bool) -> None:
    """The verdict agrees with the number and the table says it."""
    rounds = _rounds(gateway_s)
    assert figures.met(rounds) is met
    console = Console(file=io.StringIO(), width=200)
    console.print(figures.table(rounds, "a load"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("not met" in text) is not met
    assert f"{figures.ratio(rounds):.3f}" in text


def test_cpu_time_is_the_difference_by_role() -> None:
    """Processes of one role add up; what ended takes its count along, which only the rest of Ray may do."""
    roles = {1: "gateway replica", 2: "gateway replica", 3: REST}
    assert figures.used({1: 1.0, 2: 2.0, 3: 3.0}, {1: 1.5, 2: 2.25}, roles) == {"gateway replica": 0.75}
    with pytest.raises(KeyError, match="gateway replica"):
        figures.used({1: 1.0, 2: 2.0, 3: 3.0}, {1: 1.5, 3: 3.0}, roles)


@pytest.mark.parametrize(
    ("title", "role"),
    [
        ("ray::ServeReplica:gateway:Gateway", "gateway replica"),
        ("ray::ProxyActor.listen_for_change", "Serve's fallback proxy"),
        ("ray::ServeReplica:fake:Model   ", "engine replica"),
        ("haproxy", "HAProxy"),
        ("/usr/bin/python3.11 -m haproxy", REST),
    ],
)
def test_a_process_is_known_by_its_title(title: str, role: str) -> None:
    """Also while one of its methods runs, whose name Ray then adds."""
    assert MODELYARD.role_of(title) == role


def test_a_polite_key_waits_for_a_flood_only_in_order_of_arrival() -> None:
    """The demonstration, smaller. (The first request of each came before the queue was full.)"""
    load = simulation.Load(slots=4, tokens_s=50.0, flood=40, pause_s=1.0, requests=20)
    fifo, fair = (simulation.queue_times(load, ticket) for ticket in (simulation.in_order_of_arrival, simulation.fair))
    assert max(fair[simulation.POLITE][1:]) < min(fifo[simulation.POLITE][1:]) / 2
