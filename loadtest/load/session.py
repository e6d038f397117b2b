"""One load test from its begin to its end: who asks when, and what came of it. Runs in locust's process, on gevent."""

import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gevent
from gevent.pool import Group

from loadtest.load.client import Client, Heard
from loadtest.load.lengths import Lengths
from loadtest.load.record import Answer, Run, Sample
from loadtest.load.scenario import Scenario, Traffic
from loadtest.load.workload import CHAT, COMPLETIONS, Due, Talk, of_due
from loadtest.scaling.traces import between

UNANSWERED = "unanswered"


@dataclass(frozen=True)
class Plan:
    """``due``: by traffic, of those that have a rate."""

    name: str
    url: str
    scenario: Scenario
    lengths: Mapping[str, Lengths]
    due: Mapping[str, list[Due]]
    seed: int

    @property
    def rated(self) -> list[Traffic]:
        return [traffic for traffic in self.scenario.traffic if traffic.rate is not None]

    def wanted(self, at: float) -> dict[str, int]:
        """Users of each traffic that has any, at this second."""
        return {each.name: round(between(each.users, at)) for each in self.scenario.traffic if each.users is not None}


class Session:
    """``tell``: called with each answer, to pass it on to locust. ``clock``: seconds."""

    def __init__(
        self,
        plan: Plan,
        tell: Callable[[Answer, Traffic], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.plan = plan
        self.answers: list[Answer] = []
        self.samples: list[Sample] = []
        self._traffic = {each.name: each for each in plan.scenario.traffic}
        self._tell = tell
        self._client = Client(plan.url, plan.scenario.timeout_s)
        self._clock = clock
        self._began = clock()
        self._open: dict[int, tuple[Traffic, float, Heard]] = {}
        self._numbers = itertools.count()
        self._seated: Counter[str] = Counter()
        self._talked: Counter[str] = Counter()
        self._asking = Group()
        self._ended: float | None = None
        self._left = 0

    @property
    def now(self) -> float:
        """Seconds since the begin."""
        return self._clock() - self._began

    @property
    def open(self) -> int:
        return len(self._open)

    @property
    def waiting(self) -> int:
        """Those of the open ones that have no token yet."""
        return sum(not heard.events.times for _, _, heard in self._open.values())

    @property
    def sending(self) -> bool:
        """Whether requests still come."""
        return self.now < self.plan.scenario.seconds and self._ended is None

    @property
    def over(self) -> bool:
        """All is answered, or had its time."""
        scenario = self.plan.scenario
        return not self.sending and (not self._open or self.now >= scenario.seconds + scenario.drain_s)

    def play(self, traffic: Traffic) -> None:
        """Send what is due, each request when it is, whatever became of the ones before."""
        for number, due in enumerate(self.plan.due[traffic.name]):
            gevent.sleep(max(0.0, due.at - self.now))
            if not self.sending:
                return
            self._asking.spawn(self.ask, traffic, of_due(traffic, due, self.plan.seed, number), due.at)

    def talk(self) -> Talk:
        """A new conversation of the traffic that lacks most users; give it back with ``leave``."""
        wanted = self.plan.wanted(self.now)
        name = max(wanted, key=lambda each: wanted[each] - self._seated[each])
        self._seated[name] += 1
        self._talked[name] += 1
        traffic = self._traffic[name]
        return Talk(traffic, self.plan.lengths[traffic.lengths], self.plan.seed, self._talked[name])

    def leave(self, talk: Talk) -> None:
        self._seated[talk.traffic.name] -= 1

    def ask(self, traffic: Traffic, body: dict[str, Any], came: float, with_text: bool = False) -> Heard:
        """Send a request that was due at ``came`` and note what became of it."""
        path = CHAT if traffic.route == "chat" else COMPLETIONS
        number, heard = next(self._numbers), Heard()
        self._open[number] = (traffic, came, heard)
        try:
            self._client.ask(path, body, headers_of(traffic), heard, with_text)
        finally:
            self._open.pop(number, None)
        if self._ended is None:
            self._note(traffic, came, heard)
        return heard

    def _note(self, traffic: Traffic, came: float, heard: Heard) -> None:
        answer = _answer(traffic, came, self._began, heard)
        self.answers.append(answer)
        self._tell(answer, traffic)

    def end(self) -> None:
        """Nothing is sent or counted any more. What is open then had its time, or is left where the test was
        interrupted before."""
        if self._ended is not None:
            return
        self._ended = min(self.now, self.plan.scenario.seconds)
        if self._ended < self.plan.scenario.seconds:
            self._left = len(self._open)
        else:
            for traffic, came, heard in self._open.values():
                heard.ended, heard.error = self._clock(), UNANSWERED
                self._note(traffic, came, heard)
        self._open.clear()
        self._asking.kill(block=False)
        self._client.close()

    def result(self, about: Mapping[str, Any]) -> Run:
        """Once it is ended."""
        assert self._ended is not None
        answers = sorted(self.answers, key=lambda each: each.came)
        return Run(self.plan.name, about, self.plan.scenario, self._ended, self._left, answers, self.samples)


def headers_of(traffic: Traffic) -> dict[str, str]:
    """With the key that its environment variable holds."""
    headers = {}
    if key := os.environ.get(traffic.key_variable):
        headers["authorization"] = f"Bearer {key}"
    if traffic.keep_alive:
        headers["x-modelyard-keep-alive"] = "1"
    return headers


def _answer(traffic: Traffic, came: float, began: float, heard: Heard) -> Answer:
    events, start = heard.events, began + came
    times = events.times
    return Answer(
        traffic.name,
        round(came, 4),
        _ms(heard.sent - start),
        _ms(times[0] - start) if times else None,
        _ms((times[-1] if times and not heard.error else heard.ended) - start),
        _ms(max((b - a for a, b in itertools.pairwise(times)), default=0.0)),
        events.tokens or 0,
        events.prompt_tokens or 0,
        len(times),
        heard.error,
    )


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 2)
