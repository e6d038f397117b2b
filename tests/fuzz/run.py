"""A whole fuzz run: a gateway and its models in this process, the cases, the clients, and what must hold afterwards."""

import asyncio
import gc
import itertools
import logging
import os
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import yaml

from serve_app import keys
from serve_app.catalog import State
from serve_app.config import FakeScript, GatewaySettings, Name, RequestLimits
from serve_app.gateway.relay import GENERATE
from serve_app.gateway.routes import BY_PATH
from serve_app.signals import ALL, OTHER
from tests.fuzz import documented, judge
from tests.fuzz.case import Case, Reply
from tests.fuzz.client import ask
from tests.fuzz.mutations import MODELS, Mutations
from tests.inprocess import FakeModel, Yard, model, yard

CLIENTS = 16
# No request may take longer, however busy the machine is. Nothing in the yard waits longer than a second on purpose.
BOUND_S = 20.0
# Of all requests, so many come from the OpenAPI document.
DOCUMENTED = 0.2
FULL, TEAM = "my-" + "f" * 43, "my-" + "t" * 43
# So many requests come before anything is counted: what starts with the first ones, and caches.
WARM_UP = 200
# Bytes of memory that may stay: what libraries cache, however many requests there are, and hardly anything of each.
CACHES = 384 * 1024
MOST_GROWTH = 100
_LOGS = ("ray.serve", "uvicorn.error", "asyncio", "python_multipart")


