"""Load tests of a running endpoint, without locust: scenarios, workload, client, session, figures and files."""

import asyncio
import io
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from loadtest.load import lengths as quantiles
from loadtest.load import outputs, record, report, scenario
from loadtest.load.client import Client, Heard
from loadtest.load.lengths import Lengths
from loadtest.load.record import Answer, Run, Sample
from loadtest.load.scenario import Scenario, ScenarioFault, Target, Traffic
from loadtest.load.session import UNANSWERED, Plan, Session, headers_of
from loadtest.load.watch import look
from loadtest.load.workload import (
    CHAT,
    COMPLETIONS,
    LEAST_PAUSE_AFTER_FAILURE_S,
    Due,
    Talk,
    fit,
    of_due,
    schedule,
    schedules,
    text,
)
from loadtest.scaling import traces
from loadtest.scaling.scenarios import HOUR_S, TRACES
from serve_app.config import FakeScript
from tests.inprocess import HOST, model, yard

TARGET = Target(ttft_ms=1000, itl_ms=50, goodput=0.5, errors=0.25)
LENGTHS = quantiles.load()
FLAT = Lengths([10, 10], [4, 4])


def traffic(**given: Any) -> Traffic:
    return Traffic(**{"name": "chat", "model": "chat", "rate": ((0, 1),), **given})


def of(*kinds: Traffic, seconds: float = 10, **given: Any) -> Scenario:
    return Scenario(what="a test", seconds=seconds, target=TARGET, traffic=kinds, **given)


# Scenarios


@pytest.mark.parametrize("name", scenario.shipped())
def test_shipped_scenarios_can_be_run(name: str) -> None:
    """Each is read, and its load has requests or users."""
    found = scenario.read(scenario.find(name))
    due = schedules(found, LENGTHS, seed=1)
    rated = {each.name for each in found.traffic if each.rate}
    assert due.keys() == rated
    assert all(due.values())
    assert rated or any(each.users for each in found.traffic)


FILE = """
what: a test
seconds: 10
target: {ttft_ms: 1000, itl_ms: 50, goodput: 0.9, errors: 0}
traffic:
- {name: chat, model: chat, rate: [[0, 1]]}
"""


@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        ("goodput: 0.9", "godput: 0.9", "target.godput: unknown key; did you mean goodput?"),
        ("rate: ", "rates: ", "traffic[0].rates: unknown key; did you mean rate?"),
        ("seconds: 10", "seconds: 10\nzzz: 1", "zzz: unknown key; there are what, seconds,"),
        ("seconds: 10", "", "seconds: is missing"),
        ("seconds: 10", "seconds: true", "seconds: must be a "),
        ("goodput: 0.9", "goodput: 90", "target.goodput: must be at most 1, is 90"),
        ("[[0, 1]]", "[[5, 1], [0, 1]]", "traffic[0].rate: its seconds must not fall"),
        ("[[0, 1]]", "[[0, -1]]", "traffic[0].rate: must not be negative"),
        ("rate: [[0, 1]]", "rate: [[0, 1]], users: [[0, 1]]", "traffic[0]: needs exactly one of rate and users"),
        ("rate: [[0, 1]]", "rate: [[0, 1]], turns: 2", "traffic[0]: only users of the chat route"),
        ("rate: [[0, 1]]", "rate: [[0, 1]], judged: false", "file: none of its traffic is judged"),
        (FILE, "", "file: is empty"),
        (FILE, "a: [", "not valid YAML"),
    ],
)
def test_a_fault_is_told_with_its_path(tmp_path: Path, right: str, wrong: str, told: str) -> None:
    """And, for a key that is unknown, with the nearest right one."""
    file = tmp_path / "mine.yaml"
    file.write_text(FILE.replace(right, wrong))
    with pytest.raises(ScenarioFault) as fault:
        scenario.read(file)
    assert f"  {told}" in str(fault.value) or told in str(fault.value)
    assert str(fault.value).startswith(f"{file}:\n")


