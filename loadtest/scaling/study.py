"""Every scenario under every system, on several seeds: the jobs, and what was found."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context

from loadtest.scaling.fleet import Fleet
from loadtest.scaling.outcome import Outcome, Series, outcome, series
from loadtest.scaling.replay import replay
from loadtest.scaling.scenarios import scenarios
from loadtest.scaling.systems import Modelyard, Serve, ServeSettings, Static, System

# What Serve's policy is tried with: targets, each with its own delays (30 s and 600 s; the mean of 30 s, sent every
# 10 s), and with delays that are as short as Modelyard's are: up after 1 s of a mean of 5 s, sent every second, down
# after 600 s or 120 s.
TARGETS = (2.0, 8.0, 16.0, 32.0, 64.0)
SERVE_DEFAULT = ServeSettings()
QUICK = ServeSettings(up_s=1.0, look_back_s=5.0, interval_s=1.0)
SERVE = tuple(
    replace(delays, target=target)
    for delays in (SERVE_DEFAULT, QUICK, replace(QUICK, down_s=120.0))
    for target in TARGETS
)


@dataclass(frozen=True)
class Modelyards:
    """Modelyard's policy with the default ``Scaling``."""


@dataclass(frozen=True)
class Fixed:
    """A fleet that does not scale: of the lower bound's size, or as large as bounds and GPUs allow."""

    largest: bool


Choice = Modelyards | Fixed | ServeSettings
CHOICES: tuple[Choice, ...] = (Modelyards(), Fixed(False), Fixed(True), *SERVE)


@dataclass(frozen=True)
class Job:
    scenario: str
    choice: Choice
    seed: int
    start_s: float


@dataclass(frozen=True)
class Found:
    job: Job
    outcome: Outcome
    series: Series | None


def jobs(names: Sequence[str], seeds: int, start_s: float) -> list[Job]:
    """A recorded trace is replayed once."""
    return [
        Job(name, choice, seed, start_s)
        for name in names
        for seed in range(1, (seeds if scenarios()[name].seeded else 1) + 1)
        for choice in CHOICES
    ]


def do(job: Job) -> Found:
    scenario = scenarios(job.start_s)[job.scenario]
    models = scenario.models(job.seed)
    make = system(job.choice, len(models))
    runs = replay(models, make, gpus=scenario.gpus, seconds=scenario.seconds, seed=job.seed)
    return Found(job, outcome(runs.values()), series(runs, scenario.seconds))


def system(choice: Choice, models: int) -> Callable[[Fleet], System]:
    match choice:
        case Modelyards():
            return Modelyard
        case Fixed(largest=False):
            return lambda fleet: Static(fleet.spec.least)
        case Fixed():
            return lambda fleet: Static(min(fleet.spec.most, fleet.pool.gpus // models))
        case ServeSettings() as settings:
            return lambda fleet: Serve(fleet, settings)


def do_all(todo: Sequence[Job], processes: int | None = None) -> Iterator[Found]:
    """In the order in which they end."""
    # spawn: the children start clean, whatever the parent has loaded.
    with ProcessPoolExecutor(processes or os.cpu_count(), get_context("spawn")) as pool:
        for done in as_completed([pool.submit(do, job) for job in todo]):
            yield done.result()
