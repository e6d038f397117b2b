"""When a stream's head goes out, without an engine."""

import asyncio
from typing import Any

import pytest

from serve_app.asgi import Message, Receive, Scope, Send
from serve_app.model.commit_late import ADMISSION, CommitLate

HEAD = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}


def refused(error: Exception) -> tuple[int, bytes]:
    return 400, str(error).encode()


def chunk(data: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def sent_by(app: Any) -> list[tuple[str, Message]]:
    """What leaves ``CommitLate(app)``, each with the step of the app at which it left."""
    sent: list[tuple[str, Message]] = []

    async def send(message: Message) -> None:
        sent.append((app.step, message))

    async def receive() -> Message:
        raise AssertionError("not read here")

    await CommitLate(app, lambda: False, refused)({"type": "http"}, receive, send)
    return sent


class Streams:
    """A stream whose engine accepts the request after ``accepts_after`` messages (None: never asked)."""

    def __init__(self, accepts_after: int | None) -> None:
        self.accepts_after = accepts_after
        self.step = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        messages = [HEAD, chunk(b"one"), chunk(b"two"), chunk(b"", more=False)]
        for at, message in enumerate(messages):
            if at == self.accepts_after:
                admission = ADMISSION.get()
                assert admission is not None
                admission.accepted = True
            self.step = str(at)
            await send(message)


async def test_a_stream_is_committed_once_the_engine_accepted() -> None:
    """Head and early events wait for the engine, in order, and later ones pass at once."""
    sent = await sent_by(Streams(accepts_after=2))
    assert [(step, m.get("body")) for step, m in sent] == [("2", None), ("2", b"one"), ("2", b"two"), ("3", b"")]
    sent = await sent_by(Streams(accepts_after=0))
    assert [step for step, _ in sent] == ["0", "1", "2", "3"]


async def test_a_stream_that_asked_no_engine_is_sent_in_the_end() -> None:
    """Nothing is swallowed where no engine was asked."""
    sent = await sent_by(Streams(accepts_after=None))
    assert [m.get("body") for _, m in sent] == [None, b"one", b"two", b""]


@pytest.mark.parametrize("status", [200, 500])
async def test_a_dead_engines_replica_says_nothing(status: int) -> None:
    """An uncommitted answer of a dead engine is never sent: the connection ends with the replica."""
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(HEAD | {"status": status})
        admission = ADMISSION.get()
        assert admission is not None
        admission.refusal = RuntimeError("dead")
        await send(chunk(b"error", more=False))

    async def keep(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError("not read here")

    task = asyncio.ensure_future(CommitLate(app, lambda: True, refused)({"type": "http"}, receive, keep))
    await asyncio.sleep(0)
    assert not task.done()
    task.cancel()
    assert sent == []


async def test_a_refused_stream_is_the_refusal() -> None:
    """An engine that says no after the head was made: the client gets the refusal's status and body, not the stream."""

    class Refused(Streams):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            self.step = "0"
            await send(HEAD)
            admission = ADMISSION.get()
            assert admission is not None
            admission.refusal = ValueError("no such token")
            await send(chunk(b"error event"))
            await send(chunk(b"", more=False))

    messages = [m for _, m in await sent_by(Refused(None))]
    assert [m.get("status", m.get("body")) for m in messages] == [400, b"no such token"]
