"""One keep-alive HTTP/1.1 connection to a replica, straight on the transport.

The relay's inner loop is here. ``httpx`` and ``aiohttp`` cost several times more per chunk than the rest of the
gateway together; this does one parser call and at most one wake-up per TCP read, and hands on whole reads.
"""

import asyncio
from dataclasses import dataclass, field
from typing import cast

import httptools

# Above this many buffered bytes the socket is no longer read, so a slow client slows its own stream, not memory.
HIGH_WATER = 256 * 1024


class ConnectionBroken(Exception):
    """The connection ended, or spoke no HTTP, before the response was complete. ``why``: one word for metrics."""

    why = "broken"


class Silent(ConnectionBroken):
    """The replica, or this one answer of it, has shown no sign of life for too long."""

    why = "silent"


class LeaseExpired(ConnectionBroken):
    """The replica no longer knows the lease: nobody's fault, and nothing was done."""

    why = "expired"


class Leaving(ConnectionBroken):
    """The replica is leaving and another one is ready to go on: nothing is wrong with it."""

    why = "leaving"


@dataclass(slots=True)
class Head:
    status: int
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)  # names in lower case

    def get(self, name: bytes) -> bytes:
        return next((value for key, value in self.headers if key == name), b"")


class Connection(asyncio.Protocol):
    """One request at a time: ``request`` → ``Head``, then ``read`` until it returns b""."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._head = Head(0)
        self._head_done = False
        self._body_begun = False
        self._complete = True
        self._keep_alive = True
        self._chunks: list[bytes] = []
        self._buffered = 0
        self._paused = False
        self._lost = False
        self._interruption: ConnectionBroken | None = None
        self.last_data = self._loop.time()  # when bytes came last

    @classmethod
    async def open(cls, host: str, port: int) -> "Connection":
        try:
            _, connection = await asyncio.get_running_loop().create_connection(cls, host, port)
        except OSError as error:
            raise ConnectionBroken(str(error)) from error
        return connection

    async def request(self, head: bytes, body: bytes) -> Head:
        """Send one request and wait for the response's head."""
        if self._lost or self._transport is None:
            raise ConnectionBroken("the replica closed the connection")
        self._parser = httptools.HttpResponseParser(self)
        self._head, self._head_done, self._body_begun, self._complete = Head(0), False, False, False
        self.last_data = self._loop.time()
        self._transport.write(head + body)
        while not self._head_done:
            await self._wait()
        return self._head

    async def read(self) -> bytes:
        """All bytes of the body that have arrived, waiting for at least one; b"" at the end."""
        while not self._chunks:
            if self._complete:
                return b""
            await self._wait()
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._buffered = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    @property
    def reusable(self) -> bool:
        return self._complete and self._keep_alive and not self._lost and not self._chunks

    @property
    def paused(self) -> bool:
        """The reader is slower than the replica: silence is its own doing."""
        return self._paused

    @property
    def answering(self) -> bool:
        """Part of the response's body has come, and not all of it."""
        return self._body_begun and not self._complete

    def interrupt(self, reason: ConnectionBroken) -> None:
        """End the request under way with ``reason``, once what has arrived is read."""
        self._interruption = reason
        self._keep_alive = False
        self._wake()

    def close(self) -> None:
        """At once: a response under way is aborted, which is how the replica learns that the client left."""
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self) -> None:
        """Until something has happened."""
        if self._interruption is not None:
            raise self._interruption
        if self._lost:
            raise ConnectionBroken("the replica closed the connection")
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it

    def data_received(self, data: bytes) -> None:
        self.last_data = self._loop.time()
        if self._parser is None or self._complete:
            self.close()  # bytes that no request asked for
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._lost = True
            self.close()
        if self._buffered > HIGH_WATER and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._parser = None  # it holds us and we hold it: what is buffered must not wait for the garbage collector
        self._wake()

    # httptools callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self._head.status = self._parser.get_status_code()
        self._keep_alive = bool(self._parser.should_keep_alive())
        self._head_done = True

    def on_body(self, data: bytes) -> None:
        self._body_begun = True
        self._chunks.append(data)
        self._buffered += len(data)

    def on_message_complete(self) -> None:
        self._complete = True
