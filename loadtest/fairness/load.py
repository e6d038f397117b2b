"""The client: users who each keep so many requests open, over plain HTTP/1.1. Runs in a process of its own."""

import asyncio
import json
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import uvloop

from loadtest.streams import END, PATH, StreamFault
from serve_app.gateway.upstream import Connection, ConnectionBroken

HOST = "127.0.0.1"
# What came before is not counted: the queue fills, leases are opened.
WARM_UP_S = 1.0
# Between an answer and its user's next request, mean. Without it, who was answered would take the place that just
# became free before anybody else could, and who was refused would be refused for ever.
THINK_S = 0.05
# Who was refused comes again, after a pause of this mean.
PAUSE_S = 0.5
# How long after its end a load may take to answer what waits then.
PATIENCE_S = 60.0
# Answers are log-normal, in tokens.
MEDIAN_TOKENS, SIGMA, MOST_TOKENS = 24, 0.6, 200


@dataclass(frozen=True)
class User:
    """``open``: requests that it has open: the next one comes soon after one is answered. ``key``: its API key."""

    name: str
    open: int
    key: str


@dataclass(frozen=True)
class Load:
    """``users`` at once for ``seconds``, after ``warm_up_s``. They go on, uncounted, until all requests that came in
    that time are answered: so the last ones wait in no emptier queue. An answer's first token takes ``first_token_s``,
    each further one ``interval_s``. ``pause_s``: mean, after a refusal."""

    port: int
    model: str
    users: tuple[User, ...]
    seconds: float
    first_token_s: float
    interval_s: float
    seed: int
    warm_up_s: float = WARM_UP_S
    pause_s: float = PAUSE_S


class Answer(NamedTuple):
    """One request. Times in ms; ``came`` and ``done`` count from the end of the warm-up.

    ``came``: its first try. ``wait``: from then to its first token, with the pauses after refusals. ``done``: its last
    token. ``refused``: how often it got a 429 before.
    """

    came: int
    wait: int
    done: int
    tokens: int
    refused: int


def run(load: Load) -> dict[str, list[Answer]]:
    """By user, every request that came before the end; each was answered. Raises ``StreamFault``."""
    taken: dict[str, list[Answer]] = uvloop.run(take(load))
    return taken


async def take(load: Load) -> dict[str, list[Answer]]:
    """As ``run``, on the running loop."""
    limit = load.warm_up_s + load.seconds + PATIENCE_S
    places = [(user, place) for user in load.users for place in range(user.open)]
    try:
        connections = [await Connection.open(HOST, load.port) for _ in places]
        crowd = _Crowd(load)
        async with asyncio.timeout(limit), asyncio.TaskGroup() as group:
            for (user, place), connection in zip(places, connections, strict=True):
                group.create_task(crowd.keep_asking(user, place, connection))
    except TimeoutError:
        raise StreamFault(f"the load was not over after {limit:.0f} s") from None
    except ConnectionBroken as broken:
        raise StreamFault(f"the endpoint cannot be reached: {broken}") from broken
    except ExceptionGroup as faults:
        one = faults.exceptions[0]
        raise StreamFault(f"a stream was cut: {one}" if isinstance(one, ConnectionBroken) else str(one)) from one
    return crowd.taken


class _Crowd:
    """The users of one load, which begins when this is made. ``_waiting``: requests that count and are not answered."""

    def __init__(self, load: Load) -> None:
        self.taken: dict[str, list[Answer]] = {user.name: [] for user in load.users}
        self._load = load
        self._waiting = 0
        self._clock = asyncio.get_running_loop().time
        self._began = self._clock() + load.warm_up_s

    async def keep_asking(self, user: User, place: int, connection: Connection) -> None:
        """One of a user's open requests after the other. Their lengths depend on the seed, not on who else asks."""
        lengths, pauses = (Random(f"{self._load.seed}/{user.name}/{place}/{what}") for what in ("lengths", "pauses"))
        try:
            while (came := self._clock() - self._began) < self._load.seconds or self._waiting:
                counts = came < self._load.seconds
                self._waiting += counts
                tokens = draw_tokens(lengths)
                refused = 0
                while (first := await _ask(connection, self._load, user, tokens)) is None:
                    refused += 1
                    await asyncio.sleep(pauses.uniform(0.5, 1.5) * self._load.pause_s)
                    if not connection.reusable:
                        connection.close()
                        connection = await Connection.open(HOST, self._load.port)
                self._waiting -= counts
                if counts:
                    wait, done = first - self._began - came, self._clock() - self._began
                    self.taken[user.name].append(Answer(_ms(came), _ms(wait), _ms(done), tokens, refused))
                await asyncio.sleep(pauses.uniform(0.5, 1.5) * THINK_S)
        finally:
            connection.close()


def _ms(seconds: float) -> int:
    return round(1000 * seconds)


def draw_tokens(random: Random) -> int:
    return min(MOST_TOKENS, max(1, round(MEDIAN_TOKENS * random.lognormvariate(0, SIGMA))))


async def _ask(connection: Connection, load: Load, user: User, tokens: int) -> float | None:
    """When the first token came, on the loop's clock, once the whole answer is there; None: refused, 429."""
    body = json.dumps(
        {
            "model": load.model,
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": tokens,
            "stream": True,
            "fake": {"first_token_s": load.first_token_s, "interval_s": load.interval_s},
        }
    ).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: {HOST}:{load.port}\r\ncontent-type: application/json\r\n"
    head += f"authorization: Bearer {user.key}\r\ncontent-length: {len(body)}\r\n\r\n"
    answer = await connection.request(head.encode(), body)
    parts = [await connection.read()]
    first = asyncio.get_running_loop().time()
    while parts[-1]:
        parts.append(await connection.read())
    text = b"".join(parts)
    if answer.status == 429:
        return None
    found = text.count(b'"content":"t')  # a chat stream begins with an event of its role alone
    if answer.status != 200 or found != tokens or not text.endswith(END):
        raise StreamFault(f"status {answer.status}, {found} of {tokens} tokens; the answer ends in {text[-200:]!r}")
    return first