def test_the_documents_examples_are_true(tmp_path: Path) -> None:
    """The scenario that they show is the shipped one, and every shipped one is named."""
    doc = (scenario.FOLDER.parents[2] / "docs" / "loadtest.md").read_text()
    (shown,) = re.findall(r"```yaml\n(.*?)```", doc, re.DOTALL)
    (tmp_path / "shown.yaml").write_text(shown)
    assert scenario.read(tmp_path / "shown.yaml") == scenario.read(scenario.find("burst"))
    assert [name for name in scenario.shipped() if f"`{name}`" not in doc] == []


def test_every_fault_is_told_at_once(tmp_path: Path) -> None:
    """Not one per try."""
    file = tmp_path / "mine.yaml"
    file.write_text(FILE.replace("goodput", "godput").replace("seconds: 10", "seconds: 0"))
    with pytest.raises(ScenarioFault) as fault:
        scenario.read(file)
    assert len(str(fault.value).splitlines()) == 4  # the file; goodput is missing; godput; seconds


def test_a_name_near_a_scenario_is_answered_with_it(tmp_path: Path) -> None:
    """A path means itself."""
    with pytest.raises(ScenarioFault, match="did you mean steady"):
        scenario.find("stedy")
    (tmp_path / "mine.yaml").write_text(FILE)
    assert scenario.find(str(tmp_path / "mine.yaml")) == tmp_path / "mine.yaml"


# Workload


@pytest.mark.skipif(TRACES not in os.environ, reason=f"{TRACES} names no folder of traces")
def test_the_table_of_lengths_is_that_of_the_traces() -> None:
    """What is committed is what `lengths` makes of Azure's traces."""
    made = quantiles.table(traces.azure(Path(os.environ[TRACES]), 1.0, HOUR_S))
    assert made == json.loads(quantiles.FILE.read_text())


