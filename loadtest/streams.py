"""The client: many streams at once over plain HTTP/1.1, each checked for completeness. Runs in a process of its own."""

import asyncio
import json
import time
from dataclasses import dataclass

import uvloop

from serve_app.gateway.upstream import Connection, ConnectionBroken

PATH = "/v1/chat/completions"
END = b"data: [DONE]\n\n"
# How much longer than its ideal time a load may take before it is given up.
PATIENCE_FACTOR, PATIENCE_S = 20, 60


class StreamFault(Exception):
    """A stream was refused, or incomplete: its figures would mean nothing."""


@dataclass(frozen=True)
class Load:
    """``streams`` at once, each of ``chunks`` chunks at ``interval_s``, ``passes`` after each other per connection."""

    port: int
    model: str
    streams: int
    chunks: int
    interval_s: float
    passes: int = 1

    @property
    def total(self) -> int:
        return self.streams * self.chunks * self.passes


@dataclass(frozen=True)
class Taken:
    """What a load took: ``seconds`` in all, and each stream's seconds to its first chunk."""

    seconds: float
    ttft_s: tuple[float, ...]


def run(load: Load) -> Taken:
    """Raises ``StreamFault``."""
    taken: Taken = uvloop.run(_run(load))
    return taken


def body(load: Load) -> bytes:
    """One whole answer, to compare systems by what they send."""
    answer: bytes = uvloop.run(_one(load))
    return answer


async def _one(load: Load) -> bytes:
    connection = await Connection.open("127.0.0.1", load.port)
    try:
        return (await stream(connection, load))[1]
    finally:
        connection.close()


async def _run(load: Load) -> Taken:
    connections = [await Connection.open("127.0.0.1", load.port) for _ in range(load.streams)]
    try:
        start = time.perf_counter()
        limit = PATIENCE_S + PATIENCE_FACTOR * load.passes * load.chunks * load.interval_s
        try:
            async with asyncio.timeout(limit):
                found = await asyncio.gather(*(_passes(connection, load) for connection in connections))
        except TimeoutError:
            raise StreamFault(f"the load was not over after {limit:.0f} s") from None
        except ConnectionBroken as error:
            raise StreamFault(f"a stream was cut: {error}") from error
        return Taken(time.perf_counter() - start, tuple(ttft for each in found for ttft in each))
    finally:
        for connection in connections:
            connection.close()


async def _passes(connection: Connection, load: Load) -> list[float]:
    return [(await stream(connection, load))[0] for _ in range(load.passes)]


async def stream(connection: Connection, load: Load) -> tuple[float, bytes]:
    """Seconds to the first chunk, and the whole answer."""
    request = json.dumps(
        {
            "model": load.model,
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": load.chunks,
            "stream": True,
            "fake": {"interval_s": load.interval_s},
        }
    ).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: 127.0.0.1:{load.port}\r\ncontent-type: application/json\r\n"
    start = time.perf_counter()
    answer = await connection.request(f"{head}content-length: {len(request)}\r\n\r\n".encode(), request)
    parts = [await connection.read()]
    ttft = time.perf_counter() - start
    while parts[-1]:
        parts.append(await connection.read())
    text = b"".join(parts)
    if answer.status != 200:
        raise StreamFault(f"status {answer.status}: {text[:500]!r}")
    found = text.count(b'"content":"t')  # a chat stream begins with an event of its role alone
    if found != load.chunks or not text.endswith(END):
        raise StreamFault(f"{found} of {load.chunks} chunks; the answer ends in {text[-200:]!r}")
    return ttft, text
