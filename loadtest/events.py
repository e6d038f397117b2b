"""The events of a streamed answer, and when they came."""

import json
import re

DONE = b"data: [DONE]"

_USAGE = re.compile(rb'"usage":\s*\{')
_ERROR = re.compile(rb'data:\s*\{\s*"error"')
# Some servers send events with neither.
_TEXT = re.compile(rb'"(?:text|content)":')
# A chat begins with an event that names the role and has no token.
_ROLE = re.compile(rb'"role":\s*"assistant",\s*"content":\s*""')


class Events:
    """The events of one answer as its bytes come, cut anywhere. ``times``: of those that carry tokens. ``tokens`` and
    ``prompt_tokens``: None until the answer says it. ``fault``: an error event, empty without one."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.tokens: int | None = None
        self.prompt_tokens: int | None = None
        self.done = False
        self.fault = ""
        self._rest = b""

    def feed(self, data: bytes, now: float) -> None:
        *whole, self._rest = (self._rest + data).split(b"\n\n")
        for event in whole:
            if not event.startswith(b"data:"):
                continue  # a comment
            if event == DONE:
                self.done = True
            elif _ERROR.match(event):
                self.fault = event.decode(errors="replace")
            elif _USAGE.search(event):
                usage = json.loads(event.removeprefix(b"data:"))["usage"]
                self.tokens, self.prompt_tokens = int(usage["completion_tokens"]), int(usage["prompt_tokens"])
            elif _TEXT.search(event) and not _ROLE.search(event):
                self.times.append(now)
