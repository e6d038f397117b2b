"""How many tokens one request cost its engine, also where its client left: asked for by the gateway, which settles its
keys' quotas with it (``COUNT_HEADER``), and told beside the answer, on the lease's own stream."""

from collections.abc import Callable
from contextvars import ContextVar

from serve_app.lease import Counted


class Counting:
    """Of one HTTP request. ``requests``: for each engine request that it became, what says ``(prompt, generated)`` so
    far, in tokens."""

    def __init__(self) -> None:
        self.requests: list[Callable[[], tuple[int, int]]] = []

    def total(self, number: str) -> Counted:
        told = [count() for count in self.requests]
        return Counted(number, sum(prompt for prompt, _ in told), sum(generated for _, generated in told))


COUNTING: ContextVar[Counting | None] = ContextVar("counting", default=None)
