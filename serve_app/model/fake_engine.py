"""The scripted fake engine: the engine's protocol without a model, for tests and load tests.

It speaks enough of vLLM's HTTP surface to stand in for it, and does what its script (``FakeScript`` in the config)
and the request's own ``fake`` object say::

    {"model": "m", "messages": [...], "fake": {"fail": 3}}

Keys of ``fake``: ``status`` (answer this HTTP status at once), ``fail`` (raise after so many tokens, as an engine
error in the stream), ``hang`` (stop sending after so many tokens, for ever), ``die`` (SIGKILL this process after so
many tokens), ``interval_s`` and ``first_token_s`` (override the script's). Answers are deterministic: token ``i`` is
``"t<i> "``, and usage counts prompt words. ``fail``, ``hang`` and ``die`` happen where the answer began: not again
where its stream is continued. An adapter's tokens are ``"NAME:t<i> "`` (other routes name it in
``adapter``), and one whose path ends in ``broken`` is unusable.
"""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from serve_app import errors
from serve_app.asgi import ASGIApp, ClientLeft, Receive, Scope, Send, read_body, respond, while_client_stays
from serve_app.config import FakeScript
from serve_app.lease import EngineFacts
from serve_app.model.adapters import Adapted, Adapters
from serve_app.model.counting import COUNTING
from serve_app.model.engine_protocol import ADAPTER, ASKED_MODEL, Adapter, nobody_hears
from serve_app.model.journal import JOURNAL, Journal
from serve_app.model.loading import told
from serve_app.model.token_rate import TokenRate
from serve_app.scaling import EngineStats

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
_JOURNALED = _PATHS["generate"][:2]
# What an engine checks of a request, as far as this one reads it.
_KINDS: dict[str, type] = {"fake": dict, "messages": list, "stream_options": dict}
_LENGTHS = ("max_tokens", "max_completion_tokens")
_MOST_TOKENS = 1_000_000
_ADAPTERS = 8


@dataclass(frozen=True, slots=True)
class Output:
    """One token. ``finished``: the answer's last."""

    token: int
    finished: bool

    @property
    def text(self) -> str:
        adapter = ADAPTER.get()
        return f"{adapter.name}:t{self.token} " if adapter else f"t{self.token} "


class ScriptedFailure(Exception):
    """The engine failed this request, as its script said."""


