"""The client, over plain HTTP/1.1: connections that each always have one stream open, or requests that start at their
times whatever becomes of the others. Runs in processes of its own.

Written on the transport, so that an event costs it a few microseconds: when bytes arrive is noted where they arrive.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import NamedTuple, cast

import httptools
import uvloop

from loadtest.events import Events

HOST = "127.0.0.1"
PATH = "/v1/completions"
# Ids of prompts: random, so that no prompt is in a cache. Every vocabulary has these; the lowest are often special.
IDS = range(100, 10_000)
# Each is one token in usual vocabularies.
WORDS = ("the", "of", "and", "to", "in", "is", "was", "for", "on", "as", "with", "by", "at", "from", "that", "it")
# How long after its end a load may take to answer what was asked within it.
PATIENCE_S = 300.0
# After a request that failed.
PAUSE_S = 0.2
# A request that starts so many seconds after its time is late.
LATE_S = 0.01
# Open at once in a client process; whatever comes then waits, and is late.
MOST_OPEN = 500
# Gaps are counted in classes of so many seconds.
GAP_S = 1e-4


class StreamFault(Exception):
    """The answer is an error, or was cut, or is not what was asked for."""


@dataclass(frozen=True, order=True)
class Level:
    """How much is asked: ``streams`` that are always open; where that is 0, ``rate`` requests per second, which start
    whatever becomes of the others."""

    streams: int = 0
    rate: float = 0.0

    def __str__(self) -> str:
        return str(self.streams) if self.streams else f"{self.rate:g}/s"


@dataclass(frozen=True)
class Load:
    """One client process's part: ``streams`` connections to ``port``, each asking for ``tokens`` tokens again and
    again, or requests that start at ``times``, in order. Measured from ``start`` to ``end``, on the clock of
    ``time.perf_counter``, which Linux has once for all processes. ``seed``: of the prompts, ``prompt_tokens`` random
    ids each, or with ``words`` as many words; the first ``shared`` ids are the same in all of them. ``texts``: the
    prompts, taken by chance, in their place."""

    port: int
    model: str
    headers: Mapping[str, str]
    streams: int
    prompt_tokens: int
    tokens: int
    start: float
    end: float
    seed: str
    times: Sequence[float] = ()
    words: bool = False
    texts: Sequence[str] = ()
    shared: int = 0


class Answer(NamedTuple):
    """A request that came, or was due, within the measured time. Times in ms; ``came`` counts from the beginning of
    that time, ``first`` and ``last``, of the events, from ``came``. ``tokens``: by the answer's own usage."""

    came: float
    first: float
    last: float
    tokens: int
    events: int


@dataclass
class Taken:
    """What one client process saw. ``tokens`` and ``done`` (requests): within the measured time, of whatever was under
    way. ``gaps``: between two events of a stream, in classes of ``GAP_S``. ``errors``: message → how often, all the
    while. ``busy``: this process's CPU time as a share of a core. Of requests with a time of their own: ``due`` within
    the measured time, and ``late`` of them."""

    answers: list[Answer] = field(default_factory=list)
    tokens: float = 0.0
    done: int = 0
    gaps: Counter[int] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    busy: float = 0.0
    due: int = 0
    late: int = 0


