"""What locust runs: users, the shape of their number, options, and what happens at begin and end.

``loadtest/locustfile.py`` gives it to locust. What locust knows as "response time" is in ms, but for the rows of type
``tokens/s``: there it is an answer's tokens over its whole time. As "response length" locust gets its tokens.
"""

import logging
import os
import sys
import time
from argparse import ArgumentParser
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import gevent
from locust import LoadTestShape, User, events, task
from locust.env import Environment
from locust.runners import LocalRunner

from loadtest.about import about_run
from loadtest.load import lengths as quantiles
from loadtest.load import outputs, scenario
from loadtest.load.progress import Progress
from loadtest.load.record import Answer
from loadtest.load.scenario import ScenarioFault, Traffic
from loadtest.load.session import Plan, Session
from loadtest.load.watch import watch
from loadtest.load.workload import Talk, schedules
from serve_app.endpoint import KEY_VARIABLE

# Users per second that locust starts where more are wanted.
SPAWN_RATE = 100
DEFAULT_URL = "http://127.0.0.1:8000"


class Failed(Exception):
    """What locust's table of failures shows."""


class Arrivals(User):
    """Sends the requests of one kind of traffic when they are due. One for each that has a rate."""

    test: ClassVar["Test"]

    @task
    def play(self) -> None:
        session = self.test.session
        if (traffic := self.test.next_rated()) is not None:
            session.play(traffic)
        while True:  # until locust ends this user
            gevent.sleep(1)


class People(User):
    """Each asks, reads, pauses and asks again."""

    test: ClassVar["Test"]

    def on_start(self) -> None:
        self._talk: Talk | None = None
        self._pause_s = 0.0

    def wait_time(self) -> float:
        return self._pause_s

    @task
    def turn(self) -> None:
        session = self.test.session
        if not session.sending:
            self._pause_s = 1.0
            return
        talk = self._talk = self._talk or session.talk()
        heard = session.ask(talk.traffic, talk.ask(), session.now, with_text=talk.traffic.turns > 1)
        talk.hear(heard.text)
        self._pause_s = talk.pause_s(failed=bool(heard.error))
        if heard.error or talk.over:
            self.on_stop()

    def on_stop(self) -> None:
        if self._talk is not None:
            self.test.session.leave(self._talk)
            self._talk = None


class Shape(LoadTestShape):
    """As many users as the scenario wants; ends the test once the last answer is there."""

    test: ClassVar["Test"]

    def tick(self) -> tuple[int, float] | None:
        return self.test.tick()


