"""The door of a replica's HTTP port: only requests that carry a live lease's token reach the engine.

The outermost ASGI wrapper: whatever happens inside, a request that ends frees its lease here.
"""

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from serve_app import errors
from serve_app.asgi import ASGIApp, Message, Receive, Scope, Send, respond, says_yes
from serve_app.lease import (
    ADAPTER_HEADER,
    ADAPTER_PATH_HEADER,
    ALIVE_PATH,
    ASKED_MODEL_HEADER,
    COUNT_HEADER,
    EVERY_TOKEN_HEADER,
    LEASE_HEADER,
    PRIORITY_HEADER,
    REFUSED_HEADER,
    UNKNOWN_LEASE,
    Counted,
)
from serve_app.model.counting import COUNTING, Counting
from serve_app.model.engine_protocol import ADAPTER, ASKED_MODEL, EVERY_TOKEN, PRIORITY, Adapter


@dataclass(slots=True, eq=False)
class Lease:
    """One slot of this replica, held by one gateway: one HTTP request at a time, many after each other."""

    token: str
    busy: bool = False
    used: int = 0
    counted: "asyncio.Queue[Counted]" = field(default_factory=asyncio.Queue)


class LeaseGate:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._leases: dict[str, Lease] = {}

    def grant(self) -> Lease:
        lease = Lease(secrets.token_hex(16))
        self._leases[lease.token] = lease
        return lease

    def end(self, lease: Lease) -> None:
        """Forget the lease. A request under way is not touched: its connection belongs to the same gateway."""
        self._leases.pop(lease.token, None)

    @property
    def held(self) -> int:
        return len(self._leases)

    @property
    def busy(self) -> int:
        return sum(lease.busy for lease in self._leases.values())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        given = dict(scope.get("headers", ()))
        lease = self._leases.get(given.get(LEASE_HEADER, b"").decode("latin-1"))
        if lease is not None and scope.get("path") == ALIVE_PATH:
            await respond(send, 204, (), b"")
            return
        if scope["type"] != "http" or lease is None or lease.busy:
            if scope["type"] == "http":
                await _refuse(send, UNKNOWN_LEASE if lease is None else b"busy")
            return
        lease.busy = True
        freed = False
        number = given.get(COUNT_HEADER)
        counting = Counting(number.decode("latin-1")) if number else None
        COUNTING.set(counting)
        _understand(given)

        def free() -> None:
            # Once per request: by the time the app returns, the next request may hold the lease.
            nonlocal freed
            if not freed:
                freed = True
                lease.busy = False
                lease.used += 1
                if counting is not None and not counting.told:
                    lease.counted.put_nowait(counting.total())

        async def heard() -> Message:
            message = await receive()
            if counting is not None and message["type"] == "http.disconnect":
                counting.unheard = True
            return message

        async def freeing(message: Message) -> None:
            last = message["type"] == "http.response.body" and not message.get("more_body")
            messages = (message,) if counting is None else counting.add_to(message, last=last)
            if last:
                # Before the end goes out: the gateway may send the next request the moment it has read it.
                free()
            for each in messages:
                await send(each)

        try:
            await self._app(scope, heard, freeing)
        finally:
            free()


def _understand(given: Mapping[bytes, bytes]) -> None:
    """Tell the engine what the gateway says of the request."""
    PRIORITY.set(int(given.get(PRIORITY_HEADER, 0)))
    EVERY_TOKEN.set(says_yes(given, EVERY_TOKEN_HEADER))
    adapter, path = given.get(ADAPTER_HEADER), given.get(ADAPTER_PATH_HEADER, b"")
    ADAPTER.set(Adapter(_text(adapter), _text(path)) if adapter else None)
    if asked := given.get(ASKED_MODEL_HEADER):
        ASKED_MODEL.set(_text(asked))


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")


async def _refuse(send: Send, why: bytes) -> None:
    status, headers, body = errors.render(errors.Forbidden("This port serves Modelyard's gateways only."))
    await respond(send, status, [*headers, (REFUSED_HEADER, why)], body)
