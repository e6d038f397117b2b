"""The comparison: how a stream travels through plain Ray Serve.

Serve's Python proxy → a FastAPI ingress → a ``DeploymentHandle`` with its default transport → the same engine. Nothing
of Modelyard's is on the way, and no setting of Serve's is changed but the bound on open requests.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from ray import serve
from ray.serve import Application

from serve_app.asgi import says_yes
from serve_app.config import ModelArgs
from serve_app.lease import EVERY_TOKEN_HEADER
from serve_app.model import engine_protocol
from serve_app.model.app import build_engine
from serve_app.model.placement import placement

api = FastAPI()


@serve.deployment(max_ongoing_requests=10_000)
class Inner:
    async def __init__(self, args: ModelArgs, name: str) -> None:  # type: ignore[misc]  # Serve awaits it
        self._engine = build_engine(args, name)
        await self._engine.start()

    async def stream(self, path: str, body: bytes, every_token: bool) -> AsyncIterator[bytes]:
        """The engine's own SSE events, one by one. RuntimeError: it answers with another status than 200."""
        engine_protocol.EVERY_TOKEN.set(every_token)
        events: asyncio.Queue[bytes | None] = asyncio.Queue()
        incoming = [{"type": "http.request", "body": body}]

        async def receive() -> dict[str, Any]:
            if not incoming:
                await asyncio.Event().wait()  # a client that stays
            return incoming.pop()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                events.put_nowait(message.get("body", b""))
            elif message["status"] != 200:
                raise RuntimeError(f"the engine answered with status {message['status']}")

        scope: dict[str, Any] = {"type": "http", "http_version": "1.1", "method": "POST", "path": path}
        scope |= {"raw_path": path.encode(), "query_string": b"", "scheme": "http", "root_path": "", "client": None}
        scope |= {
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "headers": [(b"content-type", b"application/json")],
        }
        work = asyncio.ensure_future(self._engine.asgi(scope, receive, send))
        work.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                if event:
                    yield event
            await work
        finally:
            work.cancel()

    def __del__(self) -> None:
        self._engine.shutdown()


# How many ingress replicas: one, as Modelyard has one gateway.
@serve.deployment(max_ongoing_requests=10_000)
@serve.ingress(api)
class Ingress:
    def __init__(self, inner: Any) -> None:
        self._inner = inner.options(stream=True)

    @api.post("/v1/completions")
    @api.post("/v1/chat/completions")
    async def stream(self, request: Request) -> StreamingResponse:
        every_token = says_yes(dict(request.headers.raw), EVERY_TOKEN_HEADER)
        events = self._inner.stream.remote(request.url.path, await request.body(), every_token)
        return StreamingResponse(events, media_type="text/event-stream")


def app(args: dict[str, Any]) -> Application:
    """``args``: ``name``, which the answers carry as their model, and ``model``, the ``args`` of a model entry."""
    model = ModelArgs.model_validate(args["model"])
    where = placement(model)
    inner = Inner.options(  # type: ignore[attr-defined]
        ray_actor_options=where.actor_options,
        placement_group_bundles=where.bundles,
        placement_group_strategy=where.strategy,
    )
    application: Application = Ingress.bind(inner.bind(model, args["name"]))  # type: ignore[attr-defined]
    return application