@pytest.mark.parametrize("service", ["chat", "code"])
def test_drawn_lengths_are_distributed_as_the_table_says(service: str) -> None:
    """At the quartiles, within a twentieth; never beyond the shortest and the longest."""
    table, random = LENGTHS[service], Random(1)
    drawn = [table.draw(random) for _ in range(20_000)]
    for side, wanted in ((0, table.prompt), (1, table.output)):
        values = sorted(lengths[side] for lengths in drawn)
        assert wanted[0] <= values[0] <= values[-1] <= wanted[-1]
        for quarter in (1, 2, 3):
            assert values[len(values) * quarter // 4] == pytest.approx(wanted[25 * quarter], rel=0.05)


@given(
    prompt=st.integers(1, 200_000),
    output=st.integers(1, 200_000),
    scale=st.floats(0.001, 10),
    context=st.integers(128, 200_000),
    route=st.sampled_from(["chat", "completions"]),
)
def test_a_request_fits_its_context(prompt: int, output: int, scale: float, context: int, route: str) -> None:
    """Prompt, shared prefix and answer together, whatever was drawn; and neither is empty."""
    shared = context // 4
    kind = traffic(scale=scale, context=context, route=route, shared_prefix=shared)
    short, long = fit(kind, prompt, output)
    assert short >= 1
    assert long >= 1
    assert short + long + shared <= context


def test_a_schedule_is_seeded_and_follows_its_rate() -> None:
    """The same again for the same seed; eight times as many while the rate is eight times as high."""
    kind = traffic(rate=((0, 2), (100, 2), (100, 16), (200, 16), (200, 2)))
    made = schedule(kind, 300, LENGTHS["chat"], seed=3)
    assert made == schedule(kind, 300, LENGTHS["chat"], seed=3)
    assert made != schedule(kind, 300, LENGTHS["chat"], seed=4)
    assert [each.at for each in made] == sorted(each.at for each in made)
    inside = sum(100 <= each.at < 200 for each in made)
    assert inside == pytest.approx(1600, rel=0.1)
    assert len(made) - inside == pytest.approx(400, rel=0.2)


def test_a_rate_of_nothing_sends_nothing() -> None:
    """And does not divide by it."""
    assert schedule(traffic(rate=((0, 0),)), 10, FLAT, seed=1) == []


def write_traces(folder: Path) -> None:
    head, day = "TIMESTAMP,ContextTokens,GeneratedTokens\n", "2023-11-16 18:00:0"
    (folder / traces.AZURE["chat"]).write_text(f"{head}{day}0.0000000,100,20\n{day}4.0000000,200,10\n")
    (folder / traces.AZURE["code"]).write_text(f"{head}{day}2.5000000,300,0\n")


def test_a_trace_takes_the_place_of_a_rate(tmp_path: Path) -> None:
    """Arrivals at so many times its speed, lengths scaled; an answer has a token at least; users stay what they are."""
    write_traces(tmp_path)
    kinds = (
        traffic(scale=0.1),
        traffic(name="code", lengths="code", route="completions"),
        traffic(name="people", rate=None, users=((0, 1),)),
    )
    made = schedules(of(*kinds), LENGTHS, seed=1, trace=tmp_path, speed=2.0)
    assert made == {"chat": [Due(0.0, 10, 2), Due(2.0, 20, 1)], "code": [Due(1.25, 300, 1)]}


@pytest.mark.parametrize("broken", ["missing", "another file", "no numbers"])
def test_a_trace_that_cannot_be_read_is_a_fault(tmp_path: Path, broken: str) -> None:
    """With its folder, and no traceback."""
    if broken != "missing":
        write_traces(tmp_path)
        other = "a,b\n1,2\n" if broken == "another file" else "TIMESTAMP,ContextTokens,GeneratedTokens\nx,y,z\n"
        (tmp_path / traces.AZURE["code"]).write_text(other)
    with pytest.raises(ScenarioFault, match=str(tmp_path)):
        schedules(of(traffic()), LENGTHS, seed=1, trace=tmp_path)


def test_a_trace_without_a_rate_to_replace_is_refused(tmp_path: Path) -> None:
    """Rather than ignored."""
    with pytest.raises(ScenarioFault, match="rate"):
        schedules(of(traffic(rate=None, users=((0, 1),))), LENGTHS, seed=1, trace=tmp_path)


def test_bodies_stream_and_count() -> None:
    """Of both routes: so many words and tokens, usage at the end; texts differ, but for the shared prefix."""
    chat = traffic(shared_prefix=7, fields={"top_k": 3})
    first, second = (of_due(chat, Due(0, 5, 9), seed=1, number=number) for number in (0, 1))
    assert first["messages"][0] == second["messages"][0]
    assert len(first["messages"][0]["content"].split()) == 7
    assert first["messages"][1] != second["messages"][1]
    assert (first["max_tokens"], first["stream"], first["stream_options"]) == (9, True, {"include_usage": True})
    assert first["top_k"] == 3
    code = of_due(traffic(route="completions"), Due(0, 50, 9), seed=1, number=0)
    assert len(code["prompt"].split()) == 50
    assert "messages" not in code


def test_a_conversation_sends_all_that_was_said_before() -> None:
    """Turn after turn; all conversations of a traffic begin alike, and no two go on alike."""
    kind = traffic(rate=None, users=((0, 1),), turns=3, shared_prefix=5)
    one, other = (Talk(kind, LENGTHS["chat"], seed=1, number=number) for number in (0, 1))
    bodies = []
    while not one.over:
        bodies.append(json.loads(json.dumps(one.ask())))
        one.hear(f"answer {one.turn}")
    assert [[m["role"] for m in body["messages"]] for body in bodies] == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
        ["system", "user", "assistant", "user", "assistant", "user"],
    ]
    assert bodies[2]["messages"][:4] == bodies[1]["messages"]
    assert bodies[1]["messages"][2]["content"] == "answer 0"
    elsewhere = other.ask()["messages"]
    assert elsewhere[0] == bodies[0]["messages"][0]
    assert elsewhere[1] != bodies[0]["messages"][1]


def test_text_has_as_many_words_as_tokens() -> None:
    """And is the same for the same seed."""
    assert len(text(Random(1), 1000).split()) == 1000
    assert text(Random(1), 10) == text(Random(1), 10)


# The client


async def ask(
    port: int, body: dict[str, Any], path: str = CHAT, silence_s: float = 60.0, with_text: bool = False
) -> Heard:
    """In a thread: gevent's loop would hold up the gateway's."""
    heard = Heard()
    client = Client(f"http://{HOST}:{port}/v1", silence_s)
    await asyncio.to_thread(client.ask, path, body, {}, heard, with_text)
    return heard


