"""The clients: many at once over plain HTTP/1.1, one connection per request, every byte kept for the judge."""

import asyncio
import json
import time
from collections.abc import Callable
from random import Random
from typing import Any, Literal

import httptools

from tests.chaos.judge import CHAT, COMPLETIONS, Asked, Record

HOST = "127.0.0.1"
INTERVAL_S = 0.02
LEAVE = 0.03
NOT_RESUMABLE = 0.10


def draw(seed: int, number: int, model: str) -> Asked:
    """Request ``number`` of the run with ``seed``: the same one every time."""
    random = Random(f"{seed}/{number}")
    path = random.choice((CHAT, COMPLETIONS))
    words = int(10 ** random.uniform(0, 3))
    tokens = random.randint(20, 200)
    prompt = " ".join(f"w{i}" for i in range(words))
    body: dict[str, Any] = {"model": model, "max_tokens": tokens}
    body["fake"] = {"interval_s": INTERVAL_S, "first_token_s": random.uniform(0, 0.5)}
    body |= {"messages": [{"role": "user", "content": prompt}]} if path == CHAT else {"prompt": prompt}
    if number % 2:
        body["stream"] = True
        if number % 4 == 1:
            body["stream_options"] = {"include_usage": True}
    resumable = random.random() >= NOT_RESUMABLE
    if not resumable:
        body["logprobs"] = True if path == CHAT else 1
    leaves = random.random() < LEAVE
    return Asked(
        number=number,
        path=path,
        body=body,
        tokens=tokens,
        prompt_words=words,
        # An answer that is not a stream is committed whole, so any other replica can give it instead.
        resumable=resumable or not body.get("stream"),
        leaves_after_s=random.uniform(0.05, 1.5) if leaves else None,
        pause_s=random.uniform(0, 1),
    )


class Load:
    """``clients`` at once, until ``at_least`` requests were sent. ``limit_s``: each client's patience."""

    def __init__(self, port: int, model: str, seed: int, *, clients: int, at_least: int, limit_s: float) -> None:
        self._port = port
        self._model = model
        self._seed = seed
        self._clients = clients
        self._at_least = at_least
        self._limit_s = limit_s
        self.sent = 0
        self.records: list[Record] = []

    @property
    def enough(self) -> bool:
        return self.sent >= self._at_least

    async def run(self, over: Callable[[], bool]) -> None:
        """Goes on beyond the wanted number until ``over``, and returns when the last request has ended."""
        await asyncio.gather(*(self._client(over) for _ in range(self._clients)))

    async def _client(self, over: Callable[[], bool]) -> None:
        while not (self.enough and over()):
            asked = draw(self._seed, self.sent, self._model)
            self.sent += 1
            self.records.append(await ask(self._port, asked, self._limit_s))
            await asyncio.sleep(asked.pause_s)


async def ask(port: int, asked: Asked, limit_s: float) -> Record:
    """Send one request; never raises for what a server does."""
    answer = _Answer()
    sent_at = time.monotonic()
    end: Literal["complete", "broken", "left", "hung"]
    try:
        async with asyncio.timeout(asked.leaves_after_s if asked.leaves_after_s is not None else limit_s):
            end = "complete" if await _exchange(port, asked, answer) else "broken"
    except TimeoutError:
        end = "hung" if asked.leaves_after_s is None else "left"
    except (OSError, httptools.HttpParserError):
        end = "broken"
    return Record(asked, sent_at, time.monotonic(), end, answer.status, answer.headers, bytes(answer.body))


async def _exchange(port: int, asked: Asked, answer: "_Answer") -> bool:
    """Whether the answer was complete when the connection ended."""
    body = json.dumps(asked.body).encode()
    head = f"POST {asked.path} HTTP/1.1\r\nhost: {HOST}:{port}\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(head.encode() + body)
        parser = httptools.HttpResponseParser(answer)
        while not answer.complete and (data := await reader.read(65536)):
            parser.feed_data(data)
            if answer.begun:
                answer.status = parser.get_status_code()
        return answer.complete
    finally:
        writer.close()


class _Answer:
    """httptools' callbacks: what has arrived."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.begun = False  # the head is complete
        self.complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.begun = True

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.complete = True
