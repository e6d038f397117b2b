"""What is told of each request when it is over: exactly once, in few labels, with nothing of what it said."""

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app import errors, keys, serve_log, signals
from serve_app.catalog import State
from serve_app.config import FakeScript, GatewaySettings, Name, RequestLimits
from serve_app.gateway.answer import Answer
from serve_app.gateway.meters import in_ray
from serve_app.gateway.record import Record, reason_of
from serve_app.gateway.upstream import Head
from serve_app.lease import Counted
from tests.inprocess import Noted, Yard, eventually, model, yard

CHAT = "/v1/chat/completions"
SECRET = "what-the-prompt-says"

Line = dict[str, Any]


@pytest.fixture
def lines() -> Iterator[list[Line]]:
    """The access log's lines, parsed."""
    seen: list[Line] = []

    class Reader(logging.Handler):
        def emit(self, entry: logging.LogRecord) -> None:
            assert entry.serve_access_log is True  # type: ignore[attr-defined]
            assert SECRET not in entry.getMessage()
            seen.append(json.loads(entry.getMessage()))

    reader, level = Reader(), serve_log.access.level
    serve_log.access.addHandler(reader)
    serve_log.access.setLevel(logging.INFO)
    yield seen
    serve_log.access.removeHandler(reader)
    serve_log.access.setLevel(level)


def ask(tokens: int = 3, **more: Any) -> dict[str, Any]:
    return {"model": "chat", "messages": [{"role": "user", "content": f"{SECRET} b"}], "max_tokens": tokens} | more


async def over(y: Yard, lines: list[Line], requests: int = 1) -> None:
    """Until so many requests are told of, and nothing runs any more."""
    await eventually(lambda: len(lines) >= requests)
    await y.quiet()
    assert len(lines) == requests


def counts(y: Yard, metric: signals.Metric) -> dict[tuple[str, ...], int]:
    return {at[1:]: count for at, count in y.noted.counters.items() if at[0] == metric.name}


def observed(y: Yard, metric: signals.Metric) -> list[float]:
    """Of the one series that there is."""
    series = [values for at, values in y.noted.observed.items() if at[0] == metric.name]
    assert len(series) <= 1
    return series[0] if series else []


def gauges(y: Yard) -> dict[tuple[str, ...], int]:
    return {at: value for at, value in y.noted.gauges.items() if value}


async def until_begun(y: Yard) -> None:
    await eventually(lambda: any(replica.engine.report()["running"] for replica in y.models["chat"].replicas))


async def whole(y: Yard) -> None:
    assert (await y.client.post(CHAT, json=ask())).status_code == 200


async def streamed(y: Yard) -> None:
    assert (await y.client.post(CHAT, json=ask(stream=True))).status_code == 200


async def unknown_model(y: Yard) -> None:
    assert (await y.client.post(CHAT, json=ask(model="no\nsuch"))).status_code == 404


async def engine_refuses(y: Yard) -> None:
    assert (await y.client.post(CHAT, json=ask(fake={"status": 400}))).status_code == 400


async def nobody_in_time(y: Yard) -> None:
    y.models["chat"].replicas[0].alive = False
    late = {"x-modelyard-timeout-s": "0.05"}
    assert (await y.client.post(CHAT, json=ask(), headers=late)).status_code == 503


async def leaves_while_waiting(y: Yard) -> None:
    y.models["chat"].replicas[0].alive = False
    asking = asyncio.create_task(y.client.post(CHAT, json=ask()))
    await eventually(lambda: gauges(y))
    assert gauges(y) == {("modelyard_held_cold", "chat", CHAT): 1}
    asking.cancel()


async def leaves_before_the_answer(y: Yard) -> None:
    asking = asyncio.create_task(y.client.post(CHAT, json=ask(fake={"first_token_s": 60})))
    await until_begun(y)
    assert gauges(y) == {("modelyard_in_flight", "chat", CHAT): 1}
    asking.cancel()


