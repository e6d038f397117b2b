"""How many tokens share an event of a stream: one while the engine has little to tell, several under load.

Each event costs the replica, the gateway and the proxy the same, however many tokens are in it. So once the events of
one token each would be more than ``EVENTS_S`` a second, a stream that has just sent one waits a little, and what the
engine makes meanwhile goes out together.
"""

import asyncio
import time
from collections.abc import Callable
from contextvars import ContextVar

# Per replica. The front end of one vLLM is near its limit at some thousands (see docs/performance.md).
EVENTS_S = 2000.0
# Of the average over steps, and what is no step but a pause between requests.
NEWEST = 0.1
PAUSE_S = 0.5


def hold_s(streams: int, step_s: float, longest_s: float) -> float:
    """How long a stream that has just sent an event waits before its next one, ``longest_s`` at most, where ``streams``
    streams get a token each every ``step_s`` seconds."""
    if not step_s or streams / step_s <= EVENTS_S:
        return 0.0
    return min(longest_s, streams / EVENTS_S)


class Pace:
    """Of one engine. ``streams``: those under way; ``longest_s``: see ``hold_s``. ``clock``: seconds, monotonic."""

    def __init__(self, longest_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.streams = 0
        self.longest_s = longest_s
        self._clock = clock
        self._step_s = 0.0
        self._last = clock()

    def step(self) -> None:
        """The engine has made a step."""
        now = self._clock()
        took, self._last = now - self._last, now
        if took < PAUSE_S:
            self._step_s += (took - self._step_s) * (NEWEST if self._step_s else 1.0)

    def hold_s(self) -> float:
        return hold_s(self.streams, self._step_s, self.longest_s)


class Pause:
    """Between two events of one stream. The stream's end ends it: nobody waits for an answer that is there."""

    def __init__(self) -> None:
        self._ended = False
        self._over: asyncio.Event | None = None

    def end(self) -> None:
        """For good."""
        self._ended = True
        if self._over is not None:
            self._over.set()

    async def take(self, seconds: float) -> None:
        if self._ended:
            return
        over = self._over = asyncio.Event()
        timer = asyncio.get_running_loop().call_later(seconds, over.set)
        try:
            await over.wait()
        finally:
            timer.cancel()
            self._over = None


# Of the stream that is asked for.
PAUSE: ContextVar[Pause | None] = ContextVar("pause", default=None)