def asked(tokens: int = 4, name: str = "chat", **fake: Any) -> dict[str, Any]:
    return of_due(traffic(model=name, fields={"fake": fake}), Due(0, 6, tokens), seed=1, number=0)


async def test_the_client_counts_tokens_and_times_them() -> None:
    """By usage; a time for each event with a token, in order, none for the one that only names the role."""
    async with yard(model("chat", script=FakeScript(first_token_s=0.05, token_interval_s=0.01))) as y:
        heard = await ask(y.port, asked(4), with_text=True)
        await y.quiet()
    assert (heard.error, heard.events.tokens, heard.events.prompt_tokens) == ("", 4, 6)
    times = heard.events.times
    assert len(times) == 4
    assert heard.sent + 0.04 < times[0] < times[-1] <= heard.ended
    assert times == sorted(times)
    assert heard.text == "t0 t1 t2 t3 "


async def test_a_completion_is_heard_too() -> None:
    """On the other route, whose events name no role."""
    async with yard(model("chat")) as y:
        code = traffic(route="completions")
        heard = await ask(y.port, of_due(code, Due(0, 6, 3), seed=1, number=0), COMPLETIONS)
    assert (heard.error, heard.events.tokens, len(heard.events.times)) == ("", 3, 3)


async def test_a_token_is_noted_when_it_comes() -> None:
    """However few bytes it has: the first two of a stream that then hangs are there, and the engine is freed."""
    async with yard(model("chat")) as y:
        heard = await ask(y.port, asked(4, hang=2), silence_s=1.0)
        await y.quiet()
    assert (heard.error, len(heard.events.times)) == ("timeout", 2)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (asked(status=429), "HTTP 429 rate_limit_error"),
        (asked(name="nobody"), "HTTP 404 model_not_found"),
        (asked(fail=2), "error event upstream_error"),
        (asked(fail=0), "error event upstream_error"),
    ],
)
async def test_an_error_has_its_kind(body: dict[str, Any], error: str) -> None:
    """The status, or that it came as an event, and the endpoint's own word for it; nothing of its message."""
    async with yard(model("chat")) as y:
        assert (await ask(y.port, body)).error == error


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TOKEN = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
END = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (HEAD + chunk(TOKEN), "cut"),
        (HEAD + chunk(TOKEN) + b"0\r\n\r\n", "cut"),
        (HEAD + chunk(TOKEN + END) + b"0\r\n\r\n", "no tokens"),  # without usage nothing can be counted
        (HEAD + chunk(END) + b"0\r\n\r\n", "no tokens"),
        (b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 6\r\n\r\n<html>", "HTTP 502"),
        (b"", "no answer: http connection closed"),
    ],
)
async def test_a_broken_answer_has_its_kind(answer: bytes, error: str) -> None:
    """Cut at any place, or no answer of such an endpoint."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        writer.write(answer)
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(serve, HOST, 0) as server:
        assert (await ask(server.sockets[0].getsockname()[1], asked())).error == error


async def test_nobody_there_is_an_error_of_its_own() -> None:
    """A port that nobody listens at."""
    server = await asyncio.start_server(lambda *_: None, HOST, 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    assert (await ask(port, asked())).error == "no answer: connection refused"


# The session


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def session(found: Scenario, clock: Callable[[], float]) -> Session:
    lengths = {"chat": FLAT, "code": FLAT}
    plan = Plan("test", f"http://{HOST}:1", found, lengths, schedules(found, lengths, seed=1), seed=1)
    return Session(plan, lambda answer, kind: None, clock)


def test_users_follow_the_scenario() -> None:
    """Straight lines between its points, and steps."""
    found = of(traffic(), traffic(name="people", rate=None, users=((0, 0), (10, 10), (10, 40), (20, 40))))
    plan = session(found, Clock()).plan
    assert [plan.wanted(at)["people"] for at in (0, 5, 10, 10.1, 15, 99)] == [0, 5, 10, 40, 40, 40]
    assert [each.name for each in plan.rated] == ["chat"]


def test_conversations_go_where_users_lack() -> None:
    """So that each traffic gets its number, whichever of locust's users come and go."""
    kinds = [traffic(name=name, rate=None, users=((0, count),)) for name, count in (("few", 1), ("many", 3))]
    found = session(of(*kinds), Clock())
    talks = [found.talk() for _ in range(4)]
    assert sorted(talk.traffic.name for talk in talks) == ["few", "many", "many", "many"]
    few = next(talk for talk in talks if talk.traffic.name == "few")
    found.leave(few)
    assert found.talk().traffic.name == "few"