async def leaves_the_stream(y: Yard) -> None:
    asked = ask(50, stream=True, fake={"hang": 4})
    async with y.client.stream("POST", CHAT, json=asked) as answer:
        async for part in answer.aiter_lines():
            if "t3" in part:
                break


async def breaks(y: Yard) -> None:
    y.models["chat"].limits = RequestLimits(hold_s=0.1, wait_s=0.1)
    async with y.client.stream("POST", CHAT, json=ask(50, stream=True, fake={"hang": 4})) as answer:
        async for part in answer.aiter_lines():
            if "t3" in part:
                y.models["chat"].replicas[0].sever()


async def engine_fails_in_the_stream(y: Yard) -> None:
    answer = await y.client.post(CHAT, json=ask(stream=True, fake={"fail": 2}))
    assert '"error"' in answer.text


OUTCOMES = [
    (whole, ("2xx", "ok"), None, {"outcome": "ok", "status": 200, "generated_tokens": 3}),
    (streamed, ("2xx", "ok"), None, {"outcome": "ok", "status": 200, "generated_tokens": 3}),
    (unknown_model, ("4xx", "model_not_found"), None, {"outcome": "refused", "status": 404, "asked": "no\nsuch"}),
    (engine_refuses, ("4xx", "engine"), None, {"outcome": "refused", "status": 400, "replica": "chat-0"}),
    (nobody_in_time, ("5xx", "model_unavailable"), None, {"outcome": "refused", "status": 503, "replica": None}),
    (leaves_while_waiting, ("4xx", "client_left"), "waiting", {"outcome": "client left", "status": 499}),
    (leaves_before_the_answer, ("4xx", "client_left"), "answering", {"outcome": "client left", "prompt_tokens": 2}),
    (leaves_the_stream, ("2xx", "client_left"), "streaming", {"outcome": "client left", "generated_tokens": 4}),
    (breaks, ("2xx", "model_unavailable"), None, {"outcome": "broken", "status": 200}),
    (engine_fails_in_the_stream, ("2xx", "engine"), None, {"outcome": "broken", "status": 200, "generated_tokens": 2}),
]


@pytest.mark.parametrize(
    ("happens", "counted", "aborted", "told"), OUTCOMES, ids=lambda it: getattr(it, "__name__", "")
)
async def test_every_outcome_is_one_line_and_one_count(
    lines: list[Line], happens: Any, counted: tuple[str, str], aborted: str | None, told: Line
) -> None:
    """And every gauge is at 0 again."""
    async with yard(model("chat")) as y:
        await happens(y)
        await over(y, lines)
        (line,) = lines
        assert line | told == line
        assert (line["engine_s"] is None) == (line["generated_tokens"] is None)
        assert len(observed(y, signals.ENGINE_TIME)) == (line["engine_s"] is not None)
        assert line["reason"] == counted[1]
        labels = ("other" if line["model"] is None else "chat", CHAT)
        assert counts(y, signals.REQUESTS) == {(*labels, *counted): 1}
        assert counts(y, signals.ABORTS) == ({(*labels, aborted): 1} if aborted else {})
        assert not gauges(y)


async def test_tokens_and_times(lines: list[Line]) -> None:
    """Of a stream: tokens as the replica counted them; waiting ends before the first token, that comes before the end,
    the pause between tokens is what the script makes it, or longer on a busy machine, and the replica has it from after
    the wait to before the end."""
    async with yard(model("chat", script=FakeScript(first_token_s=0.05, token_interval_s=0.02))) as y:
        await y.client.post(CHAT, json=ask(6, stream=True))
        await over(y, lines)
        (route,), (queue,), (first,), (whole,), (token,), (engine,) = (
            observed(y, metric)
            for metric in (
                signals.ROUTE_TIME,
                signals.QUEUE_TIME,
                signals.FIRST_TOKEN_TIME,
                signals.WHOLE_TIME,
                signals.TOKEN_TIME,
                signals.ENGINE_TIME,
            )
        )
        assert route + queue < first < whole
        assert 0.1 <= engine < whole - queue - route
        assert not observed(y, signals.COLD_TIME)
        assert first >= 0.05
        assert token >= 0.02
        assert counts(y, signals.TOKENS) == {("chat", CHAT, "prompt"): 2, ("chat", CHAT, "generated"): 6}
        (line,) = lines
        assert line["queue_s"] <= line["first_byte_s"] <= line["total_s"]
        assert [line["route_s"], line["cold_s"], line["engine_s"]] == [round(route, 4), None, round(engine, 4)]
        assert (line["prompt_tokens"], line["generated_tokens"]) == (2, 6)


