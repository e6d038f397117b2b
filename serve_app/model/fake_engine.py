"""The scripted fake engine: the engine's protocol without a model, for tests and load tests.

It speaks enough of vLLM's HTTP surface to stand in for it, and does what its script (``FakeScript`` in the config)
and the request's own ``fake`` object say::

    {"model": "m", "messages": [...], "fake": {"fail": 3}}

Keys of ``fake``: ``status`` (answer this HTTP status at once), ``fail`` (raise after so many tokens, as an engine
error in the stream), ``hang`` (stop sending after so many tokens, for ever), ``die`` (SIGKILL this process after so
many tokens), ``interval_s`` and ``first_token_s`` (override the script's). Answers are deterministic: token ``i`` is
``"t<i> "``, and usage counts prompt words.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from serve_app import errors
from serve_app.asgi import ASGIApp, ClientLeft, Receive, Scope, Send, read_body, respond, while_client_stays
from serve_app.config import FakeScript
from serve_app.lease import EngineFacts
from serve_app.model.engine_protocol import ASKED_MODEL

_PATHS = {
    "generate": (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
    ),
    "embed": ("/v1/embeddings",),
    "score": ("/v1/score", "/v1/rerank"),
    "transcription": ("/v1/audio/transcriptions",),
}
_COMMON = ("/tokenize", "/detokenize")


class FakeEngine:
    def __init__(self, script: FakeScript, name: str) -> None:
        self._script = script
        self._name = name
        self._running = 0
        self._finished = 0
        self._aborted = 0
        self._dead = False

    async def start(self) -> EngineFacts:
        await asyncio.sleep(self._script.start_s)
        if self._script.fail_start is not None:
            raise RuntimeError(self._script.fail_start)
        paths = [path for task in self._script.tasks for path in _PATHS[task]]
        return EngineFacts(tasks=tuple(self._script.tasks), paths=frozenset((*paths, *_COMMON)), max_model_len=4096)

    @property
    def asgi(self) -> ASGIApp:
        return self._answer

    async def check_health(self) -> None:
        if self._dead:
            raise RuntimeError("the fake engine is dead")

    def report(self) -> dict[str, Any]:
        return {
            "running": self._running,
            "finished": self._finished,
            "aborted": self._aborted,
            "pid": os.getpid(),
        }

    def shutdown(self) -> None:
        self._dead = True

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._running += 1
        try:
            yield
        except (asyncio.CancelledError, ClientLeft):
            self._aborted += 1
            raise
        else:
            self._finished += 1
        finally:
            self._running -= 1

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        body = await read_body(receive)
        try:
            request: dict[str, Any] = (
                json.loads(body) if not scope["path"].startswith("/v1/audio") else {"model": "audio"}
            )
        except ValueError:
            await _json(send, 400, b'{"error": {"message": "not JSON"}}')
            return
        fake: dict[str, Any] = request.get("fake", {})
        if "status" in fake:
            error = errors.Relayed(int(fake["status"]), "the script says so")
            await _json(send, error.status, errors.body(error))
            return
        with suppress(ClientLeft), self._counted():
            async with while_client_stays(receive):
                await self._work(scope["path"], request, fake, send)

    async def _work(self, path: str, request: dict[str, Any], fake: dict[str, Any], send: Send) -> None:
        model = ASKED_MODEL.get() or self._name
        if path in _PATHS["generate"][:2]:
            await self._generate(path, model, request, fake, send)
            return
        await asyncio.sleep(fake.get("first_token_s", self._script.first_token_s))
        if path == "/v1/embeddings":
            vector = {"object": "embedding", "index": 0, "embedding": [0.0, 1.0]}
            answer: dict[str, Any] = {"object": "list", "model": model, "data": [vector], "usage": _usage(request, 0)}
        elif path == "/v1/messages/count_tokens":
            answer = {"input_tokens": _prompt_tokens(request)}
        else:
            answer = {"object": path.rsplit("/", 1)[-1], "model": model, "received": sorted(request)}
        await _json(send, 200, json.dumps(answer).encode())

    async def _generate(self, path: str, model: str, request: dict[str, Any], fake: dict[str, Any], send: Send) -> None:
        count = request.get("max_tokens") or request.get("max_completion_tokens") or self._script.tokens
        chat = path.endswith("chat/completions")
        head = {"id": "fake-1", "object": "chat.completion" if chat else "text_completion", "model": model}
        if request.get("stream"):
            await _start(send, 200, b"text/event-stream")
            async for token in self._tokens(int(count), fake):
                if token is None:
                    await _chunk(send, errors.sse_event(errors.UpstreamBroken("the fake engine failed")))
                    break
                choice: dict[str, Any] = {"index": 0, "finish_reason": None}
                choice |= {"delta": {"content": token}} if chat else {"text": token}
                event = json.dumps(head | {"choices": [choice]}, separators=(",", ":"))
                await _chunk(send, f"data: {event}\n\n".encode())
            else:
                if (request.get("stream_options") or {}).get("include_usage"):
                    usage = json.dumps(head | {"choices": [], "usage": _usage(request, int(count))})
                    await _chunk(send, f"data: {usage}\n\n".encode())
                await _chunk(send, b"data: [DONE]\n\n")
            await send({"type": "http.response.body", "body": b""})
            return
        text = ""
        async for token in self._tokens(int(count), fake):
            if token is None:
                error = errors.UpstreamBroken("the fake engine failed")
                await _json(send, 500, errors.body(error))
                return
            text += token
        choice = {"index": 0, "finish_reason": "stop"}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        await _json(send, 200, json.dumps(head | {"choices": [choice], "usage": _usage(request, int(count))}).encode())

    async def _tokens(self, count: int, fake: dict[str, Any]) -> AsyncIterator[str | None]:
        """``count`` tokens at the scripted pace; None: the engine failed here."""
        interval = fake.get("interval_s", self._script.token_interval_s)
        await asyncio.sleep(fake.get("first_token_s", self._script.first_token_s))
        for i in range(count):
            if fake.get("fail") == i:
                yield None
                return
            if fake.get("hang") == i:
                await asyncio.Event().wait()
            if fake.get("die") == i:
                os.kill(os.getpid(), signal.SIGKILL)
            if i and interval:
                await asyncio.sleep(interval)
            yield f"t{i} "


def _prompt_tokens(request: dict[str, Any]) -> int:
    messages = request.get("messages")
    texts = [str(m.get("content", "")) for m in messages] if messages else [str(request.get("prompt", ""))]
    return sum(len(text.split()) for text in texts)


def _usage(request: dict[str, Any], completion: int) -> dict[str, int]:
    prompt = _prompt_tokens(request)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": message["type"] + ".complete"})
        if message["type"] == "lifespan.shutdown":
            return


async def _start(send: Send, status: int, content_type: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", content_type)]})


async def _chunk(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def _json(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await respond(send, status, headers, body)
