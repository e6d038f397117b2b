"""Tokens per second, over the last few seconds."""

import time
from collections import deque
from collections.abc import Callable

WINDOW_S = 10


class TokenRate:
    """Counts by whole seconds: an engine makes hundreds of steps in one. ``clock``: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._counts: deque[tuple[int, int]] = deque()  # (second, tokens), oldest first

    def add(self, tokens: int) -> None:
        second = int(self._clock())
        if self._counts and self._counts[-1][0] == second:
            tokens += self._counts.pop()[1]
        self._counts.append((second, tokens))

    def per_second(self) -> float:
        now = self._clock()
        while self._counts and self._counts[0][0] <= now - WINDOW_S:
            self._counts.popleft()
        seen_s = min(max(now - self._began, 1.0), WINDOW_S)
        return sum(tokens for _, tokens in self._counts) / seen_s