class Stream(asyncio.Protocol):
    """A connection: one request at a time. ``OSError`` where it cannot be opened, ``StreamFault`` from ``ask``."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._ended: asyncio.Future[None] | None = None
        self._events = Events()
        self._refusal = b""
        self._now = 0.0

    @classmethod
    async def open(cls, port: int) -> "Stream":
        _, stream = await asyncio.get_running_loop().create_connection(cls, HOST, port)
        return stream

    async def ask(self, request: bytes, tokens: int) -> Events:
        """The whole answer to ``request``, head and body. It must have ``tokens`` tokens."""
        if self._transport is None or self._transport.is_closing():
            raise StreamFault("the connection was closed")
        self._events, self._refusal = Events(), b""
        self._parser = httptools.HttpResponseParser(self)
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._ended
        status, events = self._parser.get_status_code(), self._events
        if not self._parser.should_keep_alive():
            self.close()
        if status != 200:
            raise StreamFault(f"status {status}: {self._refusal[:300].decode(errors='replace')}")
        if events.fault:
            raise StreamFault(events.fault[:300])
        if not events.done or events.tokens != tokens or not events.times:
            raise StreamFault(f"{events.tokens} of {tokens} tokens in {len(events.times)} events")
        return events

    @property
    def closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def close(self) -> None:
        """At once: an answer under way is aborted."""
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            assert self._parser is not None
            self._parser.feed_data(data)
        except (httptools.HttpParserError, AssertionError):
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(StreamFault("the connection was closed before the answer was whole"))

    # httptools

    def on_body(self, data: bytes) -> None:
        assert self._parser is not None
        if self._parser.get_status_code() == 200:
            self._events.feed(data, self._now)
        else:
            self._refusal += data

    def on_message_complete(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)


def run(load: Load) -> Taken:
    """Returns once all that was asked within the measured time is answered. ``OSError``: the port is closed;
    ``TimeoutError``: it took ``PATIENCE_S`` longer than the load."""
    taken: Taken = uvloop.run(take(load))
    return taken


async def take(load: Load) -> Taken:
    """As ``run``, on the running loop."""
    began, cpu = time.perf_counter(), time.process_time()
    crowd = _Crowd(load)
    async with asyncio.timeout(load.end - began + PATIENCE_S):
        work = [asyncio.create_task(crowd.keep_asking(place)) for place in range(load.streams)]
        if load.times:
            work.append(asyncio.create_task(crowd.ask_in_time()))
        try:
            await asyncio.wait([*work, asyncio.create_task(crowd.over.wait())], return_when=asyncio.FIRST_COMPLETED)
        finally:
            # What was asked after the end is left: it only kept the load as it was.
            for task in work:
                task.cancel()
            found = await asyncio.gather(*work, return_exceptions=True)
    for error in found:
        if isinstance(error, Exception):
            raise error
    crowd.taken.busy = (time.process_time() - cpu) / (time.perf_counter() - began)
    return crowd.taken


class _Crowd:
    """``over``: set once the time is up and nothing that came within it, or before, is under way any more."""

    def __init__(self, load: Load) -> None:
        self.taken = Taken()
        self.over = asyncio.Event()
        self._load = load
        self._open = 0

    async def keep_asking(self, place: int) -> None:
        load, random = self._load, Random(f"{self._load.seed}/{place}")
        # The first answer of each has another length, so that they do not all begin together ever after.
        tokens = random.randint(1, load.tokens)
        stream: Stream | None = None
        try:
            while True:
                if stream is None or stream.closed:
                    stream = await Stream.open(load.port)
                request = encode(load, random, tokens)
                came = time.perf_counter()
                self._open += (waited_for := came < load.end)
                if not await self._ask(stream, request, came, tokens):
                    await asyncio.sleep(PAUSE_S)
                self._open -= waited_for
                tokens = load.tokens
                if time.perf_counter() >= load.end and not self._open:
                    self.over.set()
        finally:
            if stream is not None:
                stream.close()

    async def ask_in_time(self) -> None:
        load, random, room = self._load, Random(self._load.seed), asyncio.Semaphore(MOST_OPEN)
        idle: list[Stream] = []

        async def ask(came: float, request: bytes) -> None:
            async with room:
                if load.start <= came < load.end:
                    self.taken.due += 1
                    self.taken.late += time.perf_counter() - came > LATE_S
                while idle and idle[-1].closed:
                    idle.pop()
                stream = idle.pop() if idle else await Stream.open(load.port)
                try:
                    await self._ask(stream, request, came, load.tokens)
                    idle.append(stream)
                except BaseException:
                    stream.close()
                    raise

        try:
            async with asyncio.TaskGroup() as asking:
                for came in load.times:
                    request = encode(load, random, load.tokens)
                    await asyncio.sleep(came - time.perf_counter())
                    asking.create_task(ask(came, request))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            for stream in idle:
                stream.close()
        await asyncio.sleep(load.end - time.perf_counter())
        self.over.set()

    async def _ask(self, stream: Stream, request: bytes, came: float, tokens: int) -> bool:
        """False where it failed; the stream is closed then."""
        try:
            self._note(came, await stream.ask(request, tokens))
        except StreamFault as fault:
            self.taken.errors[str(fault)] += 1
            stream.close()
            return False
        return True

    def _note(self, came: float, events: Events) -> None:
        load, times, tokens = self._load, events.times, events.tokens or 0
        within = sum(load.start <= at < load.end for at in times)
        self.taken.tokens += tokens * within / len(times)
        self.taken.done += load.start <= times[-1] < load.end
        if load.start <= came < load.end:
            first, last = _ms(times[0] - came), _ms(times[-1] - came)
            self.taken.answers.append(Answer(_ms(came - load.start), first, last, tokens, len(times)))
            self.taken.gaps.update(round((b - a) / GAP_S) for a, b in pairwise(times))


def arrivals(rate: float, seconds: float, random: Random | None) -> Iterator[float]:
    """When requests start within ``seconds``, ``rate`` per second: a Poisson process by ``random``, or, where that is
    None, with equal gaps."""
    at = 0.0
    while (at := at + (random.expovariate(rate) if random else 1 / rate)) < seconds:
        yield at


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 2)


def encode(load: Load, random: Random, tokens: int) -> bytes:
    """A request, head and body, for ``tokens`` tokens after a prompt by chance."""
    prompt: str | list[int]
    if load.texts:
        prompt = random.choice(load.texts)
    elif load.words:
        prompt = " ".join(random.choices(WORDS, k=load.prompt_tokens))
    else:
        prompt = Random(load.shared).choices(IDS, k=load.shared)
        prompt += random.choices(IDS, k=load.prompt_tokens - load.shared)
    body = json.dumps(
        {
            "model": load.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    own = "".join(f"{name}: {value}\r\n" for name, value in load.headers.items())
    head = f"POST {PATH} HTTP/1.1\r\nhost: {HOST}:{load.port}\r\ncontent-type: application/json\r\n{own}"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
