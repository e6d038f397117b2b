"""The load tests' arithmetic and client, without a cluster."""

import io
import json
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from loadtest import figures
from loadtest.fairness import load as client
from loadtest.fairness import report, simulation
from loadtest.fairness.load import Answer, Load, User
from loadtest.figures import HANDLE, MODELYARD, REST, Round
from serve_app import keys
from serve_app.config import GatewaySettings, RequestLimits
from tests.inprocess import model, yard

ROOT = Path(__file__).resolve().parent.parent


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


def _taken(order: report.Order, polite_wait: int, *, number: int = 1) -> report.Round:
    """A second of a flood that is answered ten times, and of a polite user that is answered once."""
    flood = [Answer(came=100 * n, wait=200, done=100 * n + 50, tokens=90, refused=n % 2) for n in range(10)]
    polite = [Answer(came=0, wait=polite_wait, done=polite_wait, tokens=100, refused=0)]
    return report.Round("flood", number, order, 1.0, 0.5, {"flood": flood, "polite": polite})


def test_a_users_figures_are_of_the_loads_time() -> None:
    """What came in the warm-up is no wait and what was done after the end is no answer; a share is of everybody's."""
    taken = _taken("fair", 300)
    early, late = Answer(-500, 9000, -100, 70, 3), Answer(900, 250, 1150, 70, 0)
    polite = [*taken.answers["polite"], early, late]
    more = replace(taken, answers={**taken.answers, "polite": polite})
    found = report.figures(more, "polite")
    assert (found.answered, found.refused, found.tokens_s, found.share) == (1, 0, 100.0, 0.1)
    assert (found.wait_p50, found.wait_p99) == (275, 300)
    assert report.figures(more, "flood").refused == 5


@pytest.mark.parametrize(("share", "value"), [(0.01, 1), (0.5, 50), (0.99, 99), (1.0, 100)])
def test_a_percentile_is_one_of_the_values(share: float, value: int) -> None:
    """The nearest rank, so that of few values it is one that was seen."""
    assert figures.percentile(range(1, 101), share) == value
    assert figures.percentile([7], share) == 7


def test_the_fairness_table_is_made_of_ratios_within_a_round() -> None:
    """A round on a slow machine, where everything takes ten times as long, changes no ratio."""
    waits: dict[report.Order, int] = {"alone": 30, "arrival": 600, "fair": 60}
    rounds = [_taken(order, by * wait, number=by) for by in (1, 10) for order, wait in waits.items()]
    found = {(row[0], row[1]): row[2:] for row in report.rows(rounds, "flood")}
    assert found["polite", "fair"][-4:] == ["2.0", "2.0", "0.10", "0.10"]
    assert found["polite", "of arrival"][-4:] == ["20", "20", "1", "1"]
    assert found["flood", "fair"][-4:] == ["1.0", "1.0", "1.0", "1.0"]


def test_raw_answers_are_read_as_they_were_written(tmp_path: Path) -> None:
    """The tables can be made anew from the file alone."""
    rounds = [_taken("alone", 30), _taken("fair", 60)]
    report.write(tmp_path / "raw.jsonl", {"commit": "x"}, rounds)
    assert report.read(tmp_path / "raw.jsonl") == ({"commit": "x"}, rounds)


def test_the_tables_of_the_docs_are_those_of_the_raw_answers() -> None:
    """Row by row."""
    text = (ROOT / "docs" / "fairness.md").read_text()
    (name,) = set(re.findall(r"loadtest/results/(fairness-\d[\w-]*\.jsonl)", text))
    _, rounds = report.read(ROOT / "loadtest" / "results" / name)
    for scenario in {one.scenario for one in rounds}:
        for row in report.rows(rounds, scenario):
            assert f"| {' | '.join(row)} |" in text


async def test_the_client_waits_for_a_flood_only_where_all_send_one_key(tmp_path: Path) -> None:
    """Against the gateway in one process: with a key of its own the polite user is not refused and waits less."""
    made = {name: keys.make(name) for name in ("everybody", "flood", "polite")}
    file = tmp_path / "keys.yaml"
    file.write_text(json.dumps({"keys": [entry for _, entry in made.values()]}))
    taken = {}
    async with yard(model("m", slots=4, limits=RequestLimits(max_waiting=10))) as y:
        y.relay.settings = GatewaySettings(keys_file=str(file))
        for order, sent in (("arrival", ("everybody", "everybody")), ("fair", ("flood", "polite"))):
            flood, polite = (made[name][0] for name in sent)
            users = (User("flood", 18, flood), User("polite", 1, polite))
            pace = {"first_token_s": 0.01, "interval_s": 0.002, "warm_up_s": 0.2, "pause_s": 0.1}
            load = Load(y.port, "m", users, 0.8, **pace, seed=1)
            taken[order] = await client.take(load)
            await y.quiet()
    assert sum(answer.refused for answer in taken["fair"]["flood"])
    assert not any(answer.refused for answer in taken["fair"]["polite"])
    wait = {order: statistics.median(answer.wait for answer in found["polite"]) for order, found in taken.items()}
    assert wait["fair"] < wait["arrival"]
