"""What one request cost its engine, as its replicas tell it: beside the answer, mostly a moment after it."""

import asyncio
from collections.abc import Callable
from contextvars import copy_context

from serve_app.lease import Counted

# How long the count may come after the request's end.
COUNT_S = 3.0


class Tally:
    """``asked``: under which number the replica counts that was asked last; its count covers those before it. Empty:
    none was asked, so the request has reached no engine, or nobody wants to know.

    ``counted``: the largest count so far.
    """

    def __init__(self) -> None:
        self.asked = ""
        self.counted: Counted | None = None
        self._last = ""  # the number of the last count that came, or was given up
        self._heard = ""  # of the last count that came
        self._waiting: list[Callable[[], None]] = []
        self._timer: asyncio.TimerHandle | None = None

    @property
    def used(self) -> int | None:
        """Tokens of prompt and answer; None: nobody has counted them."""
        return None if self.counted is None else self.counted.prompt + self.counted.generated

    @property
    def known(self) -> bool:
        """What the request cost is counted, or nothing: no engine had it."""
        return self.asked == self._heard or not self.asked

    def ask(self, number: str) -> None:
        self.asked = number

    def count(self, counted: Counted) -> None:
        if counted.prompt + counted.generated >= (self.used or 0):
            self.counted = counted
        self._heard = counted.number
        self.give_up(counted.number)

    def give_up(self, number: str) -> None:
        """There will be no more than this of the count under ``number``."""
        self._last = number
        if self._complete:
            self._call()

    def then(self, call: Callable[[], None]) -> None:
        """``call()``, in the present context, once the request's count is complete, or clear that it never will be.
        For when the request is over."""
        if self._complete:
            call()
            return
        context = copy_context()
        self._waiting.append(lambda: context.run(call))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(COUNT_S, self._call)

    @property
    def _complete(self) -> bool:
        return self.asked == self._last or not self.asked

    def _call(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()
