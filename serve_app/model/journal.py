"""What a stream has generated, handed to the gateway beside its bytes, so that another replica can go on from there.

A gateway that asks for it (``KEEP_HEADER``) gets a stream in *groups*: the SSE events of one engine output, then
``RECORD``, the journal's record of that output, then ``GROUP_END``. Both marks are control characters, which JSON
never holds as such, so the gateway cuts the records off without parsing anything and keeps them unread. To continue
the stream elsewhere it puts them, joined, in front of the original body (``RESUME_HEADER``).

The new replica runs the engine's own app on the original request. Its engine adapter replays the recorded outputs
first, and what the app renders from them is dropped here: roles, parsers, usage and text positions are then exactly
where they were.
"""

import asyncio
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from serve_app import errors
from serve_app.asgi import ASGIApp, Message, Receive, Scope, Send, respond
from serve_app.lease import (
    GENERATION_HEADER,
    GROUP_END,
    KEEP_HEADER,
    KEPT_HEADER,
    RECORD,
    REFUSED_HEADER,
    RESUME_HEADER,
)


@dataclass(frozen=True, slots=True)
class Step:
    """One output of the engine. ``ids``: its token ids. ``chars``: length of the answer's text after it.
    ``finished``: it was the last."""

    ids: tuple[int, ...]
    chars: int
    finished: bool = False


def encode(steps: Iterable[Step]) -> bytes:
    return ";".join(f"{s.chars}{'!' if s.finished else ''} {' '.join(map(str, s.ids))}" for s in steps).encode()


def decode(records: bytes) -> tuple[Step, ...]:
    """Raises ValueError where it is not what ``encode`` wrote."""
    steps = []
    for record in records.decode().split(";") if records else ():
        chars, _, ids = record.partition(" ")
        steps.append(Step(tuple(map(int, ids.split())), int(chars.rstrip("!")), chars.endswith("!")))
    return tuple(steps)


class Journal:
    """Of one stream. ``earlier``: what other replicas generated before. ``lost``: the engine died under it.

    The engine adapter calls ``note`` before it hands an output on and ``flush`` when all of it was rendered;
    ``replaying`` is true while it hands on what is in ``earlier``. ``replay`` is the adapter's own: those outputs.
    """

    def __init__(self, earlier: tuple[Step, ...], send: Send) -> None:
        self.earlier = earlier
        self.replaying = bool(earlier)
        self.lost = False
        self.replay: list[Any] = []
        self._chars = earlier[-1].chars if earlier else 0
        self._send = send
        self._steps: list[Step] = []
        self._rendered: list[bytes] = []

    @property
    def ids(self) -> list[int]:
        return [token for step in self.earlier for token in step.ids]

    @property
    def finished(self) -> bool:
        return bool(self.earlier) and self.earlier[-1].finished

    def note(self, ids: Iterable[int], text: str, finished: bool) -> None:
        self._chars += len(text)
        self._steps.append(Step(tuple(ids), self._chars, finished))

    def rendered(self, data: bytes) -> None:
        if not self.replaying:
            self._rendered.append(data)

    def take(self) -> bytes:
        """What is rendered and noted since the last time, as one group; b"" where nothing was rendered."""
        if not self._rendered:
            return b""
        group = b"".join((*self._rendered, RECORD, encode(self._steps), GROUP_END))
        self._rendered.clear()
        self._steps.clear()
        return group

    async def flush(self) -> None:
        if group := self.take():
            await self._send({"type": "http.response.body", "body": group, "more_body": True})


JOURNAL: ContextVar[Journal | None] = ContextVar("journal", default=None)


class Journaled:
    """ASGI wrapper around an engine's app. ``generation``: see ``resume.generation``."""

    def __init__(self, app: ASGIApp, generation: str) -> None:
        self._app = app
        self._generation = generation.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers", ()))
        if scope["type"] != "http" or KEEP_HEADER not in headers:
            await self._app(scope, receive, send)
            return
        earlier: tuple[Step, ...] = ()
        if RESUME_HEADER in headers:
            if headers.get(GENERATION_HEADER) != self._generation:
                refused = errors.Unavailable("This replica runs another version of the model.")
                status, lines, body = errors.render(refused)
                await respond(send, status, [*lines, (REFUSED_HEADER, b"version")], body)
                return
            records, receive = await _split_body(receive, int(headers[RESUME_HEADER]))
            earlier = decode(records)
        journal = Journal(earlier, send)
        JOURNAL.set(journal)
        started = streams = False

        async def grouped(message: Message) -> None:
            nonlocal started, streams
            if journal.lost:
                return
            if message["type"] == "http.response.start":
                started = True
                streams = any(
                    k == b"content-type" and v.startswith(b"text/event-stream") for k, v in message["headers"]
                )
                if streams:
                    message = {**message, "headers": [*message["headers"], (KEPT_HEADER, self._generation)]}
            if message["type"] != "http.response.body" or not streams:
                await send(message)
                return
            journal.rendered(message.get("body", b""))
            if not message.get("more_body"):
                journal.replaying = False
                await send({"type": "http.response.body", "body": journal.take()})

        await self._app(scope, receive, grouped)
        # Where the engine is lost the answer has no end: the server closes the connection, and the gateway goes on
        # elsewhere. For an answer that has not begun it would make up a 500, so that one ends with the replica.
        if journal.lost and not started:
            await asyncio.Event().wait()


async def _split_body(receive: Receive, length: int) -> tuple[bytes, Receive]:
    """The first ``length`` bytes of the body, and a ``receive`` for the rest of it."""
    head = b""
    more = True
    while len(head) < length and more:
        message = await receive()
        head += message.get("body", b"")
        more = bool(message.get("more_body"))
    rest: Message | None = {"type": "http.request", "body": head[length:], "more_body": more}

    async def after() -> Message:
        nonlocal rest
        if rest is None:
            return await receive()
        first, rest = rest, None
        return first

    return head[:length], after
