"""One request's way: read, resolve the name, take a lease, send it to the replica, hand the answer back.

Plain ASGI. While an answer streams, the gateway relays whole TCP reads and looks at nothing but where an SSE event
ends, so that a stream is never cut inside one.
"""

import asyncio
import contextlib
import json
import logging
import re
from typing import Any

from serve_app import errors
from serve_app.asgi import ClientLeft, Receive, Scope, Send, read_body, respond, while_client_stays
from serve_app.catalog import Catalog, Model, State
from serve_app.config import GatewaySettings
from serve_app.errors import ModelyardError, Protocol
from serve_app.gateway.directory import Directory
from serve_app.gateway.leases import Lease
from serve_app.gateway.request import asked_model
from serve_app.gateway.routes import Route
from serve_app.gateway.upstream import ConnectionBroken, Head
from serve_app.lease import ASKED_MODEL_HEADER, LEASE_HEADER, REFUSED_HEADER

logger = logging.getLogger("ray.serve")

# What of the client's headers the engine may see. Never authorization or cookies.
_FORWARDED = frozenset((b"content-type", b"accept", b"traceparent", b"tracestate", b"anthropic-version"))
# What of the engine's headers the client may see.
_RETURNED = frozenset((b"content-type", b"cache-control"))
ATTEMPTS = 3
# What vLLM appends to some messages for its own logs.
_VLLM_SUFFIX = re.compile(r" \(parameter=\w+(, value=.*)?\)$", re.DOTALL)
# An engine's error body is a line or two; more than this is not an error body.
MAX_ERROR_BYTES = 256 * 1024


