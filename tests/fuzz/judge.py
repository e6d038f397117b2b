"""Whether an answer is one that a client may get. Pure."""

import json
import re

from serve_app.errors import Protocol
from serve_app.gateway.routes import BY_PATH, protocol_of
from tests.fuzz.case import Case, Reply

# What the server itself says of bytes that are no HTTP: such requests never reach the gateway.
NO_HTTP = b"Invalid HTTP request received."
_OPENAI = {"message", "type", "param", "code"}
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


def fault(case: Case, reply: Reply) -> str | None:
    """What is wrong with ``reply``; None: nothing."""
    if reply.left:
        return None
    if reply.broken:
        return None if reply.reset and not case.is_http else reply.broken
    if case.valid and reply.status != 200:
        return f"a valid request got {reply.status}"
    if not 200 <= reply.status < 300 and not 400 <= reply.status < 500 and reply.status != 503:
        return f"status {reply.status}"
    if reply.status == 503 and not reply.headers.get(b"retry-after", b"").isdigit():
        return "503 without Retry-After"
    if case.method == b"HEAD":
        return None
    if reply.status >= 400:
        return None if reply.status == 400 and reply.body == NO_HTTP else _error(case, reply)
    return _answer(case, reply)


def _error(case: Case, reply: Reply) -> str | None:
    if reply.headers.get(b"content-type") != b"application/json":
        return f"an error as {reply.headers.get(b'content-type')!r}"
    protocols: tuple[Protocol, ...] = ("openai", "anthropic") if case.path is None else (protocol_of(case.path),)
    if not any(_in_envelope(reply.body, protocol) for protocol in protocols):
        return f"an error that is not in the envelope of {' or '.join(protocols)}"
    return None


def _in_envelope(body: bytes, protocol: Protocol) -> bool:
    try:
        parsed = json.loads(body)
    except ValueError:
        return False
    error = parsed.get("error") if isinstance(parsed, dict) else None
    if not isinstance(error, dict) or not isinstance(error.get("message"), str) or not error["message"]:
        return False
    if protocol == "anthropic":
        return set(parsed) == {"type", "error"} and parsed["type"] == "error" and set(error) == {"type", "message"}
    return set(parsed) == {"error"} and set(error) == _OPENAI


def _answer(case: Case, reply: Reply) -> str | None:
    if case.method == b"POST" and case.path in BY_PATH:
        if not _REQUEST_ID.fullmatch(reply.headers.get(b"x-request-id", b"")):
            return f"the request id {reply.headers.get(b'x-request-id')!r}"
        if reply.headers.get(b"content-type", b"").startswith(b"text/event-stream"):
            return _stream(case.path, reply.body)
    if reply.headers.get(b"content-type") == b"application/json":
        try:
            json.loads(reply.body)
        except ValueError:
            return "an answer that is no JSON"
    return None


def _stream(path: str, body: bytes) -> str | None:
    *parts, rest = body.split(b"\n\n")
    if rest or not parts:
        return "a stream that ends within an event"
    if protocol_of(path) == "anthropic" and parts[-1].startswith(b"event: error\n"):
        return None
    if parts[-1] != b"data: [DONE]":
        return f"a stream that ends with {parts[-1][:100]!r}"
    for part in parts[:-1]:
        if part.startswith(b":"):
            continue
        try:
            json.loads(part.removeprefix(b"data: "))
        except ValueError:
            return f"the event {part[:100]!r}"
    return None
