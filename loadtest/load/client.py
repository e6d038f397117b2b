"""One streamed request over plain HTTP, under gevent, with the time of each event.

On geventhttpclient, which locust's own ``FastHttpUser`` uses too. That one's ``iter_lines`` waits for 1,024 bytes
before it gives out a line, so that first tokens would seem later than they came.
"""

import json
import re
import time
from dataclasses import dataclass, field
from typing import Any

from geventhttpclient import HTTPClient
from geventhttpclient.response import HTTPParseError, HTTPSocketResponse
from geventhttpclient.url import URL

from loadtest.events import Events
from serve_app.endpoint import address_of

CONNECT_S = 10.0
# Open at once, at most: none of them waits for another.
MOST_OPEN = 100_000
EVENT_END = b"\n\n"
JSON = {"content-type": "application/json"}
# Characters of what kind of error it is.
MOST_KIND = 100


@dataclass
class Heard:
    """What came of an answer so far. ``sent``, ``ended``: on the clock of ``time.perf_counter``. ``error``: what kind,
    empty for a whole answer; one of few, so that they can be counted. ``text``: only where it was asked for."""

    sent: float = 0.0
    ended: float = 0.0
    events: Events = field(default_factory=Events)
    error: str = ""
    text: str = ""


class Client:
    """``url``: the endpoint, with or without ``/v1``. ``silence_s``: the longest wait for a byte of an answer."""

    def __init__(self, url: str, silence_s: float) -> None:
        parsed = URL(address_of(url))
        self._prefix = parsed.path.rstrip("/")
        self._http = HTTPClient.from_url(
            parsed, concurrency=MOST_OPEN, connection_timeout=CONNECT_S, network_timeout=silence_s
        )

    def ask(self, path: str, body: dict[str, Any], headers: dict[str, str], heard: Heard, with_text: bool) -> None:
        """The whole answer, or what went wrong with it, into ``heard``."""
        content = json.dumps(body).encode()
        heard.sent = time.perf_counter()
        try:
            answer = self._http.request("POST", self._prefix + path, content, JSON | headers)
            try:
                heard.error = _listen(answer, heard, with_text)
            finally:
                answer.release()  # one that is not whole is closed: the endpoint sees its client leave
        except TimeoutError:
            heard.error = "timeout"
        except (HTTPParseError, OSError) as error:
            heard.error = "cut" if heard.events.times else f"no answer: {_reason(error)}"
        heard.ended = time.perf_counter()

    def close(self) -> None:
        self._http.close()


def _listen(answer: HTTPSocketResponse, heard: Heard, with_text: bool) -> str:
    if answer.status_code != 200:
        return kind(f"HTTP {answer.status_code}", answer.read().decode(errors="replace"))
    events = heard.events
    while event := answer.readline(EVENT_END):
        events.feed(event, time.perf_counter())
        if with_text:
            heard.text += text_of(event)
    if events.fault:
        return kind("error event", events.fault)
    if not events.done:
        return "cut"
    return "" if events.tokens and events.times else "no tokens"


def text_of(event: bytes) -> str:
    """What a chat's event adds to the answer."""
    if not event.startswith(b"data: {"):
        return ""
    choices = json.loads(event.removeprefix(b"data: ")).get("choices") or [{}]
    return choices[0].get("delta", {}).get("content") or ""


def kind(what: str, body: str) -> str:
    """``what`` and the error's own code, or its type; never its message, which may name anything."""
    try:
        error = json.loads(body.removeprefix("data:"))["error"]
        code = error["code"] or error["type"]
    except (ValueError, KeyError, TypeError):
        return what
    return f"{what} {code}"[:MOST_KIND]


def _reason(error: Exception) -> str:
    return re.sub(r"(?<!^)(?=[A-Z][a-z])", " ", type(error).__name__.removesuffix("Error")).lower()
