"""What one request cost its engine in tokens and time, also where its client left: asked for by the gateway
(``COUNT_HEADER``), for its metrics and its keys' quotas.

Told in the answer itself where there is room for it, which costs nothing; else beside it, on the lease's own stream,
which is one more message through Serve.
"""

import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar

from serve_app.asgi import Message
from serve_app.lease import COUNTED_HEADER, KEPT_HEADER, Counted


class Counting:
    """Of one HTTP request, from now on. ``requests``: for each engine request that it became, what says ``(prompt,
    generated)`` so far, in tokens. ``told``: the answer says it. ``unheard``: the gateway has left; engines answer all
    the same."""

    def __init__(self, number: str) -> None:
        self.requests: list[Callable[[], tuple[int, int]]] = []
        self.told = False
        self.unheard = False
        self._number = number
        self._began = time.monotonic()
        self._head: Message | None = None  # kept back until it is known whether the answer is whole
        self._journal = False

    def total(self) -> Counted:
        told = [count() for count in self.requests]
        prompt, generated = (sum(tokens) for tokens in zip(*told, strict=True)) if told else (0, 0)
        return Counted(self._number, prompt, generated, time.monotonic() - self._began)

    def add_to(self, message: Message, *, last: bool) -> Sequence[Message]:
        """What goes out in the place of this ``message`` of the answer."""
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            self._journal = KEPT_HEADER in headers
            if not headers.get(b"content-type", b"").startswith(b"text/event-stream"):
                self._head = message
                return ()
            return (message,)
        head, self._head = self._head, None
        self.told = last and not self.unheard and (head is not None or self._journal)
        if self.told and head is not None:
            head = {**head, "headers": [*head["headers"], (COUNTED_HEADER, self.total().in_words)]}
        elif self.told:
            message = {**message, "body": message.get("body", b"") + self.total().in_words}
        return (message,) if head is None else (head, message)


COUNTING: ContextVar[Counting | None] = ContextVar("counting", default=None)
