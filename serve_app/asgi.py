"""ASGI (https://asgi.readthedocs.io): its types by their usual names, and what every app of ours does with them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from serve_app import errors

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]


# The largest head of a request: its path, query and headers. HAProxy in front takes less, 15 KiB and about 95 headers;
# Serve's Python proxy takes any.
MAX_HEAD_BYTES = 32 * 1024
MAX_HEADERS = 100


class ClientLeft(Exception):
    """The client closed the connection: nobody is left to answer."""


def check_head(scope: Scope) -> None:
    """Raises ``HeadTooLarge``."""
    headers = scope["headers"]
    size = len(scope["path"]) + len(scope.get("query_string", b""))
    size += sum(len(name) + len(value) for name, value in headers)
    if size > MAX_HEAD_BYTES or len(headers) > MAX_HEADERS:
        raise errors.HeadTooLarge(
            f"Path, query and headers are more than {MAX_HEAD_BYTES} bytes, or than {MAX_HEADERS} headers."
        )


def bounded(receive: Receive, limit: int) -> Receive:
    """``receive`` for a body of at most ``limit`` bytes: beyond it raises ``BodyTooLarge``."""
    size = 0

    async def counted() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > limit:
            raise errors.BodyTooLarge(f"The body is larger than the {limit / 2**20:g} MB that this gateway accepts.")
        return message

    return counted


def says_yes(headers: Mapping[bytes, bytes], name: bytes) -> bool:
    """Whether the header ``name`` is there, and neither 0, false nor empty."""
    return headers.get(name, b"0") not in (b"0", b"false", b"")


async def read_body(receive: Receive) -> bytes:
    """The whole body; ``ClientLeft`` where it never comes to its end."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        parts.append(message.get("body", b""))
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
