"""Where the time of single requests went, as spans of OpenTelemetry: one for a request, within the client's own where
its ``traceparent`` names one, and one for each stage of it. What the engine traces is within the stage that asked it.

Off unless the gateway's environment names a collector, by OpenTelemetry's own variables. Spans tell nothing of what was
asked or answered; docs/observability.md is the table.
"""

import asyncio
import os
import time
from collections.abc import Mapping, Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

# Either one turns tracing on.
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
SERVICE = "modelyard-gateway"
# How long the end of a gateway waits for its collector.
CLOSE_MS = 2000
AUTH, ROUTE, QUEUE, UPSTREAM = STAGES = ("auth", "route", "queue", "upstream")
FIRST_BYTE = "first byte"

# W3C Trace Context's.
PARENTS = ("traceparent", "tracestate")
_PROPAGATOR = TraceContextTextMapPropagator()

Fact = str | bool | int


class Trace:
    """Of one request, while nobody traces."""

    def stage(self, name: str, **facts: Fact) -> None:
        """It is in this stage from now on, and in no other one."""

    def fail(self, why: str) -> None:
        """Its stage comes to nothing; another one will follow."""

    def event(self, name: str) -> None:
        """Something happens in its stage."""

    def end(self) -> None:
        """It is over."""

    def tell(self, facts: Mapping[str, Fact | None], error: str = "") -> None:
        """Whatever is known of it, after its end; then it goes out. ``error``: why it failed."""

    def headers(self, client: Mapping[bytes, bytes]) -> Sequence[tuple[bytes, bytes]]:
        """Which span the replica's own are to be within. ``client``: the headers of whoever asked."""
        return [(name.encode(), client[name.encode()]) for name in PARENTS if name.encode() in client]


NOT_TRACED = Trace()


class Tracing:
    """``exporter``: where spans go; None: nowhere, and there are none."""

    def __init__(self, exporter: SpanExporter | None = None) -> None:
        self._tracer: Tracer | None = None
        self._provider: TracerProvider | None = None
        if exporter is not None:
            # The environment's OTEL_SERVICE_NAME is in the resource already, and goes first.
            service = {} if os.environ.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: SERVICE}
            self._provider = provider = TracerProvider(resource=Resource.create(service), shutdown_on_exit=False)
            # In a thread of its own; what a collector does not take is dropped, never waited for.
            provider.add_span_processor(BatchSpanProcessor(exporter))
            self._tracer = provider.get_tracer("modelyard")

    def begin(self, route: str, client: Mapping[bytes, bytes]) -> Trace:
        """A request to ``route`` with these headers has come."""
        return NOT_TRACED if self._tracer is None else _Spans(self._tracer, route, client)

    async def close(self) -> None:
        """Send what is there."""
        if self._provider is not None:
            await asyncio.to_thread(self._provider.force_flush, CLOSE_MS)


def from_environment() -> Tracing:
    if not any(os.environ.get(name) for name in ENDPOINTS):
        return Tracing()
    # Takes a second to import, and reads the address and its headers from the environment.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return Tracing(OTLPSpanExporter())


class _Spans(Trace):
    def __init__(self, tracer: Tracer, route: str, client: Mapping[bytes, bytes]) -> None:
        given = {name: client[name.encode()].decode("latin-1") for name in PARENTS if name.encode() in client}
        parent = _PROPAGATOR.extract(given, Context())
        facts = {"http.request.method": "POST", "http.route": route}
        self._tracer = tracer
        self._whole = tracer.start_span(f"POST {route}", parent, SpanKind.SERVER, facts)
        self._within = trace.set_span_in_context(self._whole, Context())
        self._stage: Span = trace.INVALID_SPAN
        self._ended: int | None = None

    def stage(self, name: str, **facts: Fact) -> None:
        self._stage.end()
        kind = SpanKind.CLIENT if name == UPSTREAM else SpanKind.INTERNAL
        self._stage = self._tracer.start_span(name, self._within, kind, facts)

    def fail(self, why: str) -> None:
        self._stage.set_status(Status(StatusCode.ERROR, why))

    def event(self, name: str) -> None:
        self._stage.add_event(name)

    def end(self) -> None:
        self._stage.end()
        self._ended = time.time_ns()

    def tell(self, facts: Mapping[str, Fact | None], error: str = "") -> None:
        self._whole.set_attributes({name: fact for name, fact in facts.items() if fact is not None})
        if error:
            self._whole.set_attribute("error.type", error)
            self._whole.set_status(Status(StatusCode.ERROR))
        self._whole.end(self._ended)

    def headers(self, client: Mapping[bytes, bytes]) -> Sequence[tuple[bytes, bytes]]:
        named: dict[str, str] = {}
        _PROPAGATOR.inject(named, trace.set_span_in_context(self._stage, Context()))
        return [(name.encode(), value.encode("latin-1")) for name, value in named.items()]