class Relay:
    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self.settings = GatewaySettings()

    async def __call__(self, route: Route, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        answer = Answer(send, route.protocol)
        try:
            body = await read_body(receive, int(self.settings.max_body_mb * 2**20))
            async with while_client_stays(receive):
                asked = await asked_model(route, headers, body)
                model = self.resolve(asked, route.path)
                await self._exchange(model, asked, route.path, headers, body, answer)
        except ModelyardError as error:
            await answer.fail(error)
        except ClientLeft:
            return
        except Exception:
            logger.exception("a request to %s failed inside the gateway", route.path)
            await answer.fail(errors.ModelyardError(errors.OUR_FAULT))

    def catalog(self) -> Catalog:
        """What exists; ``Unavailable`` until Serve has said so once."""
        if not self._directory.known:
            raise errors.Unavailable("This gateway has just started and knows no models yet.", retry_after_s=1)
        return self._directory.catalog

    def resolve(self, asked: str, path: str) -> Model:
        """The model that ``asked`` means, able to answer ``path``."""
        model = self.catalog().resolve(asked)
        facts = model.card.facts
        if facts is not None and path not in facts.paths:
            raise errors.UnsupportedTask(
                f"The model {asked!r} cannot answer {path}: its tasks are {', '.join(facts.tasks)}.", param="model"
            )
        if model.state is State.FAILED:
            raise errors.Unavailable(f"The model {asked!r} failed to start.", retry_after_s=30)
        return model

    async def call(self, asked: str, path: str, request: dict[str, Any]) -> Any:
        """One JSON request from inside the gateway; the answer's JSON."""
        sink = _Collected()
        answer = Answer(sink, "openai")
        headers = {b"content-type": b"application/json"}
        await self._exchange(self.resolve(asked, path), asked, path, headers, json.dumps(request).encode(), answer)
        return json.loads(sink.body)

    async def _exchange(
        self, model: Model, asked: str, path: str, headers: dict[bytes, bytes], body: bytes, answer: "Answer"
    ) -> None:
        """Send the request to a replica and the reply to ``answer``.

        A replica that went away before it said anything costs nothing but another try.
        """
        pool = self._directory.pool(model)
        deadline = asyncio.get_running_loop().time() + model.card.limits.wait_s
        for attempt in range(1, ATTEMPTS + 1):
            lease = await pool.acquire(deadline)
            try:
                await self._one_try(lease, asked, path, headers, body, answer)
                return
            except ConnectionBroken as broken:
                logger.info("try %d on replica %s of %s: %s", attempt, lease.grant.replica, model.name, broken)
                if answer.started:
                    raise errors.UpstreamBroken("The model's replica went away in the middle of the answer.") from None
                if attempt == ATTEMPTS:
                    raise errors.Unavailable(
                        f"The replicas of {model.name} went away {ATTEMPTS} times.",
                        retry_after_s=model.card.start_s or 5,
                    ) from broken
            finally:
                pool.release(lease)

    async def _one_try(
        self, lease: Lease, asked: str, path: str, headers: dict[bytes, bytes], body: bytes, answer: "Answer"
    ) -> None:
        connection = lease.connection
        try:
            head = await connection.request(request_head(lease, asked, path, headers, len(body)), body)
            if refused := head.get(REFUSED_HEADER):
                raise ConnectionBroken(f"the replica refused the lease: {refused.decode()}")
            if head.status >= 400:
                raise relayed_error(head.status, await _all(connection.read, MAX_ERROR_BYTES))
            if head.get(b"content-type").startswith(b"text/event-stream"):
                await answer.stream(head, connection.read)
            else:
                # Committed whole: a replica that dies half-way costs a second try, not a broken answer.
                await answer.whole(head, await _all(connection.read))
        except BaseException:
            # Also when our own task is cancelled (the client left): the replica must see the connection go.
            if not connection.reusable:
                connection.close()
            raise


class Answer:
    """What goes back to one client: exactly one of a whole answer, a stream with a defined end, or an error."""

    def __init__(self, send: Send, protocol: Protocol) -> None:
        self._send = send
        self._protocol = protocol
        self.started = False
        self._events = False

    async def whole(self, head: Head, body: bytes) -> None:
        self.started = True
        await respond(self._send, head.status, [*_returned(head), (b"content-length", str(len(body)).encode())], body)

    async def stream(self, head: Head, read: Any) -> None:
        """Relay an SSE stream, whole events at a time."""
        data = await read()  # nothing is committed before the replica's first event
        self.started = self._events = True
        await self._send({"type": "http.response.start", "status": head.status, "headers": _returned(head)})
        rest = b""
        send = self._send
        while data:
            if rest:
                data = rest + data
            if data.endswith(b"\n\n"):
                rest = b""
            else:
                cut = data.rfind(b"\n\n") + 2
                data, rest = (data[:cut], data[cut:]) if cut > 1 else (b"", data)
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            data = await read()
        await send({"type": "http.response.body", "body": rest})

    async def fail(self, error: ModelyardError) -> None:
        if self._events:
            await self._send({"type": "http.response.body", "body": errors.sse_event(error, self._protocol)})
        elif not self.started:
            self.started = True
            await respond(self._send, *errors.render(error, self._protocol))


class _Collected:
    """An ASGI ``send`` that keeps the body."""

    def __init__(self) -> None:
        self.body = b""

    async def __call__(self, message: Any) -> None:
        self.body += message.get("body", b"")


def request_head(lease: Lease, asked: str, path: str, headers: dict[bytes, bytes], length: int) -> bytes:
    """The HTTP/1.1 head that a replica gets."""
    grant = lease.grant
    lines = [
        f"POST {path} HTTP/1.1\r\nhost: {grant.host}:{grant.port}\r\ncontent-length: {length}".encode("latin-1"),
        LEASE_HEADER + b": " + grant.token.encode(),
        ASKED_MODEL_HEADER + b": " + asked.encode(),
        b"x-request-id: " + clean_request_id(headers.get(b"x-request-id", b"")),
    ]
    lines += [name + b": " + value for name, value in headers.items() if name in _FORWARDED]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def clean_request_id(given: bytes) -> bytes:
    """A request id that is safe in headers and logs: printable, bounded."""
    return re.sub(rb"[^A-Za-z0-9._:-]", b"-", given[:128])


def relayed_error(status: int, body: bytes) -> ModelyardError:
    """An engine's error answer, in whichever envelope, as one of ours. What the engine says of its own failures
    (5xx) stays in its log: it may name files and addresses."""
    if status >= 500:
        return errors.Relayed(status if status in (500, 503) else 502, "The engine could not answer this request.")
    with contextlib.suppress(ValueError, AttributeError):
        parsed = json.loads(body)
        detail = parsed.get("error") if isinstance(parsed.get("error"), dict) else parsed
        if isinstance(detail.get("message"), str):
            code = detail.get("code")
            return errors.Relayed(
                400 if status == 422 else status,
                _VLLM_SUFFIX.sub("", detail["message"]),
                param=detail.get("param") if isinstance(detail.get("param"), str) else None,
                code=code if isinstance(code, str) else None,
            )
    return errors.Relayed(status, "The engine refused this request.")


def _returned(head: Head) -> list[tuple[bytes, bytes]]:
    return [(k, v) for k, v in head.headers if k in _RETURNED]


async def _all(read: Any, limit: int | None = None) -> bytes:
    parts: list[bytes] = []
    size = 0
    while data := await read():
        parts.append(data)
        size += len(data)
        if limit is not None and size > limit:
            break
    return b"".join(parts)
