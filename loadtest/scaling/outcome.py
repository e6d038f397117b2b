"""What a replay comes to: requests that missed their objective, GPU-hours, changes of direction."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from loadtest.scaling.engine import Request
from loadtest.scaling.replay import SAMPLE_S, Run

# Time to the first token: so much, and so much per prompt token. And the mean time between tokens.
TTFT_S = 2.0
TTFT_PROMPT_TOKEN_S = 0.5e-3
TPOT_S = 0.1
# A system that starts from the bounds' lower end needs so long to know its load: counted, and also left out.
SETTLED_AFTER_S = 600.0


def late(request: Request) -> bool:
    """Its first token came too late, or it was refused."""
    return request.first_s is None or request.first_s - request.at_s > TTFT_S + TTFT_PROMPT_TOKEN_S * request.prompt


def slow(request: Request) -> bool:
    """Its tokens came too slowly."""
    if request.first_s is None or request.ended_s is None or request.output < 2:
        return False
    return request.ended_s - request.first_s > TPOT_S * (request.output - 1)


@dataclass(frozen=True)
class Outcome:
    """All models of one replay together. Counts of requests; ``settled`` ones arrived after ``SETTLED_AFTER_S``.
    ``flaps``: changes of direction in what was wanted."""

    requests: int
    misses: int
    refused: int
    slow: int
    settled: int
    settled_misses: int
    gpu_hours: float
    flaps: int


def outcome(runs: Iterable[Run]) -> Outcome:
    runs = list(runs)
    requests = [request for run in runs for request in run.requests]
    settled = [request for request in requests if request.at_s >= SETTLED_AFTER_S]
    return Outcome(
        requests=len(requests),
        misses=sum(map(late, requests)),
        refused=sum(request.refused for request in requests),
        slow=sum(map(slow, requests)),
        settled=len(settled),
        settled_misses=sum(map(late, settled)),
        gpu_hours=sum(run.gpu_s for run in runs) / 3600,
        flaps=sum(turns([wanted for _, wanted in run.wanted]) for run in runs),
    )


def turns(wanted: Sequence[int]) -> int:
    """How often the direction changes."""
    ways = [b > a for a, b in pairwise(wanted) if a != b]
    return sum(a != b for a, b in pairwise(ways))


@dataclass(frozen=True)
class Series:
    """One replay over time, all models together, per ``SAMPLE_S``: requests/s that arrived, the work in them in
    replicas, replicas wanted and running, requests that missed their objective (by when they arrived)."""

    arrivals: list[float]
    work: list[float]
    wanted: list[int]
    running: list[int]
    misses: list[int]


def series(runs: Mapping[str, Run], seconds: float) -> Series:
    bins = int(seconds / SAMPLE_S)
    arrivals, work, missed = [0.0] * bins, [0.0] * bins, [0] * bins
    wanted, running = [0] * bins, [0] * bins
    for run in runs.values():
        for request in run.requests:
            at = min(bins - 1, int(request.at_s / SAMPLE_S))
            arrivals[at] += 1 / SAMPLE_S
            work[at] += _gpu_s(run, request) / SAMPLE_S
            missed[at] += late(request)
        for at, sample in enumerate(run.samples[:bins]):
            wanted[at] += sample.wanted
            running[at] += sample.running
    return Series([round(x, 2) for x in arrivals], [round(x, 3) for x in work], wanted, running, missed)


def _gpu_s(run: Run, request: Request) -> float:
    """What a request costs a full engine."""
    spec = run.spec.engine
    context = request.prompt + request.output / 2
    token_s = spec.step_s / spec.slots + spec.sequence_s + spec.kv_token_s * context
    return spec.prompt_token_s * request.prompt + token_s * request.output
