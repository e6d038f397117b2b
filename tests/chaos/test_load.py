"""The clients see what happened: each way in which a server can treat a request, from a server that does just that."""

import asyncio
from dataclasses import replace

import pytest

from tests.chaos.judge import CHAT, COMPLETIONS, Record
from tests.chaos.load import HOST, ask, draw

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNK = b"6\r\nhello\n\r\n"
LAST = b"0\r\n\r\n"


async def asked_of(answer: bytes, *, then_wait: bool = False, leaves: bool = False) -> Record:
    """One request to a server that reads it, sends ``answer``, and then closes or waits."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length"))
        await reader.readexactly(int(length.split()[1]))
        writer.write(answer)
        if then_wait:
            await reader.read()  # until the client closes
        writer.close()

    asked = replace(draw(1, 0, "m"), leaves_after_s=0.1 if leaves else None)
    async with await asyncio.start_server(serve, HOST, 0) as server:
        return await ask(server.sockets[0].getsockname()[1], asked, limit_s=0.3)


async def test_a_complete_answer() -> None:
    """Status, headers and the body without its framing."""
    record = await asked_of(HEAD + CHUNK + CHUNK + LAST)
    assert (record.end, record.status, record.body) == ("complete", 200, b"hello\nhello\n")
    assert record.headers["content-type"] == "text/event-stream"


@pytest.mark.parametrize("answer", [b"", HEAD[:10], HEAD, HEAD + CHUNK, HEAD + CHUNK[:4]])
async def test_a_broken_answer(answer: bytes) -> None:
    """Closed before the head, in it, after it, between two chunks, in one: what came is kept."""
    record = await asked_of(answer)
    assert record.end == "broken"
    assert record.status == (200 if HEAD in answer else None)
    assert record.body in (b"", b"hello\n", b"h")


async def test_no_http() -> None:
    """Nonsense is a broken answer."""
    assert (await asked_of(b"hello\r\n\r\n")).end == "broken"


async def test_nobody_listens() -> None:
    """A refused connection is a broken answer too."""
    server = await asyncio.start_server(lambda _r, _w: None, HOST, 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    record = await ask(port, draw(1, 0, "m"), 5)
    assert (record.end, record.status) == ("broken", None)


@pytest.mark.parametrize("answer", [b"", HEAD + CHUNK])
async def test_patience_ends(answer: bytes) -> None:
    """A server that says nothing, or nothing more: hung, unless the client meant to leave."""
    assert (await asked_of(answer, then_wait=True)).end == "hung"
    assert (await asked_of(answer, then_wait=True, leaves=True)).end == "left"


def test_requests_of_a_seed() -> None:
    """The same every time, other ones with another seed, and a mixture of every sort that the suite promises."""
    asked = [draw(1, number, "m") for number in range(1000)]
    assert asked == [draw(1, number, "m") for number in range(1000)]
    assert asked != [draw(2, number, "m") for number in range(1000)]
    assert sum(a.stream for a in asked) == 500
    assert sum(a.stream and a.wants_usage for a in asked) == 250
    assert all(300 < sum(a.path == path for a in asked) < 700 for path in (CHAT, COMPLETIONS))
    assert 15 <= sum(a.leaves_after_s is not None for a in asked) <= 50
    # Of the streams alone: what is no stream can be asked again.
    assert 25 <= sum(not a.resumable for a in asked) <= 75
    assert {a.tokens for a in asked} == set(range(20, 201))
