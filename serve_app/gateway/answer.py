"""What goes back to one client, and what is kept of it should another replica have to go on.

While an answer streams, whole TCP reads are relayed and nothing is looked at but where an SSE event, or a group with a
journal's record, ends: so a stream is never cut inside one.
"""

import re
from collections.abc import Awaitable, Callable, Sequence

from serve_app import errors
from serve_app.asgi import Send, respond
from serve_app.errors import ModelyardError, Protocol
from serve_app.gateway.record import TIMING_HEADER, Record
from serve_app.gateway.upstream import Head
from serve_app.lease import GROUP_END, KEPT_HEADER, RECORD
from serve_app.one_id import REQUEST_ID_HEADER

# What of the engine's headers the client may see.
_RETURNED = frozenset((b"content-type", b"cache-control"))
# Tells the client that its request was taken over by other replicas so often before its answer began.
MOVES_HEADER = b"x-modelyard-moves"
# Tells the client which model answered in the place of the one that its name means.
FALLBACK_HEADER = b"x-modelyard-fallback"
_CREATED = re.compile(rb'"created": ?\d+')
# An engine's own error in a stream, on any route. JSON holds no line break as such, so no answer's text looks like it.
_ENGINE_ERROR = re.compile(rb'^(data: ?\{"error": ?\{|event: ?error$)', re.MULTILINE)

Read = Callable[[], Awaitable[bytes]]
Headers = Sequence[tuple[bytes, bytes]]


class Answer:
    """What goes back to one client: exactly one of a whole answer, a stream with a defined end, or an error.

    ``records``: the journal of a stream so far, unread (see ``serve_app.model.journal``). ``generation``: who may
    continue it. ``trailer``: what the replica said after the stream's last group. ``fallback``: the model that answers
    in another's place. ``record``: is told when the answer begins. ``tells_timing``: a stream's end says where the
    time went.
    """

    def __init__(self, send: Send, protocol: Protocol, record: Record) -> None:
        self._send = send
        self._protocol = protocol
        self.record = record
        self.started = False
        self.records: list[bytes] = []
        self.generation = b""
        self.trailer = b""
        self.fallback = ""
        self.tells_timing = False
        self.extra: list[tuple[bytes, bytes]] = []  # further headers of whatever the answer will be
        self._events = False  # the head of an SSE stream went out
        self._first = self._last = b""

    @property
    def committed(self) -> bool:
        """The client has a part of the answer, if only signs of life: no other model may take over now."""
        return self.started or self._events

    async def comment(self, text: str) -> None:
        """Show a client that asked for it that its request is alive, before there is an answer: an SSE comment. From
        now on an error can only be an event."""
        if not self._events:
            await self._begin(200, [(b"content-type", b"text/event-stream; charset=utf-8")])
        line = f": {text}\n\n".encode()
        await self._send({"type": "http.response.body", "body": line, "more_body": True})

    async def whole(self, head: Head, body: bytes) -> None:
        if self._events:
            raise errors.UpstreamBroken("The model answered with no stream, although the request waited as one.")
        self.started = True
        self.record.begins(stream=False)
        length = (b"content-length", str(len(body)).encode())
        self.record.status = head.status
        await respond(self._send, head.status, [*self._headers(head.headers), length], body)

    async def stream(self, head: Head, read: Read) -> None:
        """Relay an SSE stream, whole events at a time; nothing is committed before the replica's first event."""
        if generation := head.get(KEPT_HEADER):
            await self._groups(head, read, generation)
        else:
            await self._plain(head, read)

    @property
    def complete(self) -> bool:
        """The stream's last event went out; only its end is missing."""
        return self._last.endswith(b"data: [DONE]\n\n")

    async def end(self, rest: bytes = b"") -> None:
        self.record.engine_failed = _ENGINE_ERROR.search(self._last) is not None
        if self.tells_timing and not rest:
            rest = f": {self.record.timing(at_its_end=True)}\n\n".encode()
        await self._send({"type": "http.response.body", "body": rest})

    async def _plain(self, head: Head, read: Read) -> None:
        data = await read()
        await self._start(head)
        rest = last = before = b""
        send = self._send
        while data:
            if rest:
                data = rest + data
            if data.endswith(b"\n\n"):
                rest = b""
            else:
                cut = data.rfind(b"\n\n") + 2
                data, rest = (data[:cut], data[cut:]) if cut > 1 else (b"", data)
            if data:
                before, last = last, data
                await send({"type": "http.response.body", "body": data, "more_body": True})
            data = await read()
        # An error may be followed by the protocol's last event, in a read of its own.
        self._last = before + last + rest
        await self.end(rest)

    async def _groups(self, head: Head, read: Read, generation: bytes) -> None:
        """A stream with a journal: the records are kept, the events between them go out. Nothing of it is parsed."""
        continued = self.started
        created: tuple[bytes, bytes] | None = None  # as this replica says it, as the first one said it
        rest = b""
        while data := await read():
            if rest:
                data = rest + data
            cut = data.rfind(GROUP_END)
            rest = data[cut + 1 :]
            if cut < 0:
                continue
            parts = [group.partition(RECORD) for group in data[:cut].split(GROUP_END)]
            events = b"".join([part[0] for part in parts])
            self.records += [part[2] for part in parts if part[2]]
            if not self.started:
                self.generation = generation
                self._first = events
                await self._start(head)
            elif continued:
                created = created or _created(events, self._first)
                if created:
                    events = events.replace(*created)
            self._last = events
            await self._send({"type": "http.response.body", "body": events, "more_body": True})
        self.trailer = rest
        await self.end()

    async def _start(self, head: Head) -> None:
        self.started = True
        self.record.begins(stream=True)
        if not self._events:
            await self._begin(head.status, head.headers)

    async def _begin(self, status: int, headers: Headers) -> None:
        self._events = True
        self.record.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": self._headers(headers)})

    def _headers(self, given: Headers) -> list[tuple[bytes, bytes]]:
        headers = [(k, v) for k, v in given if k in _RETURNED]
        headers.append((REQUEST_ID_HEADER, self.record.id))
        if timing := self.record.timing():
            headers.append((TIMING_HEADER, timing.encode()))
        headers += self.extra
        if self.record.moves:
            headers.append((MOVES_HEADER, str(self.record.moves).encode()))
        return headers + self._in_whose_place()

    def _in_whose_place(self) -> list[tuple[bytes, bytes]]:
        return [(FALLBACK_HEADER, self.fallback.encode())] if self.fallback else []

    async def fail(self, error: ModelyardError) -> None:
        if self._events:
            await self._send({"type": "http.response.body", "body": errors.sse_event(error, self._protocol)})
        elif not self.started:
            self.started = True
            status, headers, body = errors.render(error, self._protocol)
            if self.record.id:
                headers.append((REQUEST_ID_HEADER, self.record.id))
            await respond(self._send, status, headers + self._in_whose_place() + self.extra, body)


def _created(events: bytes, first: bytes) -> tuple[bytes, bytes] | None:
    """The field ``created`` of a continued stream's ``events``, and of the stream's ``first`` ones.

    A quotation mark inside a JSON string is escaped, so these bytes are always the field.
    """
    here, there = _CREATED.search(events), _CREATED.search(first)
    return (here[0], there[0]) if here and there else None