async def test_a_whole_answer_has_no_first_token(lines: list[Line]) -> None:
    """Its first byte comes with its last one: it would spoil the figure for streams."""
    async with yard(model("chat")) as y:
        await whole(y)
        await over(y, lines)
        assert not observed(y, signals.FIRST_TOKEN_TIME)
        assert not observed(y, signals.TOKEN_TIME)
        assert len(observed(y, signals.WHOLE_TIME)) == 1


async def test_who_waits_for_a_model_to_wake_was_cold(lines: list[Line]) -> None:
    """All of its wait, and no other request; what came with it is in its queue time too."""
    async with yard(model("chat")) as y:
        (replica,) = y.models["chat"].replicas
        replica.alive = False
        asking = asyncio.create_task(y.client.post(CHAT, json=ask()))
        await eventually(lambda: gauges(y))
        replica.alive = True
        assert (await asking).status_code == 200
        await whole(y)
        await over(y, lines, 2)
        (cold,) = observed(y, signals.COLD_TIME)
        assert cold in observed(y, signals.QUEUE_TIME)
        assert [line["cold_s"] for line in lines] == [lines[0]["queue_s"], None]


async def test_who_waits_for_a_replica_that_died_was_cold(lines: list[Line]) -> None:
    """Also who came before anybody knew of its death and was counted as queued, and who came before all did."""
    async with yard(model("chat")) as y:
        chat = y.models["chat"]
        (replica,) = chat.replicas
        y.directory.running("chat", replica)
        replica.slots = 0
        asking = asyncio.create_task(y.client.post(CHAT, json=ask()))
        await eventually(lambda: gauges(y))
        assert gauges(y) == {("modelyard_queued", "chat", CHAT): 1}
        y.directory.running("chat")
        later = asyncio.create_task(y.client.post(CHAT, json=ask()))
        await eventually(lambda: len(gauges(y)) == 2)
        assert gauges(y)["modelyard_held_cold", "chat", CHAT] == 1
        y.directory.running("chat", replica)
        replica.slots = 2
        assert {answer.status_code for answer in await asyncio.gather(asking, later)} == {200}
        await over(y, lines, 2)
        assert [line["cold_s"] for line in lines] == [line["queue_s"] for line in lines]


async def test_who_waits_for_a_full_model_is_queued(lines: list[Line]) -> None:
    """One is with the replica, the other waits and is told how long in its header."""
    async with yard(model("chat", slots=1)) as y:
        y.models["chat"].replicas[0].freeze()
        first = asyncio.create_task(y.client.post(CHAT, json=ask()))
        await eventually(lambda: gauges(y) == {("modelyard_in_flight", "chat", CHAT): 1})
        second = asyncio.create_task(y.client.post(CHAT, json=ask()))
        await eventually(lambda: len(gauges(y)) == 2)
        assert gauges(y) == {("modelyard_in_flight", "chat", CHAT): 1, ("modelyard_queued", "chat", CHAT): 1}
        await asyncio.sleep(0.1)
        y.models["chat"].replicas[0].thaw()
        assert timing(await first)["upstream"] >= 100
        assert timing(await second)["queue"] >= 100
        await over(y, lines, 2)
        assert not gauges(y)


def timing(answer: Any) -> dict[str, float]:
    """The stages of ``Server-Timing``, in milliseconds."""
    stages = (stage.strip().split(";dur=") for stage in answer.headers["server-timing"].split(","))
    return {name: float(dur) for name, dur in stages}


