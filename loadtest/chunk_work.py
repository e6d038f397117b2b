"""How much Python the gateway runs for one chunk of a stream: calls, counted and not timed, so no machine is too busy.

    python -m loadtest.chunk_work

Chunks as a replica sends them, with their journal's records, go one by one through the gateway's connection and answer,
each in a read of its own, as when a model is idle. What is counted are the calls that cProfile sees, functions in C
included, less those of the event loop that feeds them. No socket, no cluster.
"""

import asyncio
import cProfile
import pstats
from typing import Annotated, Any, cast

import typer

from serve_app.gateway.answer import Answer
from serve_app.gateway.record import Record
from serve_app.gateway.upstream import Connection
from serve_app.lease import GROUP_END, KEPT_HEADER, RECORD

EVENT = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{'
)
EVENT += b'"content":" sea"},"logprobs":null,"finish_reason":null}]}\n\n'
GROUP = EVENT + RECORD + b"[1,2]" + GROUP_END
HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
    + KEPT_HEADER
    + b": 1\r\n\r\n"
)
CHUNK = b"%x\r\n%b\r\n" % (len(GROUP), GROUP)


class _Transport(asyncio.Transport):
    def write(self, data: Any) -> None:
        pass

    def abort(self) -> None:
        pass


async def calls(chunks: int, *, relayed: bool = True) -> int:
    """All calls while ``chunks`` chunks arrive; ``relayed``: whether anything becomes of them."""
    sent = 0

    async def send(message: Any) -> None:
        nonlocal sent
        sent += len(message.get("body", b""))

    async def relay(connection: Connection) -> None:
        head = await connection.request(b"", b"")
        await Answer(send, "openai", Record(lambda *_labels, **_value: None, "")).stream(head, connection.read)

    connection = Connection()
    connection.connection_made(cast(asyncio.BaseTransport, _Transport()))
    relaying = asyncio.create_task(relay(connection))
    await asyncio.sleep(0)
    connection.data_received(HEAD + CHUNK)
    await asyncio.sleep(0.01)
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(chunks):
        if relayed:
            connection.data_received(CHUNK)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    profile.disable()
    connection.data_received(b"0\r\n\r\n")
    await relaying
    assert sent == len(EVENT) * (1 + chunks * relayed), "not every chunk was relayed"
    return int(cast(Any, pstats.Stats(profile)).total_calls)


def main(chunks: Annotated[int, typer.Option(min=1, help="How many to take the mean of.")] = 1000) -> None:
    """Print the calls per chunk."""

    async def difference() -> int:
        return await calls(chunks) - await calls(chunks, relayed=False)

    print(f"the gateway makes {asyncio.run(difference()) / chunks:.1f} calls per chunk")


if __name__ == "__main__":
    typer.run(main)
