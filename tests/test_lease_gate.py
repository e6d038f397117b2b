"""The door of a replica's port, without sockets."""

import asyncio
import re
from typing import Any

import pytest

from serve_app.asgi import Message, Receive, Scope, Send
from serve_app.lease import (
    ADAPTER_HEADER,
    ADAPTER_PATH_HEADER,
    COUNT_HEADER,
    COUNTED_HEADER,
    KEPT_HEADER,
    LEASE_HEADER,
    REFUSED_HEADER,
)
from serve_app.model.counting import COUNTING
from serve_app.model.engine_protocol import ADAPTER, Adapter
from serve_app.model.lease_gate import Lease, LeaseGate


def request(lease: Lease | None) -> Scope:
    headers = [(LEASE_HEADER, lease.token.encode())] if lease else []
    return {"type": "http", "path": "/v1/completions", "headers": headers}


async def receive() -> Message:
    return {"type": "http.request", "body": b""}


class Sent(list[Any]):
    async def __call__(self, message: Message) -> None:
        self.append(message)

    @property
    def refused(self) -> bytes | None:
        return dict(self[0]["headers"]).get(REFUSED_HEADER)


async def answers(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"x", "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def test_only_a_live_lease_opens_the_door() -> None:
    """No token, a wrong one, one whose lease ended: refused, and marked so that a gateway knows whose 403 it is."""
    gate = LeaseGate(answers)
    lease = gate.grant()
    for scope in (request(None), request(Lease("0" * 32))):
        sent = Sent()
        await gate(scope, receive, sent)
        assert (sent[0]["status"], sent.refused) == (403, b"unknown")
    sent = Sent()
    await gate(request(lease), receive, sent)
    assert (sent[0]["status"], gate.busy, gate.held) == (200, 0, 1)
    gate.end(lease)
    sent = Sent()
    await gate(request(lease), receive, sent)
    assert sent.refused == b"unknown"


async def test_a_lease_is_free_before_its_answers_end_goes_out() -> None:
    """The next request may arrive the moment the end was read, before the app has returned: it is let in, and the late
    return of the first request does not free the second one's lease."""
    seen: list[bool] = []

    async def slow_to_return(scope: Scope, receive: Receive, send: Send) -> None:
        await answers(scope, receive, send)
        # What a server does between the last byte and its return, with the next request already here.
        if not seen:
            seen.append(lease.busy)
            lease.busy = True

    gate = LeaseGate(slow_to_return)
    lease = gate.grant()
    await gate(request(lease), receive, Sent())
    assert seen == [False]
    assert lease.busy, "the first request's return freed a lease that the second one holds"


async def test_one_request_at_a_time() -> None:
    """A second request on a busy lease is refused as such, and the first one goes on."""

    async def nested(scope: Scope, receive: Receive, send: Send) -> None:
        second = Sent()
        await gate(scope, receive, second)
        assert second.refused == b"busy"
        await answers(scope, receive, send)

    gate = LeaseGate(nested)
    sent = Sent()
    await gate(request(gate.grant()), receive, sent)
    assert sent[0]["status"] == 200


async def test_an_app_that_fails_frees_its_lease() -> None:
    """Whatever happens inside, the lease serves again."""

    async def fails(_scope: Scope, _receive: Receive, _send: Send) -> None:
        raise RuntimeError("engine trouble")

    gate = LeaseGate(fails)
    lease = gate.grant()
    try:
        await gate(request(lease), receive, Sent())
    except RuntimeError:
        assert not lease.busy


async def test_a_request_has_the_adapter_that_its_headers_name() -> None:
    """Name and path, in any script; the next request on the lease names none and has none."""
    seen: list[Adapter | None] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(ADAPTER.get())
        await answers(scope, receive, send)

    gate = LeaseGate(app)
    lease = gate.grant()
    scope = request(lease)
    scope["headers"] += [(ADAPTER_HEADER, "héros".encode()), (ADAPTER_PATH_HEADER, "/模型/héros".encode())]
    await gate(scope, receive, Sent())
    await gate(request(lease), receive, Sent())
    assert seen == [Adapter("héros", "/模型/héros"), None]


SSE = (b"content-type", b"text/event-stream")
COUNT = re.compile(rb"4 5 \d+\.\d{4}$")


@pytest.mark.parametrize(
    ("headers", "parts", "where"),
    [
        ((), 1, "head"),
        ((), 2, "lease"),
        ((SSE,), 1, "lease"),
        ((SSE,), 2, "lease"),
        ((SSE, (KEPT_HEADER, b"1")), 1, "end"),
        ((SSE, (KEPT_HEADER, b"1")), 2, "end"),
        ((), 0, "lease"),
        ((SSE, (KEPT_HEADER, b"1")), 0, "lease"),
    ],
)
async def test_a_count_is_told_once(headers: tuple[tuple[bytes, bytes], ...], parts: int, where: str) -> None:
    """In a whole answer's head, at the end of a stream that the gateway takes apart, else on the lease: for every other
    stream, for what comes in parts, and for an answer without an end (``parts`` 0); with how long it took."""

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        counting = COUNTING.get()
        assert counting is not None
        counting.requests += [lambda: (4, 2), lambda: (0, 3)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if parts != 1:
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        if not parts:
            raise asyncio.CancelledError
        await send({"type": "http.response.body", "body": b"y"})

    gate = LeaseGate(app)
    lease = gate.grant()
    scope = request(lease)
    scope["headers"].append((COUNT_HEADER, b"7"))
    sent = Sent()
    try:
        await gate(scope, receive, sent)
    except asyncio.CancelledError:
        assert not parts
    body = b"".join(message.get("body", b"") for message in sent)
    told = {
        "head": dict(sent[0]["headers"]).get(COUNTED_HEADER, b""),
        "end": body,
        "lease": lease.counted.get_nowait().in_words if lease.counted.qsize() == 1 else b"",
    }
    assert [place for place, words in told.items() if COUNT.search(words)] == [where]
    assert COUNT.sub(b"", body) == {0: b"x", 1: b"y", 2: b"xy"}[parts]
    assert not lease.busy


@pytest.mark.parametrize("headers", [(), (SSE, (KEPT_HEADER, b"1"))])
async def test_what_nobody_hears_is_told_on_the_lease(headers: tuple[tuple[bytes, bytes], ...]) -> None:
    """vLLM answers a client that has left with an empty answer: the count is not in that one."""

    async def app(_scope: Scope, receive: Receive, send: Send) -> None:
        counting = COUNTING.get()
        assert counting is not None
        counting.requests.append(lambda: (4, 5))
        assert (await receive())["type"] == "http.disconnect"
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"null"})

    async def left() -> Message:
        return {"type": "http.disconnect"}

    gate = LeaseGate(app)
    lease = gate.grant()
    scope = request(lease)
    scope["headers"].append((COUNT_HEADER, b"7"))
    await gate(scope, left, Sent())
    assert COUNT.fullmatch(lease.counted.get_nowait().in_words)
    assert not lease.busy


async def test_an_answer_goes_out_as_it_is_where_nobody_counts() -> None:
    """Message by message."""
    gate = LeaseGate(answers)
    sent = Sent()
    await gate(request(gate.grant()), receive, sent)
    expected = Sent()
    await answers({}, receive, expected)
    assert sent == expected
