"""The parts of the vLLM adapter that need no vLLM."""

import asyncio
from typing import Any

import pytest

from serve_app import errors
from serve_app.model import engine
from serve_app.model.engine_protocol import Message, Receive, Scope, Send

HEAD = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}


def chunk(data: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def sent_by(app: Any) -> list[tuple[str, Message]]:
    """What leaves ``_CommitLate(app)``, each with the step of the app at which it left."""
    sent: list[tuple[str, Message]] = []

    async def send(message: Message) -> None:
        sent.append((app.step, message))

    async def receive() -> Message:
        raise AssertionError("not read here")

    await engine._CommitLate(app, is_dead=lambda: False)({"type": "http"}, receive, send)
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
                admission = engine._ADMISSION.get()
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
        admission = engine._ADMISSION.get()
        assert admission is not None
        admission.refusal = RuntimeError("dead")
        await send(chunk(b"error", more=False))

    async def keep(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError("not read here")

    task = asyncio.ensure_future(engine._CommitLate(app, is_dead=lambda: True)({"type": "http"}, receive, keep))
    await asyncio.sleep(0)
    assert not task.done()
    task.cancel()
    assert sent == []


def test_faults_are_those_of_the_branch_that_was_meant() -> None:
    """A union's other branches do not speak, and no class name is shown."""
    where = ("body", "messages", 0)
    faults = [
        {"type": "literal_error", "loc": (*where, "SystemParam", "role"), "msg": "Input should be 'system'"},
        {"type": "string_type", "loc": (*where, "SystemParam", "content"), "msg": "should be a text"},
        {"type": "missing", "loc": (*where, "HarmonyMessage", "author"), "msg": "Field required"},
        {"type": "string_type", "loc": (*where, "UserParam", "content", "str"), "msg": "should be text"},
    ]
    error = errors.invalid_body(engine._meant(faults))
    assert (error.param, error.message) == ("messages.0.content", "messages.0.content: should be text")


def test_faults_stay_where_no_branch_was_meant() -> None:
    """A constant that fits no branch is still a fault."""
    fault = {"type": "literal_error", "loc": ("body", "input", "Item", "type"), "msg": "Input should be 'message'"}
    assert errors.invalid_body(engine._meant([fault])).param == "input.type"
