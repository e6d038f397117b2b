"""What a replica hands over beside a stream, without an engine."""

import asyncio
from typing import Any

import pytest

from serve_app.asgi import Message, Receive, Scope, Send
from serve_app.lease import GENERATION_HEADER, GROUP_END, KEEP_HEADER, RECORD, REFUSED_HEADER, RESUME_HEADER
from serve_app.model.journal import JOURNAL, Journaled

START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}


def scope(**headers: bytes) -> Scope:
    given = [(b"x-modelyard-" + name.replace("_", "-").encode(), value) for name, value in headers.items()]
    return {"type": "http", "method": "POST", "path": "/", "headers": [(KEEP_HEADER, b"1"), *given]}


def body(*parts: bytes) -> Receive:
    left = [{"type": "http.request", "body": p, "more_body": i + 1 < len(parts)} for i, p in enumerate(parts)]

    async def receive() -> Message:
        return left.pop(0)

    return receive


async def answer(app: Any, scope: Scope, receive: Receive) -> list[Message]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await Journaled(app, "g")(scope, receive, send)
    return sent


def event(text: bytes) -> Message:
    return {"type": "http.response.body", "body": text, "more_body": True}


async def test_a_group_is_one_output_and_its_record() -> None:
    """Events of one output, however many, leave together, followed by what was generated up to there; an output that
    nothing was rendered of waits for the next."""

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        journal = JOURNAL.get()
        assert journal is not None
        await send(START)
        for token, events in ((5, (b"role", b"A")), (6, ()), (7, (b"B",))):
            journal.note((token,), "x", finished=token == 7)
            for text in events:
                await send(event(text))
            await journal.flush()
        await send({"type": "http.response.body", "body": b"end"})

    sent = await answer(app, scope(), body(b""))
    assert [m["body"] for m in sent[1:]] == [
        b"roleA" + RECORD + b"1 5" + GROUP_END,
        b"B" + RECORD + b"2 6;3! 7" + GROUP_END,
        b"end" + RECORD + GROUP_END,
    ]


async def test_what_is_replayed_is_not_sent() -> None:
    """The journal comes in front of the body, however that is cut; what is rendered while it is replayed is dropped."""
    seen: list[bytes] = []

    async def app(_scope: Scope, receive: Receive, send: Send) -> None:
        journal = JOURNAL.get()
        assert journal is not None
        assert journal.ids == [5, 6]
        seen.append((await receive())["body"])
        await send(START)
        await send(event(b"again"))
        journal.replaying = False
        await send({"type": "http.response.body", "body": b"new"})

    for parts in ((b"1 5;2 6{}",), (b"1 5", b";2 6", b"{}"), (b"1 5;2 6", b"{}")):
        sent = await answer(app, scope(resume=b"7", generation=b"g"), body(*parts))
        assert [m["body"] for m in sent[1:]] == [b"new" + RECORD + GROUP_END]
    assert b"".join(seen).strip(b"{}") == b""


async def test_another_generation_is_refused() -> None:
    """Before anything of the request is read."""
    sent = await answer(None, scope(resume=b"3", generation=b"other"), body())
    assert dict(sent[0]["headers"])[REFUSED_HEADER] == b"version"


@pytest.mark.parametrize("begun", [True, False])
async def test_a_lost_engine_says_nothing(begun: bool) -> None:
    """Neither an error event nor an end: the connection has to break, so that the gateway goes on elsewhere. Before
    the answer has begun nothing may return, or the server would make up a 500."""

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        journal = JOURNAL.get()
        assert journal is not None
        if begun:
            await send(START)
        journal.lost = True
        await send(START | {"status": 500})
        await send({"type": "http.response.body", "body": b"the engine is dead"})

    asked = asyncio.create_task(answer(app, scope(), body(b"")))
    done, _ = await asyncio.wait([asked], timeout=0.1)
    if begun:
        assert (await asked)[1:] == []
    else:
        assert not done
        asked.cancel()


async def test_who_does_not_ask_gets_no_journal() -> None:
    """The app's messages pass as they are."""

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        assert JOURNAL.get() is None
        await send(START)
        await send({"type": "http.response.body", "body": b"x"})

    sent = await answer(app, {"type": "http", "headers": [(RESUME_HEADER, b"1"), (GENERATION_HEADER, b"g")]}, body())
    assert [m.get("body") for m in sent] == [None, b"x"]