def test_a_test_is_over_when_the_last_answer_is_there_or_had_its_time() -> None:
    """Not at the end of the requests, nor never."""
    clock = Clock()
    found = session(of(traffic(), seconds=10, drain_s=30), clock)
    assert (found.sending, found.over) == (True, False)
    clock.now += 10
    assert (found.sending, found.over) == (False, True)
    found._open[1] = (traffic(), 9.0, Heard(109.0))
    assert not found.over
    clock.now += 30
    assert found.over
    found.end()
    (answer,) = found.result({}).answers
    assert (answer.error, answer.came, answer.last) == (UNANSWERED, 9.0, 31_000.0)


def test_an_interrupted_test_does_not_count_what_was_open() -> None:
    """Its requests had no time to be answered."""
    clock = Clock()
    found = session(of(traffic(), seconds=10), clock)
    clock.now += 4
    found._open[1] = (traffic(), 3.0, Heard(103.0))
    found.end()
    run = found.result({})
    assert (run.seconds, run.left, run.whole, list(run.answers)) == (4.0, 1, False, [])


def test_who_was_refused_pauses() -> None:
    """Also a user who never pauses: it would otherwise ask as fast as it is refused."""
    kind = traffic(rate=None, users=((0, 1),), pause_s=0)
    talk = Talk(kind, FLAT, seed=1, number=1)
    assert talk.pause_s(failed=False) == 0
    assert talk.pause_s(failed=True) == LEAST_PAUSE_AFTER_FAILURE_S
    slow = replace(talk, traffic=kind.model_copy(update={"pause_s": 2}))
    drawn = [slow.pause_s(failed=False) for _ in range(2000)]
    assert sum(drawn) / len(drawn) == pytest.approx(2, rel=0.1)


