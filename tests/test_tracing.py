"""OpenTelemetry's spans of requests, as a collector gets them over OTLP."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from serve_app.asgi import Receive, Scope, Send
from serve_app.config import FakeScript, GatewaySettings
from serve_app.gateway import tracing
from serve_app.model.http_server import HttpServer
from tests.collector import CLIENT, Collector, facts
from tests.inprocess import HOST, Yard, eventually, model, yard

CHAT = "/v1/chat/completions"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = {"traceparent": f"00-{TRACE}-{CLIENT}-01"}
OK, ERROR = 0, 2


@asynccontextmanager
async def traced(monkeypatch: pytest.MonkeyPatch, *models: Any) -> AsyncIterator[tuple[Yard, Collector]]:
    """A gateway whose environment names a collector, as an operator would write it."""
    collector = Collector()
    server = HttpServer(collector, HOST)
    await server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{HOST}:{server.port}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    try:
        async with yard(*models, tracing=tracing.from_environment()) as y:
            yield y, collector
    finally:
        await server.stop()


def ask(**more: Any) -> dict[str, Any]:
    return {"model": "chat", "messages": [{"role": "user", "content": "a secret"}], **more}


async def test_a_stream_is_one_span_with_its_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the client's own span, each stage after the other, with the tokens that the replica counted; the replica
    is told the stage that asked it. Nothing of the prompt is in any of them."""
    chat = model("chat")
    heard: list[bytes] = []
    gate = chat.replicas[0].door._app

    async def hearing(scope: Scope, receive: Receive, send: Send) -> None:
        heard.append(dict(scope.get("headers", ())).get(b"traceparent", b""))
        await gate(scope, receive, send)

    chat.replicas[0].door._app = hearing
    async with traced(monkeypatch, chat) as (y, collector):
        answer = await y.client.post(CHAT, json=ask(stream=True, max_tokens=5), headers=PARENT | {"x-request-id": "r1"})
        assert answer.status_code == 200
        await eventually(lambda: f"POST {CHAT}" in collector.spans)
        spans = collector.spans
        assert {name: len(of) for name, of in spans.items()} == dict.fromkeys([f"POST {CHAT}", *tracing.STAGES], 1)
        (whole,) = spans[f"POST {CHAT}"]
        assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (TRACE, CLIENT)
        stages = [spans[name][0] for name in tracing.STAGES]
        assert {(stage.trace_id, stage.parent_span_id) for stage in stages} == {(whole.trace_id, whole.span_id)}
        moments = [whole.start_time_unix_nano]
        for stage in stages:
            moments += [stage.start_time_unix_nano, stage.end_time_unix_nano]
        moments.append(whole.end_time_unix_nano)
        assert moments == sorted(moments)
        upstream = stages[-1]
        assert [event.name for event in upstream.events] == [tracing.FIRST_BYTE]
        assert facts(upstream) == {"replica": "chat-0", "resumes": False}
        assert [one for one in heard if one] == [f"00-{TRACE}-{upstream.span_id.hex()}-01".encode()]
        found = facts(whole)
        assert found["gen_ai.usage.output_tokens"] == 5
        assert (found["gen_ai.response.model"], found["modelyard.request_id"]) == ("chat", "r1")
        assert (found["http.response.status_code"], whole.status.code) == (200, OK)
        assert collector.services == {tracing.SERVICE}
        assert "secret" not in str(spans)


async def test_a_stream_that_moves_has_two_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one's stage failed, the second one's goes on with the answer; the request itself did not fail."""
    two = model("chat", replicas=2, script=FakeScript(token_interval_s=0.01))
    async with traced(monkeypatch, two) as (y, collector):
        async with y.client.stream("POST", CHAT, json=ask(stream=True, max_tokens=20)) as answer:
            async for part in answer.aiter_lines():
                if '"t7 "' in part:
                    await next(replica for replica in two.replicas if replica.gate.busy).die()
        await eventually(lambda: f"POST {CHAT}" in collector.spans)
        first, second = collector.spans["upstream"]
        assert (first.status.code, first.status.message, second.status.code) == (ERROR, "broken", OK)
        assert (facts(first)["resumes"], facts(second)["resumes"]) == (False, True)
        assert {facts(first)["replica"], facts(second)["replica"]} == {"chat-0", "chat-1"}
        (whole,) = collector.spans[f"POST {CHAT}"]
        assert (whole.status.code, facts(whole)["modelyard.moves"]) == (OK, 1)


async def test_what_is_refused_is_a_span_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown model, with why; `/generate` has spans as well."""
    async with traced(monkeypatch, model("chat")) as (y, collector):
        assert (await y.client.post(CHAT, json=ask() | {"model": "nobody"})).status_code == 404
        generated = await y.client.post("/generate", json={"model_name": "chat", "prompt": "x"}, headers=PARENT)
        assert generated.status_code == 200
        await eventually(lambda: {f"POST {CHAT}", "POST /generate"} <= collector.spans.keys())
        (refused,) = collector.spans[f"POST {CHAT}"]
        assert (facts(refused)["error.type"], refused.status.code) == ("model_not_found", ERROR)
        assert collector.spans["POST /generate"][0].trace_id.hex() == TRACE


async def test_who_is_not_let_in_is_a_span_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With its one stage."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"keys: [{{name: one, hash: 'sha256:{'0' * 64}'}}]")
    async with traced(monkeypatch, model("chat")) as (y, collector):
        y.relay.settings = GatewaySettings(keys_file=str(keys))
        assert (await y.client.post(CHAT, json=ask())).status_code == 401
        await eventually(lambda: f"POST {CHAT}" in collector.spans)
        assert collector.spans.keys() == {f"POST {CHAT}", "auth"}
        assert facts(collector.spans[f"POST {CHAT}"][0])["http.response.status_code"] == 401


async def test_a_client_that_does_not_sample_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request leaves no span, and the replica is told so."""
    async with traced(monkeypatch, model("chat")) as (y, collector):
        unsampled = {"traceparent": f"00-{TRACE}-{CLIENT}-00"}
        assert (await y.client.post(CHAT, json=ask(), headers=unsampled)).status_code == 200
        assert (await y.client.post("/v1/completions", json={"model": "chat", "prompt": "x"})).status_code == 200
        await eventually(lambda: "POST /v1/completions" in collector.spans)
        assert f"POST {CHAT}" not in collector.spans


async def test_a_collector_that_is_away_is_nobodys_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are answered as ever."""
    async with traced(monkeypatch, model("chat")) as (y, _), asyncio.timeout(20):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{HOST}:9")
        y.relay.tracing = tracing.from_environment()
        for _ in range(20):
            assert (await y.client.post(CHAT, json=ask())).status_code == 200


def test_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a collector there are no spans, and the client's own reaches the engine as it is."""
    for name in tracing.ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    trace = tracing.from_environment().begin(CHAT, {})
    assert trace is tracing.NOT_TRACED
    given = {b"traceparent": b"00-1-2-01", b"tracestate": b"a=b", b"cookie": b"c"}
    assert dict(trace.headers(given)) == {b"traceparent": b"00-1-2-01", b"tracestate": b"a=b"}
