"""How a running test goes, in a line: live in a terminal, every ten seconds elsewhere."""

from itertools import takewhile
from statistics import median

import gevent
from rich.console import Console

from loadtest.load.session import Session

LIVE_S, PRINTED_S = 0.5, 10.0
# What the line's figures are over.
LATELY_S = 10.0


class Progress:
    def __init__(self, session: Session, console: Console | None = None) -> None:
        self._session = session
        self._console = console or Console()

    def show(self) -> None:
        """Until the greenlet is killed."""
        if not self._console.is_terminal:
            while True:
                self._console.print(self.line(), highlight=False, soft_wrap=True)
                gevent.sleep(PRINTED_S)
        with self._console.status(self.line()) as status:
            while True:
                gevent.sleep(LIVE_S)
                status.update(self.line())

    def line(self) -> str:
        session = self._session
        now, seconds, answers = session.now, session.plan.scenario.seconds, session.answers
        failed = sum(bool(each.error) for each in answers)
        still = f"{session.open} open, {session.waiting} of them without a token"
        done = f"{len(answers) - failed} answered, {failed} failed, {still}"
        if now >= seconds:
            return f"{session.plan.name}: {done}; waiting for the last"
        # They are in the order in which they ended.
        lately = list(takewhile(lambda each: each.ended > now - LATELY_S, reversed(answers)))
        first = [each.first for each in lately if each.first is not None]
        speed = sum(each.tokens for each in lately) / min(LATELY_S, max(1.0, now))
        told = f"; lately TTFT {median(first):,.0f} ms, {speed:,.0f} tokens/s" if first else ""
        return f"{session.plan.name}: {now:.0f} of {seconds:g} s, {done}{told}"