class EngineProcess:
    """A child process that the tokens depend on, as vLLM's do. It echoes a byte every few milliseconds (``cat``):
    stopped, no token is made; killed, this process ends too.
    """

    TICK_S = 0.02

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._clock: asyncio.Task[None] | None = None
        self._running = asyncio.Event()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self) -> None:
        pipe = asyncio.subprocess.PIPE
        # It ends with this process: its standard input closes.
        self._process = await asyncio.create_subprocess_exec("cat", stdin=pipe, stdout=pipe)
        self._clock = asyncio.create_task(self._tick())

    async def _tick(self) -> None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(Exception):  # event loops differ in what they raise for a pipe whose reader is gone
            while True:
                process.stdin.write(b".")
                echo = asyncio.create_task(process.stdout.read(1))
                if not (await asyncio.wait([echo], timeout=5 * self.TICK_S))[0]:
                    self._running.clear()
                if not await echo:
                    break
                self._running.set()
                await asyncio.sleep(self.TICK_S)
        os._exit(1)

    async def step(self) -> None:
        """Wait until the engine runs."""
        await self._running.wait()

    def stop(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()


class FakeEngine:
    def __init__(self, script: FakeScript, name: str, max_num_seqs: int = 256) -> None:
        self._script = script
        self._name = name
        self._max_num_seqs = max_num_seqs
        self._seats = asyncio.Semaphore(max_num_seqs)
        self._tokens = TokenRate()
        self._running = 0
        self._finished = 0
        self._aborted = 0
        self._resumed = 0
        self._chunk_s: float | None = None
        self._dead = False
        self._process = EngineProcess() if script.process else None
        self._adapters = Adapters(_load, _unload, _ADAPTERS)

    async def start(self, tell: Callable[[str], object] = nobody_hears) -> EngineFacts:
        with told(tell, None):
            await asyncio.sleep(self._script.start_s)
        if self._script.fail_start is not None:
            raise RuntimeError(self._script.fail_start)
        if self._process is not None:
            await self._process.start()
        paths = [path for task in self._script.tasks for path in _PATHS[task]]
        return EngineFacts(tasks=tuple(self._script.tasks), paths=frozenset((*paths, *_COMMON)), max_model_len=4096)

    @property
    def asgi(self) -> ASGIApp:
        return Adapted(self._answer, self._adapters)

    async def check_health(self) -> None:
        if self._dead:
            raise RuntimeError("the fake engine is dead")

    async def ping(self) -> None:
        if self._process is not None:
            await self._process.step()

    def share_events(self, chunk_s: float) -> None:
        """Each token has its own event, always: tests count them. ``report`` shows what was asked for."""
        self._chunk_s = chunk_s

    def stats(self) -> EngineStats:
        running = min(self._running, self._max_num_seqs)
        return EngineStats(running, self._running - running, tokens_s=self._tokens.per_second())

    def report(self) -> dict[str, Any]:
        return {
            "running": self._running,
            "finished": self._finished,
            "aborted": self._aborted,
            "resumed": self._resumed,
            "adapters": self._adapters.names,
            "chunk_s": self._chunk_s,
            "pid": os.getpid(),
            "engine_pid": self._process.pid if self._process else None,
        }

    def shutdown(self) -> None:
        self._dead = True
        if self._process is not None:
            self._process.stop()

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
        except (ValueError, RecursionError):
            await _json(send, 400, b'{"error": {"message": "not JSON"}}')
            return
        if (wrong := _wrong(request)) is not None:
            await _json(send, 400, errors.body(errors.InvalidRequest(f"`{wrong}` is not valid", param=wrong)))
            return
        fake: dict[str, Any] = request.get("fake") or {}
        if "status" in fake:
            error = errors.Relayed(int(fake["status"]), "the script says so")
            await _json(send, error.status, errors.body(error))
            return
        # As vLLM does it: the answer's id is the request's.
        answer_id = "fake-" + dict(scope["headers"]).get(b"x-request-id", b"1").decode("latin-1")
        with suppress(ClientLeft), self._counted():
            async with while_client_stays(receive), self._seats:
                await self._work(scope["path"], answer_id, request, fake, send)

    async def _work(self, path: str, answer_id: str, request: dict[str, Any], fake: dict[str, Any], send: Send) -> None:
        generated = 0

        def note() -> None:
            nonlocal generated
            generated += 1

        if (counting := COUNTING.get()) is not None:
            journal = JOURNAL.get()
            generated = len(journal.ids) if journal is not None else 0
            counting.requests.append(lambda: (_prompt_tokens(request), generated))
        model = ASKED_MODEL.get() or self._name
        if path in _JOURNALED:
            chat = path.endswith("chat/completions")
            what = "chat.completion" if chat else "text_completion"
            head = {"id": answer_id, "object": what, "created": int(time.time()), "model": model}
            # Which processes made it: the replica's and the engine's.
            head["system_fingerprint"] = f"{os.getpid()}-{self.report()['engine_pid']}"
            outputs = self._outputs(request, fake, note)
            if request.get("stream"):
                await self._stream(head, chat, request, outputs, send)
            else:
                await self._whole(head, chat, request, outputs, send)
            return
        await asyncio.sleep(fake.get("first_token_s", self._script.first_token_s))
        if path == "/v1/embeddings":
            vector = {"object": "embedding", "index": 0, "embedding": [0.0, 1.0]}
            answer: dict[str, Any] = {"object": "list", "model": model, "data": [vector], "usage": _usage(request, 0)}
        elif path == "/v1/messages/count_tokens":
            answer = {"input_tokens": _prompt_tokens(request)}
        else:
            answer = {"object": path.rsplit("/", 1)[-1], "model": model, "received": sorted(request)}
        if (adapter := ADAPTER.get()) is not None:
            answer["adapter"] = adapter.name
        await _json(send, 200, json.dumps(answer).encode())

    async def _stream(
        self, head: dict[str, Any], chat: bool, request: dict[str, Any], outputs: AsyncIterator[Output], send: Send
    ) -> None:
        def event(delta: dict[str, Any], finish: str | None = None) -> bytes:
            choice = {"index": 0, **({"delta": delta} if chat else delta), "finish_reason": finish}
            return f"data: {json.dumps(head | {'choices': [choice]}, separators=(',', ':'))}\n\n".encode()

        if chat:
            head["object"] = "chat.completion.chunk"
        await _start(send, 200, b"text/event-stream")
        count = 0
        try:
            async for output in outputs:
                if chat and not count:
                    await _chunk(send, event({"role": "assistant", "content": ""}))
                count += 1
                finish = "length" if output.finished else None
                await _chunk(send, event({"content" if chat else "text": output.text}, finish))
        except ScriptedFailure:
            await _chunk(send, errors.sse_event(errors.UpstreamBroken("the fake engine failed")))
        else:
            if (request.get("stream_options") or {}).get("include_usage"):
                usage = json.dumps(head | {"choices": [], "usage": _usage(request, count)}, separators=(",", ":"))
                await _chunk(send, f"data: {usage}\n\n".encode())
            await _chunk(send, b"data: [DONE]\n\n")
        await send({"type": "http.response.body", "body": b""})

    async def _whole(
        self, head: dict[str, Any], chat: bool, request: dict[str, Any], outputs: AsyncIterator[Output], send: Send
    ) -> None:
        try:
            texts = [output.text async for output in outputs]
        except ScriptedFailure:
            await _json(send, 500, errors.body(errors.UpstreamBroken("the fake engine failed")))
            return
        text = "".join(texts)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        await _json(send, 200, json.dumps(head | {"choices": [choice], "usage": _usage(request, len(texts))}).encode())

    async def _outputs(
        self, request: dict[str, Any], fake: dict[str, Any], note: Callable[[], None]
    ) -> AsyncIterator[Output]:
        """The answer's tokens at the scripted pace, those made elsewhere first."""
        count = int(request.get("max_tokens") or request.get("max_completion_tokens") or self._script.tokens)
        journal = JOURNAL.get() or Journal((), _nowhere)
        self._resumed += journal.replaying
        for token in journal.ids:
            yield Output(token, finished=token + 1 == count)
        journal.replaying = False
        interval = fake.get("interval_s", self._script.token_interval_s)
        first = len(journal.ids)
        faults = {} if first else fake
        await asyncio.sleep(fake.get("first_token_s", self._script.first_token_s))
        for token in range(first, count):
            if faults.get("fail") == token:
                raise ScriptedFailure
            if faults.get("hang") == token:
                await asyncio.Event().wait()
            if faults.get("die") == token:
                os.kill(os.getpid(), signal.SIGKILL)
            if token > first and interval:
                await asyncio.sleep(interval)
            if self._process is not None:
                await self._process.step()
            output = Output(token, finished=token + 1 == count)
            self._tokens.add(1)
            note()
            journal.note((token,), output.text, output.finished)
            yield output
            await journal.flush()


async def _load(adapter: Adapter) -> Adapter:
    if adapter.path.endswith("broken"):
        raise errors.adapter_unusable(adapter.name, "its path says so")
    return adapter


async def _unload(_adapter: Adapter) -> None:
    """There is nothing to take away."""


async def _nowhere(_message: Any) -> None:
    """Where no journal is kept."""


def _wrong(request: dict[str, Any]) -> str | None:
    """The field for which an engine would refuse this request."""
    given = {name: value for name, value in request.items() if value is not None}
    for name, kind in _KINDS.items():
        if name in given and not isinstance(given[name], kind):
            return name
    if not all(isinstance(message, dict) for message in given.get("messages", ())):
        return "messages"
    lengths = (name for name in _LENGTHS if name in given)
    return next((name for name in lengths if not (type(given[name]) is int and 0 <= given[name] <= _MOST_TOKENS)), None)


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
