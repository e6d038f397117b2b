"""One load: its parts in client processes, from the order to the sample."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random

import psutil

from loadtest.clusters import ClusterFault, cpu_s
from loadtest.overhead import client, report
from loadtest.overhead.client import Level, Load
from loadtest.overhead.report import Sample

# Between the order to the client processes and the first request: they have their load by then.
AHEAD_S = 0.3


class Arrivals(StrEnum):
    POISSON = "poisson"
    FIXED = "fixed"


@dataclass(frozen=True)
class Asked:
    """How each load is; see the options of ``loadtest.overhead run``. ``texts``, ``shared``: see ``client.Load``."""

    levels: tuple[Level, ...]
    arrivals: Arrivals
    rounds: int
    repeats: int
    seconds: float
    warm_up: float
    prompt_tokens: int
    words: bool
    tokens: int
    clients: int
    texts: Sequence[str] = ()
    shared: int = 0


@dataclass(frozen=True)
class Address:
    """Where a load goes."""

    port: int
    model: str
    headers: Mapping[str, str] = field(default_factory=dict)


def shares(level: Level, where: tuple[int, int], asked: Asked) -> Iterator[tuple[int, list[float]]]:
    """Of each client process: how many streams it keeps open, and when its requests start, s after the load's
    beginning."""
    random = Random(f"{where}/{level}") if asked.arrivals is Arrivals.POISSON else None
    times = list(client.arrivals(level.rate, asked.warm_up + asked.seconds, random)) if level.rate else []
    for place in range(asked.clients):
        yield len(range(place, level.streams, asked.clients)), times[place :: asked.clients]


def take(
    to: Address,
    target: str,
    where: tuple[int, int],
    level: Level,
    asked: Asked,
    pools: Sequence[Executor],
    processes: Iterable[tuple[psutil.Process, str]] = (),
) -> Sample:
    """One load on one target. ``where``: round and repeat. ``processes``: whose CPU time counts, by role. ClusterFault:
    the port is closed, or answers do not end."""
    busy = round(os.getloadavg()[0], 2)
    watched = {process.pid: (process, role) for process, role in processes}
    begin = time.perf_counter() + AHEAD_S
    start = begin + asked.warm_up
    end = start + asked.seconds
    futures = []
    for place, (pool, (streams, times)) in enumerate(zip(pools, shares(level, where, asked), strict=True)):
        if streams or times:
            load = Load(
                to.port,
                to.model,
                dict(to.headers),
                streams,
                asked.prompt_tokens,
                asked.tokens,
                start,
                end,
                seed=f"{where}/{level}/{place}",
                times=[begin + each for each in times],
                words=asked.words,
                texts=asked.texts,
                shared=asked.shared,
            )
            futures.append(pool.submit(client.run, load))
    time.sleep(max(0.0, start - time.perf_counter()))
    before = cpu_s(watched)
    time.sleep(max(0.0, end - time.perf_counter()))
    after = cpu_s(watched)
    used: dict[str, float] = {}
    for pid in before.keys() & after.keys():
        role = watched[pid][1]
        used[role] = used.get(role, 0.0) + after[pid] - before[pid]
    try:
        return report.sample(target, where, level, asked.seconds, [one.result() for one in futures], used, busy)
    except OSError as error:  # TimeoutError is one
        raise ClusterFault(f"{target}, load {level}: {error or 'answers do not end'}") from error


def client_process() -> ProcessPoolExecutor:
    """For ``take``."""
    # spawn: the client inherits nothing of this process but its code.
    # Ctrl-C is for us; its streams end with the system.
    context, ignore = multiprocessing.get_context("spawn"), (signal.SIGINT, signal.SIG_IGN)
    return ProcessPoolExecutor(1, context, initializer=signal.signal, initargs=ignore)
