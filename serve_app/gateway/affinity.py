"""Which replica of one model a request would rather go to: what this gateway gave to whom, and what others did."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping

from serve_app.prefixes import MOST_PASSED_ON, News, Passed, Prefix
from serve_app.routing import Ranking

# How often gateways tell each other, over the model's card, while requests come; and how long after the last one.
TELL_S = 0.5
LISTEN_S = 60.0
TELL_TIMEOUT_S = 2.0


class Affinity:
    """``routing()`` names a strategy (see ``serve_app.routing``). ``tell(news, upto)`` is one call to the model's card
    (see ``prefixes.Exchange``). ``clock``: seconds, monotonic."""

    def __init__(
        self,
        routing: Callable[[], str],
        tell: Callable[[tuple[News, ...], int], Awaitable[Passed]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._routing = routing
        self._tell = tell
        self._clock = clock
        self._ranking = Ranking(routing())
        self._running: frozenset[str] = frozenset()
        self._news: deque[News] = deque(maxlen=MOST_PASSED_ON)
        self._upto = 0
        self._alone = True
        self._last = 0.0
        self._task: asyncio.Task[None] | None = None

    def preferred(self, loads: Mapping[str, int], prefix: Callable[[], Prefix]) -> str | None:
        """The replica that is worth a lease of its own; None: the least busy one will do. ``loads``: requests under way
        by replica that runs; ``prefix`` is asked for only where there is a choice."""
        if (strategy := self._routing()) != self._ranking.name:
            self._ranking = Ranking(strategy)
        return self._ranking.preferred(loads, prefix()) if len(loads) > 1 else None

    def given(self, replica: str, loads: Mapping[str, int], prefix: Callable[[], Prefix]) -> None:
        """A request went to ``replica``."""
        if len(loads) < 2 or self._ranking.name != "prefix" or not (hashes := prefix().hashes):
            return
        self._running = frozenset(loads)
        self._ranking.given(replica, hashes, self._running)
        self._news.append((replica, hashes))
        self._last = self._clock()
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            while self._clock() - self._last < LISTEN_S:
                await self._exchange()
                await asyncio.sleep(TELL_S)
        finally:
            self._task = None

    async def _exchange(self) -> None:
        news: tuple[News, ...] = ()
        if not self._alone:  # else they are kept for the first one that comes
            news = tuple(self._news)
            self._news.clear()
        with contextlib.suppress(Exception):  # a card that is being replaced: news that are lost cost a cache miss
            passed = await asyncio.wait_for(self._tell(news, self._upto), TELL_TIMEOUT_S)
            self._upto, self._alone = passed.upto, passed.alone
            for replica, hashes in passed.news:
                if replica in self._running:
                    self._ranking.given(replica, hashes, self._running)
