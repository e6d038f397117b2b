"""ASGI (https://asgi.readthedocs.io): its types by their usual names, and what every app of ours does with them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from serve_app import errors

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]


class ClientLeft(Exception):
    """The client closed the connection: nobody is left to answer."""


async def read_body(receive: Receive, limit: int | None = None) -> bytes:
    """The whole body; ``BodyTooLarge`` beyond ``limit`` bytes, ``ClientLeft`` where it never comes to its end."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        part = message.get("body", b"")
        size += len(part)
        if limit is not None and size > limit:
            raise errors.BodyTooLarge(f"The body is larger than the {limit / 2**20:g} MB that this gateway accepts.")
        parts.append(part)
        if not message.get("more_body"):
            return parts[0] if len(parts) == 1 else b"".join(parts)


@asynccontextmanager
async def while_client_stays(receive: Receive) -> AsyncIterator[None]:
    """Run the block until it ends or the client closes its connection, which is how clients cancel: then the block is
    cancelled and ``ClientLeft`` raised. The request's body must have been read."""
    this = asyncio.current_task()
    assert this is not None
    left = False

    async def watch() -> None:
        nonlocal left
        while (await receive())["type"] != "http.disconnect":
            pass
        left = True
        this.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not left:
            raise
        this.uncancel()
        raise ClientLeft from None
    finally:
        watcher.cancel()


async def respond(send: Send, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
    """A whole answer."""
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
