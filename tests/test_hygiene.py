"""What a request may be made of: heads, bodies, nesting, numbers, ids. On real sockets, without Ray."""

import asyncio
import contextlib
import json
import re
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app import errors, names
from serve_app.admission import Ticket
from serve_app.asgi import MAX_HEAD_BYTES, MAX_HEADERS, Message, check_head
from serve_app.config import GatewaySettings, Name
from serve_app.gateway.answer import Answer
from serve_app.gateway.fields import Fields, parse, prefix_of, read, ticket_of
from serve_app.gateway.record import Record
from serve_app.gateway.relay import relayed_error
from serve_app.gateway.request import Request, clean_request_id
from serve_app.gateway.routes import BY_PATH, RELAYED
from serve_app.model.http_server import MAX_UNPARSED_BYTES
from tests.fuzz.case import Case, Headers
from tests.fuzz.client import ask
from tests.fuzz.mutations import BODIES
from tests.inprocess import HOST, Yard, model, yard

CHAT = "/v1/chat/completions"
ROUTE = BY_PATH[CHAT]
JSON: Headers = ((b"content-type", b"application/json"),)
BODY = json.dumps({"model": "chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}).encode()
# However busy the machine is.
BOUND_S = 60.0


def post(body: bytes = BODY, path: str = CHAT, headers: Headers = (), query: bytes = b"") -> Case:
    return Case("", b"POST", path.encode() + query, JSON + headers, body)


async def works(y: Yard) -> None:
    """The gateway answers the next client."""
    assert (await ask(y.port, post(), BOUND_S)).status == 200
    await y.quiet()


# Heads


@pytest.mark.parametrize("part", ["path", "query_string", "name", "value"])
def test_a_head_is_bounded(part: str) -> None:
    """To the byte, whichever part of it is large."""

    def scope(size: int) -> dict[str, Any]:
        name, value = (b"n" * size if part == "name" else b""), (b"v" * size if part == "value" else b"")
        path, query = ("p" * size if part == "path" else ""), (b"q" * size if part == "query_string" else b"")
        return {"path": path, "query_string": query, "headers": [(name, value)]}

    check_head(scope(MAX_HEAD_BYTES))
    with pytest.raises(errors.HeadTooLarge):
        check_head(scope(MAX_HEAD_BYTES + 1))


def test_the_number_of_headers_is_bounded() -> None:
    """However small they are."""
    check_head({"path": "/", "headers": [(b"a", b"")] * MAX_HEADERS})
    with pytest.raises(errors.HeadTooLarge):
        check_head({"path": "/", "headers": [(b"a", b"")] * (MAX_HEADERS + 1)})


@pytest.mark.parametrize("path", [*(route.path for route in RELAYED), "/generate", "/health", "/nothing"])
async def test_a_large_head_is_431(path: str) -> None:
    """On every path, known or not, in its protocol's envelope, and no replica is asked."""
    async with yard(model("chat")) as y:
        for headers in ({"x-large": "a" * MAX_HEAD_BYTES}, {f"x-{i}": "1" for i in range(MAX_HEADERS)}):
            answer = await y.client.post(path, json={"model": "chat"}, headers=headers, timeout=BOUND_S)
            assert answer.status_code == 431
            assert ("type" in answer.json()) == path.startswith("/v1/messages")
        assert y.models["chat"].streams == 0


MB = 2**20
HUGE = {
    "a megabyte of value": post(headers=((b"x-a", b"a" * MB),)),
    "a megabyte of a value that is passed on": post(headers=((b"traceparent", b"a" * MB),)),
    "a megabyte of request id": post(headers=((b"x-request-id", b"a" * MB),)),
    "a megabyte of name": post(headers=((b"a" * MB, b"a"),)),
    "10,000 headers": post(headers=tuple((b"x-%d" % i, b"1") for i in range(10_000))),
    "one header 10,000 times": post(headers=((b"accept", b"a/b"),) * 10_000),
    "a megabyte of path": Case("", b"GET", b"/v1/models/" + b"a" * MB),
    "a megabyte of query": post(query=b"?" + b"a" * MB),
    "a path that overflows 16 bits": Case("", b"GET", b"/" + b"a" * (2**16 - 1) + b"/health"),
    "a megabyte of method": Case("", b"G" * MB, b"/health"),
}


@pytest.mark.parametrize("huge", HUGE)
async def test_a_huge_head_is_refused(huge: str) -> None:
    """With a 4xx or a closed connection, at once however long it is; others do not notice: a stream under way ends
    whole, the next request is answered."""
    async with yard(model("chat")) as y:
        long = json.dumps(json.loads(BODY) | {"stream": True, "max_tokens": 20, "fake": {"interval_s": 0.01}}).encode()
        other = asyncio.create_task(ask(y.port, post(long), BOUND_S))
        for pieces in (1, 50):
            case = HUGE[huge]
            refused = await ask(y.port, Case("", case.method, case.target, case.headers, case.body, pieces=pieces), 60)
            assert refused.status in (400, 431) or refused.broken.startswith("the connection"), refused
        streamed = await other
        assert (streamed.status, streamed.body[-14:]) == (200, b"data: [DONE]\n\n")
        await works(y)


@pytest.mark.parametrize("whose", ["gateway", "replica"])
@pytest.mark.parametrize("begin", [b"GET /health HTTP/1.1\r\nx: ", b"GET /", b""])
async def test_a_head_without_an_end_is_cut_off(whose: str, begin: bytes) -> None:
    """Who sends one for ever is not read for ever, at the replicas' own ports neither."""
    async with yard(model("chat")) as y:
        port = y.port if whose == "gateway" else y.models["chat"].replicas[0].server.port
        _, writer = await asyncio.open_connection(HOST, port)
        async with asyncio.timeout(BOUND_S):
            with contextlib.suppress(ConnectionError):
                writer.write(begin)
                for _ in range(100 * MAX_UNPARSED_BYTES // 4096):
                    writer.write(b"a" * 4096)
                    await writer.drain()
                pytest.fail("it is still read")
        writer.transport.abort()
        await works(y)


async def test_what_is_passed_on_is_bounded() -> None:
    """As much as a head may hold reaches the replica and is answered: its port takes what a gateway takes."""
    async with yard(model("chat")) as y:
        for name in ("accept", "traceparent", "tracestate", "anthropic-version"):
            answer = await y.client.post(CHAT, content=BODY, headers=[*dict(JSON).items(), (name, "a" * 31_000)])
            assert answer.status_code == 200


@pytest.mark.parametrize("end", [b"\r\n x-modelyard-lease: 1", b"\n", b"\r", b"\0", b"\r\n\tb"])
async def test_no_header_smuggles_another(end: bytes) -> None:
    """Line ends, folds and NULs in what is passed on, or in an id, are no HTTP."""
    async with yard(model("chat")) as y:
        for name in (b"traceparent", b"x-request-id", b"accept"):
            refused = await ask(y.port, post(headers=((name, b"a" + end + b"b: c"),)), BOUND_S)
            assert refused.status == 400
        assert y.models["chat"].streams == 0


# Request ids


@given(st.binary(max_size=300))
def test_any_request_id_is_clean(given_id: bytes) -> None:
    """Nothing but letters, digits and ``._:-``, 128 at most: it breaks no header and forges no line of a log."""
    assert re.fullmatch(rb"[A-Za-z0-9._:-]{0,128}", clean_request_id(given_id))


async def test_request_ids_are_bounded_and_echoed() -> None:
    """Two overlapping requests with the same id, a very long one, one with rubbish: all succeed, and the client gets
    the id under which the engine knows its request."""
    async with yard(model("chat")) as y:
        slow = json.dumps(json.loads(BODY) | {"fake": {"first_token_s": 0.2}}).encode()
        ids = ["same", "same", "x" * 30_000, 'a\t\u00e9"b\\n', ""]
        requests = [
            y.client.post(
                CHAT, content=slow, headers={b"content-type": b"application/json", b"x-request-id": i.encode()}
            )
            for i in ids
        ]
        answers = await asyncio.gather(*requests)
        assert [a.status_code for a in answers] == [200] * len(ids)
        echoed = [a.headers["x-request-id"] for a in answers]
        assert echoed[:4] == ["same", "same", "x" * 128, "a----b-n"]
        assert re.fullmatch(r"[0-9a-f]{32}", echoed[4])
        assert y.models["chat"].replicas[0].engine.report()["finished"] == len(ids)
        refused = await y.client.post(CHAT, json={"model": "nobody"}, headers={"x-request-id": "mine alone"})
        assert (refused.status_code, refused.headers["x-request-id"]) == (404, "mine-alone")


# Names of models


async def test_unknown_names_are_one_series_and_are_not_kept() -> None:
    """5,000 different ones: 5,000 times 404, one series for all, no pool, nothing asked of a replica."""
    async with yard(model("chat")) as y:
        for i in range(5000):
            body = b'{"model": "unknown-%d"}' % i
            status, _ = await direct(y, CHAT, body)
            assert status == 404
        assert y.noted.counters == {("modelyard_requests_total", "other", CHAT, "4xx", "model_not_found"): 5000}
        assert not y.noted.gauges
        assert not y.noted.observed
        assert y.models["chat"].pool is None
        assert list(y.relay._known().catalog.ids) == ["chat"]


async def direct(y: Yard, path: str, body: bytes) -> tuple[int, bytes]:
    """One request without a socket."""
    sent: list[Message] = []

    async def receive() -> Message:
        await asyncio.sleep(0)
        if asked:
            await asyncio.Event().wait()
        asked.append(1)
        return {"type": "http.request", "body": body}

    async def send(message: Message) -> None:
        sent.append(message)

    asked: list[int] = []
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": list(JSON)}
    await y.app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


# Bodies


def nested(depth: int, opening: bytes = b"[", closing: bytes = b"]") -> bytes:
    return opening * depth + b"1" + closing * depth


DEEP = {
    "arrays": nested(100_000),
    "objects": nested(100_000, b'{"a":', b"}"),
    "without an end": b"[" * 100_000,
    "as deep as Python goes": nested(sys.getrecursionlimit() - 100),
    "almost as deep": nested(sys.getrecursionlimit() - 200, b'{"a":', b"}"),
}
ODD = {
    "a number beyond floats": b"1e999",
    "one with 5,000 digits": b"1" + b"0" * 5000,
    "one with 400 digits": b"1" + b"0" * 400,
    "no number": b"NaN",
    "infinity": b"-Infinity",
    "no UTF-8": b'"\xff\xfe"',
    "a lone surrogate": b'"\\ud800"',
    "a surrogate in UTF-8": b'"\xed\xa0\x80"',
    "an escaped NUL": b'"\\u0000"',
    "a NUL": b'"\0"',
}
FIELDS = ("model", "messages", "prompt", "user", "metadata", "max_tokens", "n", "stream", "store", "nobody_knows_it")
WHOLE = {
    **DEEP,
    "nothing but a number": b"1e999",
    "UTF-16": BODY.decode().encode("utf-16"),
    "no UTF-8": b'{"\xff": 1}',
    "a NUL": BODY + b"\0",
    "two": BODY + BODY,
}


def with_field(path: str, field: str, value: bytes, asked: str = "chat") -> bytes:
    """The route's working body, with ``field`` in place of its own or twice: the last one counts, for any parser."""
    body = json.dumps(BODIES[path][0] | {"model_name" if path == "/generate" else "model": asked}).encode()
    return body[:-1] + b', "' + field.encode() + b'": ' + value + b"}"


SETTINGS = GatewaySettings(
    max_body_mb=2.0,
    names={
        "capped": Name(to="chat", defaults={"temperature": 0.1}, max_tokens=5),
        "either": Name(to={"chat": 1, "other": 1}, defaults={"seed": 1}),
    },
)


@pytest.mark.parametrize("path", BODIES)
async def test_no_body_breaks_a_route(path: str) -> None:
    """Deep, huge or odd values in any field, as names of fields and as the whole body: 4xx or the engine's own answer,
    on every JSON route, also where the gateway changes the body; never a 5xx or a word of the parser's."""
    async with yard(model("chat"), model("other")) as y:
        y.relay.settings = SETTINGS
        bodies = list(WHOLE.values())
        for asked in ("chat", "capped"):
            bodies += [with_field(path, field, value, asked) for field in FIELDS for value in (DEEP | ODD).values()]
            bodies.append(with_field(path, "\\ud800", b"1", asked))
        bodies += [with_field(path, "user", value, "either") for value in (DEEP | ODD).values()]
        for body in bodies:
            answer = await y.client.post(path, content=body, headers=dict(JSON), timeout=BOUND_S)
            assert answer.status_code == 200 or 400 <= answer.status_code < 500, (body[:200], answer.text)
            assert "ecursion" not in answer.text
            assert "codec" not in answer.text
        await y.quiet()


def from_below(frames: int, call: Callable[[], object]) -> object:
    """``call``, with so much less of the stack left."""
    return call() if not frames else from_below(frames - 1, call)


def why_not(body: bytes) -> object:
    record = Record(lambda *_labels, **_value: None, CHAT)
    request = Request(ROUTE, {}, Fields(model="chat"), body, Ticket(1), record)
    answer = Answer(_nowhere, "openai", record)
    answer.started, answer.generation = True, b"1"
    return request.why_not(answer)


async def _nowhere(_message: Message) -> None: ...


def without_a_loop(awaitable: Awaitable[object]) -> object:
    try:
        awaitable.__await__().send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits for something")


READERS: dict[str, Callable[[bytes], object]] = {
    "read": lambda body: without_a_loop(read(ROUTE, dict(JSON), body)),
    "parse": lambda body: parse(body).whose,
    "ticket_of": lambda body: ticket_of(ROUTE, parse(body), len(body), None),
    "prefix_of": lambda body: prefix_of(ROUTE, {}, parse(body)),
    "apply": lambda body: names.apply(body, CHAT, SETTINGS.names["capped"]),
    "why_not": why_not,
    "relayed_error": lambda body: relayed_error(400, body),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("frames", [0, 200, 400])
def test_what_reads_a_body_survives_any(reader: str, frames: int) -> None:
    """Each part of the gateway that reads one, however little of the stack is left: a value or an error of ours."""
    values = [*DEEP.values(), *ODD.values(), *(nested(sys.getrecursionlimit() - frames - d) for d in range(0, 300, 5))]
    bodies = [*WHOLE.values(), *(with_field(CHAT, field, value) for field in FIELDS for value in values)]
    for body in bodies:
        with contextlib.suppress(errors.ModelyardError):
            from_below(frames, lambda body=body: READERS[reader](body))  # type: ignore[misc]


async def test_a_duplicate_field_is_one_field() -> None:
    """The gateway and the engine take the same one, the last: a body cannot name one model to each."""
    async with yard(model("chat"), model("other")) as y:
        body = b'{"model": "nothing", "messages": [{"role": "user", "content": "hi"}], "model": "chat"}'
        answer = await y.client.post(CHAT, content=body, headers=dict(JSON), timeout=BOUND_S)
        assert (answer.status_code, answer.json()["model"]) == (200, "chat")
        assert y.models["other"].streams == 0


async def test_the_plain_endpoint_bounds_its_body() -> None:
    """/generate, which FastAPI reads, too: 413 as elsewhere, also without a length in the head; and a body that no
    parser takes is 400, not a path that does not exist."""
    async with yard(model("chat")) as y:
        y.relay.settings = GatewaySettings(max_body_mb=0.0625)

        async def parts() -> Any:
            for _ in range(20):
                yield b"x" * 10_000

        for content in (b"x" * 100_000, parts()):
            answer = await y.client.post("/generate", content=content, headers=dict(JSON), timeout=BOUND_S)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
        for content in (b"[" * 60_000, b'{"prompt": "\xff"}', b'{"max_tokens": 1' + b"0" * 5000 + b"}"):
            answer = await y.client.post("/generate", content=content, headers=dict(JSON), timeout=BOUND_S)
            assert (answer.status_code, answer.json()["error"]["message"]) == (400, "The body is not valid JSON.")
        assert y.models["chat"].streams == 0
