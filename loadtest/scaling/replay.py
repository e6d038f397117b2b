"""The loop: every tick requests arrive, engines run, and each model's system says how many replicas it wants."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from loadtest.scaling.engine import Request
from loadtest.scaling.fleet import Fleet, ModelSpec, Pool
from loadtest.scaling.systems import System

TICK_S = 0.1  # Serve's control loop
SAMPLE_S = 10.0


class Sample(NamedTuple):
    at_s: float
    wanted: int
    running: int
    held: int


@dataclass
class Run:
    """What one system did with one model. ``samples``: every ``SAMPLE_S``. ``wanted``: (s, replicas) at every change.
    ``gpu_s``: while requests arrive."""

    spec: ModelSpec
    requests: Sequence[Request]
    gpu_s: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    wanted: list[tuple[float, int]] = field(default_factory=list)


def replay(
    models: Mapping[ModelSpec, Sequence[Request]],
    system: Callable[[Fleet], System],
    *,
    gpus: int,
    seconds: float,
    seed: int = 0,
    tick_s: float = TICK_S,
) -> dict[str, Run]:
    """Replay ``models``' requests (in order of arrival; they are filled in) on ``gpus`` shared GPUs for ``seconds``,
    and on until every request has ended."""
    pool = Pool(gpus)
    lanes = []
    for number, (spec, requests) in enumerate(models.items()):
        fleet = Fleet(spec, pool, Random(seed * 1000 + number))
        lane = _Lane(fleet, system(fleet), Run(spec, requests))
        fleet.begin(lane.system.first)
        lanes.append(lane)
    tick = 0
    while (now := tick * tick_s) < seconds or any(lane.open for lane in lanes):
        # Free GPUs go to whoever asks first: take turns.
        first = tick % len(lanes)
        for lane in lanes[first:] + lanes[:first]:
            lane.tick(now, tick_s, counted=now < seconds)
        tick += 1
    return {lane.run.spec.name: lane.run for lane in lanes}


@dataclass
class _Lane:
    fleet: Fleet
    system: System
    run: Run
    arrived: int = 0

    @property
    def open(self) -> bool:
        return self.fleet.ended + self.fleet.refused < len(self.run.requests)

    def tick(self, now: float, tick_s: float, counted: bool) -> None:
        fleet, run, until = self.fleet, self.run, now + tick_s
        while self.arrived < len(run.requests) and run.requests[self.arrived].at_s < until:
            fleet.arrive(run.requests[self.arrived])
            self.arrived += 1
        fleet.advance(now, tick_s)
        before = fleet.wanted
        wanted = self.system.wanted(until)
        if wanted != before or fleet.placed != wanted:
            fleet.scale(wanted, until)
        if not counted:
            return
        run.gpu_s = fleet.gpu_s
        if wanted != before or not run.wanted:
            run.wanted.append((until, wanted))
        if now >= len(run.samples) * SAMPLE_S:
            run.samples.append(Sample(until, wanted, len(fleet.running), len(fleet.held)))