@pytest.mark.parametrize("stream", [False, True])
async def test_server_timing_says_what_is_known_when_an_answer_begins(lines: list[Line], stream: bool) -> None:
    """Its stages, within the whole; a refusal that asked nobody has none."""
    async with yard(model("chat", script=FakeScript(first_token_s=0.05))) as y:
        stages = timing(await y.client.post(CHAT, json=ask(stream=stream)))
        assert set(stages) == {"route", "queue", "upstream"}
        assert stages["upstream"] >= 50
        assert "server-timing" not in (await y.client.post(CHAT, json=ask(model="no"))).headers
        await over(y, lines, 2)
        assert sum(stages.values()) <= lines[0]["first_byte_s"] * 1000 + 1


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_a_stream_ends_with_its_timing_where_that_is_asked_for(path: str) -> None:
    """As a comment behind its last event; without the header there is none."""
    async with yard(model("chat", script=FakeScript(token_interval_s=0.02))) as y:
        asked = ask(4, stream=True, prompt="x")
        told = await y.client.post(path, json=asked, headers={"x-modelyard-timing": "1"})
        *_, done, comment = told.text.removesuffix("\n\n").split("\n\n")
        assert done == "data: [DONE]"
        assert comment.startswith(": route;dur=")
        stages = dict(stage.strip().split(";dur=") for stage in comment[2:].split(","))
        assert stages.keys() == {"route", "queue", "upstream", "total"}
        assert float(stages["total"]) >= 60
        assert (await y.client.post(path, json=asked)).text.endswith("data: [DONE]\n\n")


async def test_a_stream_that_moves_is_told_once(lines: list[Line]) -> None:
    """Its replica is cut off in the middle: one request, one first token, and the tokens of the whole answer."""
    two = model("chat", replicas=2, script=FakeScript(token_interval_s=0.01))
    async with yard(two) as y:
        y.directory.running("chat", *two.replicas)
        async with y.client.stream("POST", CHAT, json=ask(20, stream=True)) as answer:
            async for part in answer.aiter_lines():
                if '"t7 "' in part:
                    busy = next(r for r in two.replicas if r.gate.busy)
                    for lease in two.pool._busy[busy.name] if two.pool else ():
                        lease.connection.close()
        await over(y, lines)
        assert y.counted == {("modelyard_moves_total", "chat", "stream", "broken"): 1}
        assert counts(y, signals.REQUESTS) == {("chat", CHAT, "2xx", "ok"): 1}
        assert counts(y, signals.TOKENS) == {("chat", CHAT, "prompt"): 2, ("chat", CHAT, "generated"): 20}
        for metric in (signals.QUEUE_TIME, signals.FIRST_TOKEN_TIME, signals.WHOLE_TIME, signals.TOKEN_TIME):
            assert len(observed(y, metric)) == 1
        other = next(r for r in two.replicas if r is not busy)
        assert (lines[0]["moves"], lines[0]["replica"]) == (1, other.name)
        assert not gauges(y)


async def test_a_fallback_counts_under_the_model_that_answered(lines: list[Line]) -> None:
    """Once; the line has the name that was asked for as well."""
    async with yard(model("big"), model("small")) as y:
        y.models["big"].state = State.FAILED
        y.relay.settings = GatewaySettings(names={"best": Name(to="big", fallback=("small",))})
        assert (await y.client.post(CHAT, json=ask(model="best"))).status_code == 200
        await over(y, lines)
        assert counts(y, signals.REQUESTS) == {("small", CHAT, "2xx", "ok"): 1}
        assert (lines[0]["asked"], lines[0]["model"]) == ("best", "small")


async def test_a_wait_in_vain_counts(lines: list[Line]) -> None:
    """For a model that does not wake, before the fallback is asked: in the queue's time and in the cold one."""
    async with yard(model("big", limits=RequestLimits(hold_s=0.2)), model("small")) as y:
        y.models["big"].replicas[0].alive = False
        y.relay.settings = GatewaySettings(names={"best": Name(to="big", fallback=("small",))})
        assert (await y.client.post(CHAT, json=ask(model="best"))).status_code == 200
        await over(y, lines)
        assert lines[0]["model"] == "small"
        assert 0.2 <= lines[0]["cold_s"] <= lines[0]["queue_s"]


