"""vLLM's own spans, as a collector gets them beside ours; and the request's id in its log."""

import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from serve_app.gateway import tracing
from serve_app.model.http_server import HttpServer
from tests.collector import CLIENT, Collector, facts
from tests.engine.ask import CHAT, capital
from tests.engine.conftest import IN_THIS_PROCESS
from tests.engine.exact_resume import Started
from tests.engine.test_resume import SLOW_S, model_args
from tests.inprocess import HOST, FakeModel, Replica, eventually, yard

pytestmark = IN_THIS_PROCESS


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def traced(engine_home: Path) -> AsyncIterator[tuple[Any, Collector]]:
    """One engine whose settings are those of docs/observability.md, and the collector that they name."""
    from serve_app.model.engine import VllmEngine

    collector = Collector()
    server = HttpServer(collector, HOST)
    await server.start()
    url = f"http://{HOST}:{server.port}"
    args = model_args(otlp_traces_endpoint=f"{url}/v1/traces", enable_log_requests=True)
    of_this_test = {
        "MODELYARD_HOME": str(engine_home),
        "OTEL_EXPORTER_OTLP_ENDPOINT": url,
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{url}/v1/traces",  # vLLM sets it for the processes that it starts
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_BSP_SCHEDULE_DELAY": "50",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (args.env | of_this_test).items():
            patch.setenv(name, value)
        engine = VllmEngine(args, "chat")
        facts = await engine.start()
        yield Started(engine, facts), collector
        engine.shutdown()
        await server.stop()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_one_trace_from_the_client_to_the_engine(
    traced: tuple[Any, Collector], caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    """vLLM's span of the request is within our stage that asked for it, that one within ours of the request, and this
    one within the client's; with vLLM's own count of tokens. The request's id is in vLLM's log, its prompt is not."""
    engine, collector = traced
    logging.getLogger("vllm").addHandler(caplog.handler)
    model = FakeModel("chat", [Replica("chat-0", engine, slots=8)])
    name, trace = f"traced-{stream}", f"{1 + stream:032x}"
    async with yard(model, tracing=tracing.from_environment()) as y:
        headers = {"traceparent": f"00-{trace}-{CLIENT}-01", "x-request-id": name}
        answer = await y.client.post(CHAT, json=capital(stream=stream), headers=headers, timeout=SLOW_S)
        assert answer.status_code == 200

        def spans(kind: str) -> list[Any]:
            """Of this request."""
            return [span for span in collector.spans.get(kind, ()) if span.trace_id.hex() == trace]

        await eventually(lambda: spans("llm_request") and spans(f"POST {CHAT}"))
        (whole,), (upstream,), (theirs,) = (spans(kind) for kind in (f"POST {CHAT}", tracing.UPSTREAM, "llm_request"))
    assert facts(whole)["modelyard.request_id"] == name
    parents = [span.parent_span_id.hex() for span in (whole, upstream, theirs)]
    assert parents == [CLIENT, whole.span_id.hex(), upstream.span_id.hex()]
    assert facts(theirs)["gen_ai.usage.completion_tokens"] == facts(whole)["gen_ai.usage.output_tokens"]
    assert name in facts(theirs)["gen_ai.request.id"]
    assert name in caplog.text
    assert "France" not in caplog.text
