"""The judge sees what a client must never get."""

import pytest

from serve_app import errors
from tests.fuzz import judge
from tests.fuzz.case import Case, Reply

JSON = {b"content-type": b"application/json"}
EVENTS = {b"content-type": b"text/event-stream", b"x-request-id": b"1"}
CHAT, MESSAGES = Case("", b"POST", b"/v1/chat/completions?a=b"), Case("", b"POST", b"/v1/messages")
OPENAI, ANTHROPIC = (errors.body(errors.NotFound("none"), protocol) for protocol in ("openai", "anthropic"))


@pytest.mark.parametrize(
    ("case", "reply", "word"),
    [
        (CHAT, Reply(404, JSON, OPENAI), None),
        (CHAT, Reply(404, JSON, ANTHROPIC), "envelope"),
        (MESSAGES, Reply(404, JSON, ANTHROPIC), None),
        (MESSAGES, Reply(404, JSON, OPENAI), "envelope"),
        (CHAT, Reply(404, JSON, b'{"detail": "none"}'), "envelope"),
        (CHAT, Reply(404, {}, OPENAI), "an error as"),
        (CHAT, Reply(500, JSON, OPENAI), "status 500"),
        (CHAT, Reply(307, JSON), "status 307"),
        (CHAT, Reply(503, JSON, OPENAI), "Retry-After"),
        (CHAT, Reply(503, JSON | {b"retry-after": b"3"}, OPENAI), None),
        (CHAT, Reply(200, JSON | {b"x-request-id": b"1"}, b"{}"), None),
        (CHAT, Reply(200, JSON | {b"x-request-id": b"1"}, b"{"), "no JSON"),
        (CHAT, Reply(200, JSON | {b"x-request-id": b"\r"}, b"{}"), "request id"),
        (CHAT, Reply(200, EVENTS, b': waits\n\ndata: {"a": 1}\n\ndata: [DONE]\n\n'), None),
        (CHAT, Reply(200, EVENTS, b'data: {"a": 1}\n\n'), "ends with"),
        (CHAT, Reply(200, EVENTS, b"data: [DONE]\n\ndata:"), "within an event"),
        (CHAT, Reply(200, EVENTS, b""), "within an event"),
        (CHAT, Reply(200, EVENTS, b"data: {\n\ndata: [DONE]\n\n"), "the event"),
        (MESSAGES, Reply(200, EVENTS, errors.sse_event(errors.NotFound("none"), "anthropic")), None),
        (Case("", b"POST", b"/tokenize", valid=True), Reply(400, JSON, OPENAI), "valid request"),
        (CHAT, Reply(broken="no whole answer"), "no whole answer"),
        (CHAT, Reply(broken="reset", reset=True), "reset"),
        (Case("", b"POST", b"/tokenize", ((b"x", b"1\r\n 2"),)), Reply(broken="reset", reset=True), None),
        (Case("", b"POST", b"/tokenize", ((b"x", b"1\r\n 2"),)), Reply(broken="no whole answer"), "no whole answer"),
        (CHAT, Reply(left=True), None),
    ],
)
def test_faults(case: Case, reply: Reply, word: str | None) -> None:
    """Each by itself, and nothing where there is none."""
    fault = judge.fault(case, reply)
    assert fault is None if word is None else word in (fault or "")
