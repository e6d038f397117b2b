"""Tells a model's card how many requests wait for it at this gateway: part of the queue that its scaling follows."""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Awaitable, Callable

logger = logging.getLogger("ray.serve")

# Most requests that have to wait for a lease get one in milliseconds: nothing to tell.
WORTH_TELLING_S = 0.1
TELL_S = 0.5
TELL_TIMEOUT_S = 2.0

# This gateway among its equals, to be counted once.
GATEWAY = uuid.uuid4().hex


class HeldReport:
    """``waiting()``: requests that wait now. ``tell(requests)``: one call to the card."""

    def __init__(self, waiting: Callable[[], int], tell: Callable[[int], Awaitable[object]]) -> None:
        self._waiting = waiting
        self._tell = tell
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Somebody waits: tell of it from time to time, until nobody does."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            await asyncio.sleep(WORTH_TELLING_S)
            while requests := self._waiting():
                await self._say(requests)
                await asyncio.sleep(TELL_S)
            await self._say(0)
        finally:
            self._task = None
        if self._waiting():
            self.begin()

    async def _say(self, requests: int) -> None:
        with contextlib.suppress(Exception):  # a card that is being replaced; the next one will hear it
            await asyncio.wait_for(self._tell(requests), TELL_TIMEOUT_S)