class Test:
    """Joins a plan and locust. In locust's web interface a test may be run again and again: each has a session."""

    def __init__(self, environment: Environment, plan: Plan) -> None:
        self.plan = plan
        self.session = Session(plan, self.tell)
        self._environment = environment
        self._options: Any = environment.parsed_options
        self._rated = iter(plan.rated)
        self._beside: list[gevent.Greenlet] = []  # empty while no test runs
        self._about: dict[str, Any] = {}
        self._written: Path | None = None

    def begin(self) -> None:
        plan = replace(self.plan, url=self._environment.host or DEFAULT_URL)  # the web interface can name another host
        self._about = about_run("locust") | {"url": plan.url, "seed": plan.seed, "locust": version("locust")}
        self._rated = iter(plan.rated)
        self._environment.stop_timeout = plan.scenario.drain_s
        models, key = {traffic.model for traffic in plan.scenario.traffic}, os.environ.get(KEY_VARIABLE, "")
        session = self.session = Session(plan, self.tell)
        self._beside = [gevent.spawn(watch, plan.url, key, models, lambda: session.now, session.samples.append)]
        if self._options.headless:
            self._beside.append(gevent.spawn(Progress(session).show))

    def next_rated(self) -> Traffic | None:
        return next(self._rated, None)

    def tick(self) -> tuple[int, float] | None:
        if self._beside and self.session.over:
            return None
        at = self.session.now if self._beside else 0.0
        return len(self.plan.rated) + sum(self.plan.wanted(at).values()), SPAWN_RATE

    def tell(self, answer: Answer, traffic: Traffic) -> None:
        """One answer as locust's own rows."""

        def fire(kind: str, value: float, error: str = "") -> None:
            self._environment.events.request.fire(
                request_type=kind,
                name=answer.traffic,
                response_time=value,
                response_length=answer.tokens,
                exception=Failed(error) if error else None,
                context={},
                start_time=time.time() - answer.last / 1000,
            )

        fire("answer", answer.last, answer.error)
        if answer.first is not None:
            fire("TTFT", answer.first)
        if not answer.error:
            fire("tokens/s", answer.tokens / answer.last * 1000)
            if answer.itl is not None:
                fire("ITL", answer.itl)
        if traffic.judged:
            fire("goodput", answer.last, answer.miss(self.plan.scenario.target))

    def ending(self) -> None:
        """Whoever still asks had the time for it."""
        self._environment.stop_timeout = 0
        self.session.end()

    def end(self) -> None:
        """Write the report; locust ends with its verdict."""
        if not self._beside:
            return
        gevent.killall(self._beside)
        self._beside = []
        run = self.session.result(self._about)
        self._environment.process_exit_code = outputs.NOTHING  # unless the report can be written
        name = f"{run.name}-{datetime.now(UTC):%Y-%m-%dT%H%M%S}"
        self._written = outputs.write(run, Path(self._options.out), name)
        self._environment.process_exit_code = outputs.status(run)

    def show(self) -> None:
        """The last test's report, in words."""
        if self._written is not None:
            outputs.show(self._written)


def _options(parser: ArgumentParser) -> None:
    plain: dict[str, Any] = {"include_in_web_ui": False}
    parser.add_argument("--scenario", default="local", help="One of loadtest/load/scenarios, or a file.", **plain)
    parser.add_argument("--seed", type=int, default=1, help="Of arrivals, lengths and texts.", **plain)
    parser.add_argument(
        "--trace",
        default="",
        help="Folder of Azure's traces (AzureLLMInferenceDataset2023 of github.com/Azure/AzurePublicDataset), whose "
        "arrivals and lengths the traffic with a rate has instead of its own.",
        **plain,
    )
    parser.add_argument("--speed", type=float, default=1.0, help="So many times as fast as the trace.", **plain)
    parser.add_argument("--out", default=str(outputs.FOLDER), help="Folder of the report.", **plain)


def _init(environment: Environment, runner: Any, **_: Any) -> None:
    if not isinstance(runner, LocalRunner):
        _refuse("one process sends all requests of a test: leave --processes, --master and --worker out")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs each look at /ready
    options: Any = environment.parsed_options
    environment.host = environment.host or DEFAULT_URL
    try:
        file = scenario.find(options.scenario)
        wanted, lengths = scenario.read(file), quantiles.load()
        Path(options.out).mkdir(parents=True, exist_ok=True)
        due = schedules(wanted, lengths, options.seed, Path(options.trace) if options.trace else None, options.speed)
    except (ScenarioFault, OSError) as fault:
        _refuse(str(fault))
    test = Test(environment, Plan(file.stem, environment.host, wanted, lengths, due, options.seed))
    Arrivals.test = People.test = Shape.test = test
    Arrivals.fixed_count = len(test.plan.rated)
    users = [People] if test.plan.wanted(0) else []
    environment.user_classes = [*([Arrivals] if test.plan.rated else []), *users]
    environment.events.test_start.add_listener(lambda **_: test.begin())
    environment.events.test_stopping.add_listener(lambda **_: test.ending())
    environment.events.test_stop.add_listener(lambda **_: test.end())
    environment.events.quit.add_listener(lambda **_: test.show())


def _refuse(reason: str) -> NoReturn:
    print(f"loadtest.load: {reason}", file=sys.stderr)
    raise SystemExit(2)


events.init_command_line_parser.add_listener(_options)
events.init.add_listener(_init)
