"""The comparison: how a stream travels through plain Ray Serve.

Serve's Python proxy → a FastAPI ingress → a ``DeploymentHandle`` with its default transport → the same fake engine.
Nothing of Modelyard's is on the way, and no setting of Serve's is changed but the bound on open requests.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from ray import serve
from ray.serve import Application

from serve_app.config import FakeScript
from serve_app.model.fake_engine import FakeEngine

PATH = "/v1/chat/completions"

api = FastAPI()


@serve.deployment(max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0.01})
class Inner:
    def __init__(self, name: str) -> None:
        self._engine = FakeEngine(FakeScript(), name)

    async def stream(self, body: bytes) -> AsyncIterator[bytes]:
        """The engine's own SSE events, one by one."""
        events: asyncio.Queue[bytes] = asyncio.Queue()
        incoming = [{"type": "http.request", "body": body}]

        async def receive() -> dict[str, Any]:
            if not incoming:
                await asyncio.Event().wait()  # a client that stays
            return incoming.pop()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                events.put_nowait(message["body"])

        scope = {"type": "http", "method": "POST", "path": PATH, "headers": []}
        work = asyncio.ensure_future(self._engine.asgi(scope, receive, send))
        try:
            while event := await events.get():  # the engine's last message has an empty body
                yield event
        finally:
            work.cancel()


@serve.deployment(max_ongoing_requests=10_000)
@serve.ingress(api)
class Ingress:
    def __init__(self, inner: Any) -> None:
        self._inner = inner.options(stream=True)

    @api.post(PATH)
    async def chat(self, request: Request) -> StreamingResponse:
        events = self._inner.stream.remote(await request.body())
        return StreamingResponse(events, media_type="text/event-stream")


def app(args: dict[str, str]) -> Application:
    """``args``: ``name``, which the answers carry as their model."""
    application: Application = Ingress.bind(Inner.bind(args["name"]))  # type: ignore[attr-defined]
    return application