@dataclass
class Outcome:
    """``faults``: what no client may see. ``left_open``: what is more than before, by what. ``errors``: of the log.
    ``grown``: bytes of memory that are not given back, beyond ``CACHES``, per request, by gateway."""

    statuses: Counter[tuple[str, str]] = field(default_factory=Counter)
    slowest: list[tuple[float, str]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    left_open: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    grown: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def requests(self) -> int:
        return self.statuses.total()

    @property
    def good(self) -> bool:
        return not (self.faults or +self.left_open or self.errors) and max(self.grown.values()) < MOST_GROWTH

    def note(self, case: Case, reply: Reply) -> None:
        self.statuses[case.origin, "left" if reply.left else "broken" if reply.broken else str(reply.status)] += 1
        what = f"{case.method.decode()} {case.target[:60].decode('latin-1')} -> {reply.status}"
        self.slowest = sorted([*self.slowest, (reply.seconds, what)], reverse=True)[:3]
        if (fault := judge.fault(case, reply)) is not None:
            self.faults.append(f"{fault}\n    {case.origin}: {case.raw[:1000]!r}\n    answer: {reply.body[:500]!r}")

    def __str__(self) -> str:
        lines = [f"{'requests':<12}{self.requests:>8}   in {self.seconds:.0f} s"]
        origins = sorted({origin for origin, _ in self.statuses})
        for status in sorted({status for _, status in self.statuses}):
            counts = {origin: self.statuses[origin, status] for origin in origins if self.statuses[origin, status]}
            by = ", ".join(f"{origin} {count}" for origin, count in counts.items())
            lines.append(f"{status:<12}{sum(counts.values()):>8}   {by}")
        lines += [f"{'slowest':<12}{seconds:>7.2f}s   {what}" for seconds, what in self.slowest]
        lines += [f"{'left open':<12}{count:>8}   {what}" for what, count in sorted(self.left_open.items())]
        lines += [f"{'grown':<12}{size:>8.0f}   bytes per request, {which}" for which, size in self.grown.items()]
        lines.append(f"{'faults':<12}{len(self.faults):>8}   and {len(self.errors)} errors in the log")
        lines += [f"  {fault}" for fault in [*self.faults[:20], *self.errors[:10]]]
        return "\n".join(lines)


def models() -> list[FakeModel]:
    """Of every kind: at rest, small, of other tasks, asleep and failed."""
    every = {"limits": RequestLimits(wait_s=1.0, hold_s=0.05)}
    asleep, broken = model("asleep", replicas=0, **every), model("broken", replicas=0, **every)
    asleep.state, broken.state = State.ASLEEP, State.FAILED
    return [
        model("chat", replicas=2, also_known_as=("org/chat",)),
        model("narrow", slots=2, script=FakeScript(token_interval_s=0.001)),
        model("embed", script=FakeScript(tasks=("embed",))),
        model("rank", script=FakeScript(tasks=("score",))),
        model("whisper", script=FakeScript(tasks=("transcription",))),
        asleep,
        broken,
    ]


def settings(keys_file: Path | None) -> GatewaySettings:
    names = {
        "capped": Name(to="chat", defaults={"temperature": 0.1, "seed": 7}, max_tokens=5),
        "either": Name(to={"chat": 3, "narrow": 1}, defaults={"max_tokens": 6}),
        "stand-in": Name(to="asleep", fallback=("broken", "chat")),
    }
    if keys_file is None:
        return GatewaySettings(max_body_mb=1.0, names=names)
    return GatewaySettings(max_body_mb=1.0, names=names, keys_file=str(keys_file), cors_origins=("*",))


async def run(requests: int, seed: int, folder: Path, progress: bool = False) -> Outcome:
    """Half of ``requests`` at a gateway without keys, half at one with them."""
    outcome = Outcome()
    began = time.monotonic()
    keys_file = folder / "keys.yaml"
    team = {"name": "team", "hash": keys.hash_of(TEAM), "models": ["chat", "embed"], "max_concurrent": 1}
    keys_file.write_text(yaml.safe_dump({"keys": [team, {"name": "full", "hash": keys.hash_of(FULL)}]}))
    async with yard() as y:
        document = (await y.client.get("/openapi.json")).json()
    made = documented.cases(document, MODELS, int(requests * DOCUMENTED), seed)
    for half, (file, which) in enumerate(((None, "without keys"), (keys_file, "with keys"))):
        before = _open_things()
        share = requests // 2 if half else requests - requests // 2
        with _errors(outcome):
            async with yard(*models()) as y:
                y.relay.settings = settings(file)
                mutations = Mutations(Random(seed + half), (FULL, TEAM) if file else ())
                half_made = [mutations.with_key(case) for case in made[half::2]]
                mutated = itertools.islice(mutations, share - len(half_made))
                await _round(y, itertools.chain(half_made, mutated), share, outcome, which, progress)
            gc.collect()  # a task's exception that nobody fetched is logged when the task goes
        await _settled(before, outcome, "after the gateway's end")
    outcome.seconds = time.monotonic() - began
    return outcome


async def _round(y: Yard, cases: Iterable[Case], requests: int, outcome: Outcome, which: str, progress: bool) -> None:
    y.server._server.config.timeout_keep_alive = 1  # so long uvicorn keeps what a client left that reset its connection
    await _ask_all(y, itertools.islice(Mutations(Random(0)), WARM_UP), Outcome())
    _make_series(y)
    await y.quiet()
    before = _open_things()
    gc.collect()
    tracemalloc.start()  # counts what is made from now on, so what is left of it is what is more
    await _ask_all(y, cases, outcome, progress)
    try:
        await y.quiet()
    except TimeoutError:
        outcome.left_open["not quiet: leases, waiting or running"] += 1
    for fake in y.models.values():
        for what, count in (fake.pool.report() if fake.pool else {}).items():
            outcome.left_open[f"{what} of a pool"] += count if what != "pulses" else 0
    outcome.left_open["open requests of a key"] += sum(y.relay._open.values())
    await _settled(before, outcome, "after the requests")
    outcome.grown[which] = max(0.0, await _growth() - CACHES) / requests
    tracemalloc.stop()


def _make_series(y: Yard) -> None:
    """Of the histograms: kilobytes for each model and route, once, however many requests come."""
    for metric in (metric for metric in ALL if metric.kind == "histogram"):
        for name in (*y.models, OTHER):
            for path in (*BY_PATH, GENERATE):
                y.relay._note(metric, name, path)


async def _growth() -> float:
    """Bytes that were taken since ``tracemalloc`` began and are not given back, once they become no fewer."""
    least = float("inf")
    while True:
        await asyncio.sleep(2)
        gc.collect()
        now = tracemalloc.get_traced_memory()[0]
        if now >= least * 0.95:
            return min(now, least)
        least = now


async def _ask_all(y: Yard, cases: Iterable[Case], outcome: Outcome, progress: bool = False) -> None:
    left = iter(cases)

    async def client() -> None:
        for case in left:
            outcome.note(case, await ask(y.port, case, BOUND_S))
            if progress and outcome.requests % 1000 == 0:
                print(f"{outcome.requests} requests, {len(outcome.faults)} faults", flush=True)

    async with asyncio.TaskGroup() as clients:
        for _ in range(CLIENTS):
            clients.create_task(client())


def _open_things() -> Counter[str]:
    return Counter({"tasks": len(asyncio.all_tasks()), "file descriptors": len(os.listdir("/proc/self/fd"))})


async def _settled(before: Counter[str], outcome: Outcome, when: str) -> None:
    """No more is open than ``before``, within a few seconds."""
    until = time.monotonic() + 5
    while (more := _open_things() - before) and time.monotonic() < until:
        await asyncio.sleep(0.05)
    for what, count in (more or Counter({"tasks": 0, "file descriptors": 0})).items():
        outcome.left_open[f"{what} {when}"] += count


@contextmanager
def _errors(outcome: Outcome) -> Iterator[None]:
    """What the process logs as an error meanwhile is kept in ``outcome``."""

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            outcome.errors.append(logging.Formatter().format(record)[-2000:])

    keep = Keep(logging.ERROR)
    loggers = [logging.getLogger(name) for name in _LOGS]
    for logger in loggers:
        logger.addHandler(keep)
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)  # each fallback is a line, and pytest keeps them all
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
            logger.removeHandler(keep)