async def test_the_plain_endpoint_is_told_too(lines: list[Line]) -> None:
    """Under its own path, also where its client leaves."""
    async with yard(model("chat", script=FakeScript())) as y:
        asked = {"model_name": "chat", "prompt": SECRET, "max_tokens": 2}
        assert (await y.client.post("/generate", json=asked)).status_code == 200
        await over(y, lines)
        y.models["chat"].replicas[0].freeze()
        asking = asyncio.create_task(y.client.post("/generate", json=asked))
        await eventually(lambda: gauges(y))
        asking.cancel()
        await eventually(lambda: not gauges(y))
        y.models["chat"].replicas[0].thaw()
        await over(y, lines, 2)
        assert [(line["route"], line["outcome"]) for line in lines] == [
            ("/generate", "ok"),
            ("/generate", "client left"),
        ]
        assert counts(y, signals.ABORTS) == {("chat", "/generate", "answering"): 1}


async def test_an_engines_own_words_make_no_labels() -> None:
    """Nor do those of an error that is not ours at all."""
    assert reason_of(errors.Relayed(400, "x", code="of its own")) == "engine"
    assert reason_of(errors.InvalidRequest("x", param="anything")) == "invalid_request_error"
    assert reason_of(KeyError("anything")) == "api_error"


async def test_who_is_not_let_in_is_told_as_well(lines: list[Line], tmp_path: Path) -> None:
    """A wrong key: one line without a name and one count; a right one has its key's name in the line, and in no
    metric."""
    key, entry = keys.make("team")
    file = tmp_path / "keys.yaml"
    file.write_text(yaml.safe_dump({"keys": [entry]}))
    async with yard(model("chat")) as y:
        y.relay.settings = GatewaySettings(keys_file=str(file))
        wrong, right = {"authorization": f"Bearer {key}x"}, {"authorization": f"Bearer {key}"}
        assert (await y.client.post(CHAT, json=ask(), headers=wrong)).status_code == 401
        assert (await y.client.get("/v1/models", headers=wrong)).status_code == 401
        assert (await y.client.post(CHAT, json=ask(), headers=right | {"x-request-id": "mine"})).status_code == 200
        await over(y, lines, 2)
        assert [(line["status"], line["key"], line["id"]) for line in lines] == [
            (401, None, None),
            (200, "team", "mine"),
        ]
        assert counts(y, signals.REQUESTS) == {
            ("other", CHAT, "4xx", "invalid_api_key"): 1,
            ("chat", CHAT, "2xx", "ok"): 1,
        }
        assert not any("team" in at for at in (*y.noted.counters, *y.noted.observed, *y.noted.gauges))


PATHS = ["/v1/completions", "/v1/embeddings", "/v1/messages", "/v1/responses"]


