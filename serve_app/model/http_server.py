"""The replica's own HTTP port: uvicorn in the replica's event loop."""

import asyncio
import contextlib
import socket

import uvicorn

from serve_app.asgi import ASGIApp


class HttpServer:
    """Serves ``app`` on ``host`` and a free port until ``stop``."""

    def __init__(self, app: ASGIApp, host: str) -> None:
        self.host = host
        self._socket = socket.create_server((host, 0), backlog=2048)
        self.port: int = self._socket.getsockname()[1]
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http="httptools",
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
