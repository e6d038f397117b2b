"""A collector of OpenTelemetry's traces."""

from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from serve_app.asgi import Receive, Scope, Send, read_body, respond

# The span of a client that is traced itself.
CLIENT = "00f067aa0ba902b7"


class Collector:
    """``spans``: by name; those of one name in the order in which they began."""

    def __init__(self) -> None:
        self._got: list[Any] = []
        self.services: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for end in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{end}.complete"})
            return
        assert scope["path"] == "/v1/traces"
        for group in ExportTraceServiceRequest.FromString(await read_body(receive)).resource_spans:
            facts = {fact.key: fact.value.string_value for fact in group.resource.attributes}
            self.services.add(facts["service.name"])
            self._got += [span for part in group.scope_spans for span in part.spans]
        await respond(send, 200, [(b"content-type", b"application/x-protobuf")], b"")

    @property
    def spans(self) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        for span in sorted(self._got, key=lambda span: span.start_time_unix_nano):
            found.setdefault(span.name, []).append(span)
        return found


def facts(span: Any) -> dict[str, Any]:
    return {fact.key: getattr(fact.value, fact.value.WhichOneof("value")) for fact in span.attributes}