@pytest.mark.parametrize("path", PATHS)
async def test_every_route_counts_its_prompt(lines: list[Line], path: str) -> None:
    """Whether or not it generates anything."""
    async with yard(model("chat", script=FakeScript(tasks=("generate", "embed")))) as y:
        asked = {"model": "chat", "input": "x", "prompt": "x", "messages": ask()["messages"], "max_tokens": 2}
        assert (await y.client.post(path, json=asked)).status_code == 200
        await over(y, lines)
        assert lines[0]["prompt_tokens"] > 0
        assert counts(y, signals.TOKENS)["chat", path, "prompt"] == lines[0]["prompt_tokens"]


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for a count waits for ever."""
    monkeypatch.setattr("serve_app.gateway.tally.COUNT_S", 600)
    monkeypatch.setattr("serve_app.gateway.leases.COUNT_S", 600)


@pytest.mark.usefixtures("_patient")
async def test_nobody_waits_for_the_count_of_a_replica_that_breaks(lines: list[Line]) -> None:
    """Its request is told without tokens."""
    async with yard(model("chat")) as y:
        await breaks(y)
        await over(y, lines)
        assert lines[0]["generated_tokens"] is None
        assert len(observed(y, signals.FIRST_TOKEN_TIME)) == 1


@pytest.mark.usefixtures("_patient")
async def test_a_replica_that_falls_silent_keeps_no_slot(lines: list[Line]) -> None:
    """It says no more what it counted: its lease goes all the same when the request goes on elsewhere."""
    two = model("chat", replicas=2, script=FakeScript(token_interval_s=0.01), limits=RequestLimits(silence_s=0.4))
    async with yard(two) as y:
        y.directory.running("chat", *two.replicas)
        async with y.client.stream("POST", CHAT, json=ask(100, stream=True)) as answer:
            async for part in answer.aiter_lines():
                if '"t7 "' in part:
                    frozen = next(replica for replica in two.replicas if replica.gate.busy)
                    frozen.freeze()
        assert lines[0]["moves"] == 1
        await eventually(lambda: not frozen.streams)
        frozen.thaw()


@pytest.mark.parametrize(
    ("reads", "failed"),
    [
        ([b'data: {"error":{}}\n\n', b"data: [DONE]\n\n"], True),
        ([b'data: {"a":1}\n\nda', b'ta: {"error": {}}\n\ndata: [DONE]\n\n'], True),
        ([b"event: content_block_delta\ndata: {}\n\n", b'event: error\ndata: {"type": "error"}\n\n'], True),
        ([b'data: {"text":"data: {\\"error\\":"}\n\n', b"data: [DONE]\n\n"], False),
        ([b'event: errors\ndata: {"error": null}\n\n'], False),
        ([b'data: {"error":{}}\n\n', b'data: {"a":1}\n\n', b"data: [DONE]\n\n"], False),
        ([], False),
    ],
)
async def test_an_engines_error_is_known_by_how_its_stream_ends(reads: list[bytes], failed: bool) -> None:
    """In its last two reads, however it is cut, and by nothing that an answer's text can say."""

    async def nowhere(_message: Any) -> None:
        pass

    async def read() -> bytes:
        return coming.pop(0) if coming else b""

    coming = list(reads)
    one = Record(Noted(), CHAT)
    await Answer(nowhere, "openai", one).stream(Head(200), read)
    assert one.engine_failed is failed


async def test_a_count_that_comes_early_late_or_twice_is_told_once(lines: list[Line]) -> None:
    """Before the end of the request or after it; that of the replica that was asked last is the whole."""
    for early in (True, False):
        noted = Noted()
        one = Record(noted, CHAT)
        one.tally.ask("1")
        one.tally.count(Counted("1", 4, 2, 0.1))
        one.tally.ask("2")
        if early:
            one.tally.count(Counted("2", 4, 9, 0.5))
        one.end(None)
        if not early:
            assert noted.counters.total() == 1
            one.tally.count(Counted("2", 4, 9, 0.5))
            one.tally.count(Counted("2", 4, 9, 0.5))
        assert noted.counters[signals.TOKENS.name, "other", CHAT, "generated"] == 9
        assert noted.observed[signals.ENGINE_TIME.name, "other", CHAT] == [0.5]
    assert len(lines) == 2


def test_every_metric_can_be_written_to_rays() -> None:
    """Ray takes names, labels and bounds, and each kind of value."""
    note = in_ray(signals.ALL)
    for metric in signals.ALL:
        assert list(metric.bounds) == sorted(set(metric.bounds))
        assert bool(metric.bounds) == (metric.kind == "histogram")
        note(metric, *metric.labels, value=0.5)
        if metric.kind == "gauge":
            note(metric, *metric.labels, value=-0.5)


def test_all_is_all() -> None:
    """A metric that is in no list would fail where it is counted first."""
    defined = {value.name for value in vars(signals).values() if isinstance(value, signals.Metric)}
    assert sorted(metric.name for metric in signals.ALL) == sorted(defined)
