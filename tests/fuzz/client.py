"""A client that sends any bytes, reads strictly, and leaves when it is told to."""

import asyncio
import contextlib
import socket
import struct
import time

import httptools

from tests.fuzz.case import Case, Reply

HOST = "127.0.0.1"


class _Parsed:
    """httptools' callbacks: fills a reply, interim answers (1xx) left out."""

    def __init__(self, reply: Reply, *, head_only: bool) -> None:
        self.complete = False
        self._reply = reply
        self._head_only = head_only
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._reply.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._reply.status = self._parser.get_status_code()
        self.complete = self._head_only and self._reply.status >= 200

    def on_body(self, data: bytes) -> None:
        self._reply.body += data

    def on_message_complete(self) -> None:
        if self._reply.status >= 200:
            self.complete = True
        else:
            self._reply.headers.clear()


async def ask(port: int, case: Case, bound_s: float) -> Reply:
    """Send ``case`` on a connection of its own; an answer that is not whole after ``bound_s`` is broken."""
    reply = Reply()
    began = time.monotonic()
    reader, writer = await asyncio.open_connection(HOST, port)
    # Closed with RST: 20,000 connections must not use up the ports.
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sending = asyncio.create_task(_send(writer, case))
    try:
        async with asyncio.timeout(bound_s):
            if case.sends is None:
                await _read(reader, case, reply)  # while it sends: a server may refuse what it has not read to the end
            else:
                await sending
                reply.left = True
    except TimeoutError:
        reply.broken = f"no whole answer within {bound_s:g} s"
    except httptools.HttpParserError as error:
        reply.broken = f"no HTTP: {error!r}"
    except OSError as error:
        reply.broken = f"the connection broke: {error!r}"
        reply.reset = isinstance(error, ConnectionResetError)
    finally:
        sending.cancel()
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    reply.seconds = time.monotonic() - began
    return reply


async def _send(writer: asyncio.StreamWriter, case: Case) -> None:
    raw = case.raw[: case.sends]
    size = -(-len(raw) // case.pieces) or 1
    for at in range(0, len(raw), size):
        writer.write(raw[at : at + size])
        await asyncio.sleep(0.001 if case.pieces > 1 or case.sends is not None else 0)


async def _read(reader: asyncio.StreamReader, case: Case, reply: Reply) -> None:
    parsed = _Parsed(reply, head_only=case.method == b"HEAD")
    seen = 0
    while not parsed.complete:
        if case.reads is not None and seen >= case.reads:
            reply.left = True
            return
        data = await reader.read(65536 if case.reads is None else max(1, case.reads - seen))
        if not data:
            reply.broken = "the connection ended before the answer"
            return
        seen += len(data)
        parsed.feed(data)
