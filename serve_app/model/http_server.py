"""The replica's own HTTP port: uvicorn in the replica's event loop."""

import asyncio
import contextlib
import socket

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serve_app.asgi import ASGIApp

# What the parser may keep to itself: a head, or a chunk's extension. Twice what a gateway accepts and passes on.
MAX_UNPARSED_BYTES = 64 * 1024


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's parser keeps a head until it is whole, whatever its size, and anybody who reaches the port may send one
    without an end."""

    _unparsed = 0  # bytes since the parser last made something of them

    def data_received(self, data: bytes) -> None:
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed > MAX_UNPARSED_BYTES and not self.transport.is_closing():
            self.send_400_response("The head of this request has no end.")

    def on_headers_complete(self) -> None:
        self._unparsed = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed = 0
        super().on_message_complete()


class HttpServer:
    """Serves ``app`` on ``host`` and ``port`` (0: a free one) until ``stop``."""

    def __init__(self, app: ASGIApp, host: str, port: int = 0) -> None:
        self.host = host
        self._socket = socket.create_server((host, port), backlog=2048)
        # Connections inherit it. asyncio, other than uvloop, sets it on none of a socket made like this.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.port: int = self._socket.getsockname()[1]
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=BoundedProtocol,
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                # Gateways close connections that were idle for a second or two. uvicorn holds one that was reset, with
                # all that its last request was, until this timer ends.
                timeout_keep_alive=30,
                timeout_graceful_shutdown=1,
            )
        )
        # Serve owns the signals of this process.
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started:
            if self._task.done():
                raise RuntimeError("the replica's HTTP server ended while it started") from self._task.exception()
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._task is not None:
            await asyncio.wait([self._task], timeout=5)