def test_each_traffic_sends_its_own_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the variable that it names; none where that is not set."""
    monkeypatch.setenv("MINE", "my-key")
    monkeypatch.delenv("OTHER", raising=False)
    assert headers_of(traffic(key_variable="MINE")) == {"authorization": "Bearer my-key"}
    assert headers_of(traffic(key_variable="OTHER", keep_alive=True)) == {"x-modelyard-keep-alive": "1"}


READY = {
    "models": {
        "chat": {
            "state": "ready",
            "replicas": 2,
            "held": 3,
            "engines": {"running": 8, "waiting": 5},
            "also_known_as": ["org/chat"],
            "adapters": [],
        },
        "other": {
            "state": "asleep",
            "replicas": 0,
            "held": 1,
            "engines": None,
            "also_known_as": [],
            "adapters": ["tuned"],
        },
    }
}


@pytest.mark.parametrize(
    ("answer", "asked", "samples"),
    [
        (httpx.Response(200, json=READY), "org/chat", [Sample(1.5, "chat", "ready", 2, 3, 5)]),
        (httpx.Response(200, json=READY), "tuned", [Sample(1.5, "other", "asleep", 0, 1, None)]),
        (httpx.Response(200, json={"status": "ready"}), "chat", []),  # to whoever has no key
        (httpx.Response(404, text="<html>"), "chat", []),
        (httpx.ConnectError("gone"), "chat", []),
    ],
)
def test_ready_is_sampled(answer: httpx.Response | httpx.HTTPError, asked: str, samples: list[Sample]) -> None:
    """The models under load, also by another of their ids; what tells nothing gives nothing and stops nothing."""

    def tell(_: httpx.Request) -> httpx.Response:
        if isinstance(answer, httpx.HTTPError):
            raise answer
        return answer

    with httpx.Client(base_url="http://test", transport=httpx.MockTransport(tell)) as client:
        assert look(client, {asked}, at=1.5) == samples


# Figures


def answer(came: float, first: float | None = 100, last: float = 300, tokens: int = 5, error: str = "") -> Answer:
    return Answer("chat", came, 0.0, first, last, 60.0, tokens, 20, tokens, error)


GOOD, LATE, SLOW = answer(0.5), answer(1.5, 2000, 2200), answer(2.5, 100, 1000)
REFUSED, BROKEN = answer(3.5, None, 10, 0, "HTTP 429 rate"), answer(3.6, 100, 200, 0, "cut")


def run_of(*answers: Answer, kinds: tuple[Traffic, ...] = (traffic(),), **target: float) -> Run:
    found = replace_target(of(*kinds), **target)
    return Run("test", {"commit": "abc"}, found, 10.0, 0, list(answers), [Sample(0.0, "chat", "ready", 2, 1, 0)])


def replace_target(found: Scenario, **target: float) -> Scenario:
    return found.model_copy(update={"target": TARGET.model_copy(update=target)})


def test_why_an_answer_is_not_good() -> None:
    """A late first token, slow ones, a failure; a single token cannot be slow."""
    assert GOOD.itl == 50.0
    assert [each.miss(TARGET) for each in (GOOD, LATE, SLOW, REFUSED, BROKEN, answer(0, tokens=1))] == [
        "",
        "first token late",
        "tokens slow",
        "failed",
        "failed",
        "",
    ]


def test_figures_of_known_answers() -> None:
    """Each worked out by hand. What failed has no tokens and no times between them, but a first token if it came."""
    found = report.figures([GOOD, LATE, SLOW, REFUSED, BROKEN], TARGET)
    assert (found.requests, found.failed, found.good) == (5, 2, 1)
    assert (found.ttft_p50, found.ttft_p90, found.ttft_p99) == (100, 2000, 2000)
    assert (found.itl_p50, found.itl_p99) == (50.0, 225.0)
    assert (found.prompt_mean, found.output_mean) == (20, 5)
    assert found.tokens_s == pytest.approx(15 / (3.7 - 0.5))  # from the first request to LATE's last token
    nothing = report.figures([], TARGET)
    assert (nothing.ttft_p99, nothing.tokens_s, nothing.requests) == (None, 0.0, 0)


def test_time_is_cut_into_bins() -> None:
    """Requests count where they came, tokens and waiting where they were; together they are all of them."""
    run = run_of(GOOD, LATE, SLOW, REFUSED, BROKEN)
    found = report.bins(run)
    assert [each.at for each in found] == [float(at) for at in range(10)]
    assert [each.requests for each in found][:5] == [1, 1, 1, 2, 0]
    assert found[3].errors == {"HTTP 429 rate": 1, "cut": 1}
    assert sum(each.tokens_s * each.width for each in found) == pytest.approx(15)
    assert [round(each.waiting, 3) for each in found[:5]] == [0.1, 0.5, 1.1, 0.61, 0.0]
    assert found[0].streaming == pytest.approx(0.2)


def test_the_queue_is_that_of_all_models() -> None:
    """At gateways and in engines, each time that the endpoint was asked; an engine that tells nothing adds nothing."""
    chat = [Sample(0.0, "chat", "ready", 1, 3, 5), Sample(1.0, "chat", "ready", 2, 0, 4)]
    other = [Sample(0.0, "other", "asleep", 0, 2, None), Sample(1.0, "other", "ready", 1, 1, 1)]
    run = replace(run_of(GOOD), samples=sorted([*chat, *other]))
    assert report.queues(run) == [report.Queue(0.0, 5, 5), report.Queue(1.0, 1, 5)]


@pytest.mark.parametrize(("seconds", "width"), [(10, 1), (120, 2), (600, 10), (100_000, 1667)])
def test_a_long_test_has_wide_bins(seconds: float, width: float) -> None:
    """Sixty at most."""
    found = report.bins(replace(run_of(GOOD), seconds=seconds))
    assert {each.width for each in found} == {width}
    assert len(found) <= 60


@pytest.mark.parametrize(
    ("target", "met"),
    [
        ({"goodput": 0.2, "errors": 0.4}, True),
        ({"goodput": 0.21, "errors": 0.4}, False),
        ({"goodput": 0.2, "errors": 0.39}, False),
        ({"goodput": 0.2, "errors": 0.4, "ttft_p99_ms": 2000, "itl_p99_ms": 225}, True),
        ({"goodput": 0.2, "errors": 0.4, "ttft_p99_ms": 1999}, False),
        ({"goodput": 0.2, "errors": 0.4, "itl_p99_ms": 224}, False),
    ],
)
def test_the_target_is_met_or_not(target: dict[str, float], met: bool) -> None:
    """Exactly at each bound it is; the exit status says it."""
    run = run_of(GOOD, LATE, SLOW, REFUSED, BROKEN, **target)
    assert report.met(run) is met
    assert outputs.status(run) == (outputs.MET if met else outputs.MISSED)


def test_traffic_that_is_not_judged_cannot_miss_the_target() -> None:
    """A flood may be refused; it is in the table all the same."""
    kinds = (traffic(), traffic(name="flood", judged=False))
    flood = [REFUSED._replace(traffic="flood")] * 9
    run = run_of(GOOD, *flood, kinds=kinds, goodput=1.0, errors=0.0)
    assert report.met(run)
    assert [row[:3] for row in outputs.rows(run)] == [("chat", "1", "0"), ("flood", "9", "9")]


def test_no_answer_is_neither_met_nor_missed() -> None:
    """It has a status of its own, as an interrupted test has."""
    assert outputs.status(run_of(REFUSED, goodput=0, errors=1)) == outputs.NOTHING
    assert outputs.status(run_of()) == outputs.NOTHING
    assert not report.met(run_of())
    assert outputs.status(replace(run_of(GOOD), seconds=3.0)) == outputs.INTERRUPTED


# Files


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    """All answers and samples; the report is there for others, and the page and the picture beside it."""
    run = run_of(GOOD, LATE, SLOW, REFUSED, BROKEN)
    file = outputs.write(run, tmp_path / "new", "test-1.5")
    assert record.read(file) == run
    document = json.loads(file.read_text())
    assert document["report"] == json.loads(json.dumps(report.document(run)))
    assert document["report"]["traffic"]["chat"]["failed"] == 2
    assert file.name == "test-1.5.json"
    assert (tmp_path / "new" / "test-1.5.png").read_bytes().startswith(b"\x89PNG")
    console = Console(file=io.StringIO(), width=120)
    outputs.show(file, console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "1 failed: HTTP 429 rate" in shown
    assert "missed good answers: 20.0% (at least 50.0%)" in shown
    assert "2 failed, 1 first token late, 1 tokens slow" in shown


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    """By its name."""
    (tmp_path / "other.json").write_text('{"name": "x"}')
    with pytest.raises(ValueError, match=r"other\.json is no load test's result"):
        record.read(tmp_path / "other.json")


def test_the_page_stands_alone(tmp_path: Path) -> None:
    """Figures, picture and errors in one file that loads nothing; what a scenario says is text, not markup."""
    run = run_of(GOOD, REFUSED)
    run = replace(run, scenario=run.scenario.model_copy(update={"what": "<script>alert(1)</script>"}))
    page = outputs.write(run, tmp_path, "test").with_suffix(".html").read_text()
    assert "&lt;script&gt;alert" in page
    assert "<script" not in page
    assert "<svg" in page
    assert "HTTP 429 rate" in page
    assert not [part for part in ("src=", "@import", "<link") if part in page]


def test_a_slow_client_says_so() -> None:
    """Its delay counts in the times, so a reader must know of it."""
    said = list(outputs.remarks(run_of(GOOD._replace(late=500.0))))
    assert any("500 ms after it was due" in line for line in said)
    assert not any("after it was due" in line for line in outputs.remarks(run_of(GOOD)))


def test_medians_are_of_the_traffic_they_stand_beside() -> None:
    """Two kinds of traffic are never mixed in a row of the table."""
    kinds = (traffic(), traffic(name="code"))
    fast, slow = [answer(0, 10 + n) for n in range(3)], [answer(0, 500 + n)._replace(traffic="code") for n in range(3)]
    chat, code = outputs.rows(run_of(*fast, *slow, kinds=kinds))
    assert (chat[4], code[4]) == (outputs.number(median([10, 11, 12])), outputs.number(501))
