"""Where requests that begin alike should go: the gateway's strategies side by side, on replicas with modelled caches.

    python -m loadtest.prefix_routing

A simulation, seeded: no cluster, no clock, the gateway's own ``serve_app.routing``. Replayed are a synthetic trace of
conversations and, where ``MODELYARD_TRACES`` names a folder that has it, one of production: the conversation trace of
Mooncake (https://github.com/kvcache-ai/Mooncake, FAST25-release/traces; 12,031 requests within an hour, with a hash of
every 512 tokens of their prompts).

The model of a replica:

* Its cache keeps ``blocks`` blocks of 512 tokens, and drops what was used longest ago. Only prompts go in.
* It computes prompts one after the other at ``prefill_s`` tokens per second; tokens in the cache cost nothing.
* Each answer then takes ``token_s`` per token, however many run. There is no limit to how many.

Load is requests in flight. Each of several gateways counts only its own, and hears ``told_s`` late which prefixes the
others sent where. The bound is one cache of all blocks together.
"""

import heapq
import itertools
import json
import os
import statistics
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from serve_app.prefixes import MOST_BLOCKS, Prefix
from serve_app.routing import OVER_MEAN, STRATEGIES, Ranking

TRACES = "MODELYARD_TRACES"
MOONCAKE = "mooncake_conversation.jsonl"
BLOCK = 512
GOAL_SHARE = 0.9
# The trace as published is what four replicas get; more replicas get it faster, so that each has as much to do.
REPLICAS_AT_SPEED_1 = 4

# Of the synthetic trace: applications with a system prompt each, the first ones used most; conversations of several
# turns, each of which has the whole conversation as its prompt. Lengths in tokens are log-normal: median and sigma.
APPLICATIONS, SYSTEM_BLOCKS = 8, (1, 24)
TURNS, THINK_S = 5.0, 45.0
# Conversations begin so long before the trace does, so that from its first second on all ages of them are there.
AGE_S = 5 * TURNS * THINK_S
QUESTION, QUESTION_SIGMA = 250.0, 1.2
ANSWER, ANSWER_SIGMA, ANSWER_MOST = 200.0, 0.8, 2000


@dataclass(frozen=True, slots=True)
class Request:
    """``prompt`` and ``answer`` in tokens. ``blocks``: ids of the prompt's, each of all text up to its end."""

    at: float
    prompt: int
    answer: int
    blocks: tuple[int, ...]

    @property
    def prefix(self) -> Prefix:
        """As the gateway would see it: the beginning."""
        blocks = self.blocks[:MOST_BLOCKS]
        return Prefix(blocks, tuple(range(1, len(blocks) + 1)))


@dataclass(frozen=True)
class Fleet:
    replicas: int
    gateways: int
    blocks: int
    prefill_s: float = 25_000.0
    token_s: float = 0.02
    told_s: float = 0.5


@dataclass(frozen=True)
class Outcome:
    """``hit_rate``: of prompt tokens. ``load_ratio``: requests in flight of the busiest replica over the mean, averaged
    over the whole replay; ``load_ratio_p99``: of that ratio at each request. ``ttft_p50_s``, ``ttft_p99_s``: modelled.
    None where one cache, and no replicas, was replayed."""

    trace: str
    fleet: Fleet
    strategy: str
    hit_rate: float
    share: float
    load_ratio: float | None = None
    load_ratio_p99: float | None = None
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None

    @property
    def met(self) -> bool:
        return self.share >= GOAL_SHARE and (self.load_ratio or 0.0) <= OVER_MEAN


class Cache:
    """Blocks, the least recently used goes first."""

    def __init__(self, blocks: int) -> None:
        self._most = blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def use(self, request: Request) -> int:
        """How many of the prompt's tokens are in it; afterwards all are. The last token is always computed."""
        hits = next((i for i, block in enumerate(request.blocks) if block not in self._blocks), len(request.blocks))
        for block in reversed(request.blocks):  # as in vLLM, the end of a prompt goes before its beginning
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)
        return min(hits * BLOCK, request.prompt - 1)


def synthetic(rate: float, seconds: float, seed: int) -> list[Request]:
    """Conversations, ``rate`` requests per second on average."""
    random = Random(seed)
    ids = itertools.count()
    systems = [[next(ids) for _ in range(random.randint(*SYSTEM_BLOCKS))] for _ in range(APPLICATIONS)]
    weights = [1 / (1 + i) for i in range(APPLICATIONS)]
    requests: list[Request] = []
    begin = -AGE_S
    while (begin := begin + random.expovariate(rate / TURNS)) < seconds:
        blocks = list(random.choices(systems, weights)[0])
        at, tokens = begin, len(blocks) * BLOCK
        while at < seconds:
            tokens += max(1, round(QUESTION * random.lognormvariate(0, QUESTION_SIGMA)))
            answer = min(ANSWER_MOST, max(1, round(ANSWER * random.lognormvariate(0, ANSWER_SIGMA))))
            blocks += (next(ids) for _ in range(tokens // BLOCK - len(blocks)))
            if at >= 0:
                requests.append(Request(at, tokens, answer, tuple(blocks)))
            tokens += answer
            at += random.expovariate(1 / THINK_S)
            if random.random() < 1 / TURNS:
                break
    return sorted(requests, key=lambda request: request.at)


def mooncake(file: Path) -> list[Request]:
    with file.open() as lines:
        rows = map(json.loads, lines)
        return [
            Request(row["timestamp"] / 1000, row["input_length"], row["output_length"], tuple(row["hash_ids"]))
            for row in rows
        ]


def faster(requests: Iterable[Request], speed: float) -> list[Request]:
    return [Request(r.at / speed, r.prompt, r.answer, r.blocks) for r in requests]


def one_cache(trace: str, requests: Sequence[Request], fleet: Fleet) -> Outcome:
    """The bound: nothing is in two places, and nobody has to choose."""
    cache = Cache(fleet.replicas * fleet.blocks)
    hits = sum(map(cache.use, requests))
    return Outcome(trace, fleet, "one big cache", hits / sum(r.prompt for r in requests), 1.0)


class Replay:
    """One trace on one fleet."""

    def __init__(self, fleet: Fleet, strategy: str, seed: int = 1) -> None:
        names = [f"r{i}" for i in range(fleet.replicas)]
        self._fleet = fleet
        self._random = Random(seed)
        self._rankings = [Ranking(strategy) for _ in range(fleet.gateways)]
        self._loads = [dict.fromkeys(names, 0) for _ in range(fleet.gateways)]  # as each gateway counts them
        self._caches = {name: Cache(fleet.blocks) for name in names}
        self._free_at = dict.fromkeys(names, 0.0)  # when its prompts will all be computed
        self._busy_s = dict.fromkeys(names, 0.0)  # of all its requests together
        self._ends: list[tuple[float, int, str]] = []
        self._news: deque[tuple[float, int, str, Prefix]] = deque()

    def run(self, trace: str, strategy: str, requests: Sequence[Request], bound: Outcome) -> Outcome:
        ratios, ttfts, hits = [], [], 0
        for request in requests:
            self._until(request.at)
            hit, ttft = self._serve(request)
            hits += hit
            ttfts.append(ttft)
            ratios.append(_over_mean([sum(loads[name] for loads in self._loads) for name in self._caches]))
        rate = hits / sum(r.prompt for r in requests)
        return Outcome(
            trace,
            self._fleet,
            strategy,
            rate,
            rate / bound.hit_rate,
            _over_mean(list(self._busy_s.values())),
            _percentile(ratios, 99),
            _percentile(ttfts, 50),
            _percentile(ttfts, 99),
        )

    def _until(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            _, gateway, replica = heapq.heappop(self._ends)
            self._loads[gateway][replica] -= 1
        while self._news and self._news[0][0] <= now - self._fleet.told_s:
            _, teller, replica, prefix = self._news.popleft()
            for gateway, ranking in enumerate(self._rankings):
                if gateway != teller:
                    ranking.given(replica, prefix.hashes, self._loads[gateway])

    def _serve(self, request: Request) -> tuple[int, float]:
        """Tokens found in the cache, and the time to the first token."""
        gateway = self._random.randrange(self._fleet.gateways)
        ranking, loads, prefix = self._rankings[gateway], self._loads[gateway], request.prefix
        replica = ranking.rank(loads, prefix)[0]
        ranking.given(replica, prefix.hashes, loads)
        if self._fleet.gateways > 1:
            self._news.append((request.at, gateway, replica, prefix))
        loads[replica] += 1
        hit = self._caches[replica].use(request)
        first = max(request.at, self._free_at[replica]) + (request.prompt - hit) / self._fleet.prefill_s
        end = first + request.answer * self._fleet.token_s
        self._free_at[replica] = first
        self._busy_s[replica] += end - request.at
        heapq.heappush(self._ends, (end, gateway, replica))
        return hit, first - request.at


def _over_mean(values: Sequence[float]) -> float:
    return max(values) / statistics.fmean(values)


def _percentile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


Trace = Callable[[int], list[Request]]  # of so many replicas


def outcomes(traces: dict[str, Trace], fleets: Sequence[Fleet]) -> Iterator[Outcome]:
    """Every trace on every fleet under every strategy, the bound of each first."""
    for name, trace in traces.items():
        for replicas, group in itertools.groupby(fleets, key=lambda fleet: fleet.replicas):
            requests = trace(replicas)
            for number, fleet in enumerate(group):
                bound = one_cache(name, requests, fleet)
                if not number:
                    yield bound
                for strategy in STRATEGIES:
                    yield Replay(fleet, strategy).run(name, strategy, requests, bound)


def table(found: Sequence[Outcome]) -> Table:
    fleet = found[0].fleet
    shown = Table(
        title=f"Routing by prefix, a simulation: per replica a cache of {fleet.blocks:,} blocks of {BLOCK} tokens, "
        f"{fleet.prefill_s:,.0f} prompt tokens/s, {fleet.token_s:g} s per token",
        caption=f"goal: {GOAL_SHARE:g} of one big cache's hit rate or more, max/mean load {OVER_MEAN:g} or less\n"
        "max/mean load: requests in flight, over the whole replay; p99: of what each request met\n"
        f"gateways hear {fleet.told_s:g} s late what the others sent where",
    )
    shown.add_column("trace", no_wrap=True)
    for name in ("replicas", "gateways"):
        shown.add_column(name, justify="right")
    shown.add_column("strategy", no_wrap=True)
    for name in ("hit rate", "of one big", "max/mean load", "p99", "TTFT p50 s", "TTFT p99 s", "goal"):
        shown.add_column(name, justify="right", no_wrap=True)
    section = None
    for one in found:
        if section not in (None, (one.trace, one.fleet.replicas)):
            shown.add_section()
        section = (one.trace, one.fleet.replicas)
        shown.add_row(
            one.trace,
            str(one.fleet.replicas),
            "" if one.load_ratio is None else str(one.fleet.gateways),
            one.strategy,
            f"{one.hit_rate:.3f}",
            f"{one.share:.2f}",
            *("" if v is None else f"{v:.2f}" for v in (one.load_ratio, one.load_ratio_p99)),
            *("" if v is None else f"{v:.2f}" for v in (one.ttft_p50_s, one.ttft_p99_s)),
            "" if one.load_ratio is None else "[green]met[/]" if one.met else "[red]not met[/]",
        )
    return shown


def main(
    blocks: Annotated[int, typer.Option(min=1, help=f"Blocks of {BLOCK} tokens in a replica's cache.")] = 4000,
    replicas: Annotated[list[int] | None, typer.Option(min=1, help="May be repeated. Default: 4 and 16.")] = None,
    gateways: Annotated[list[int] | None, typer.Option(min=1, help="May be repeated. Default: 1 and 4.")] = None,
    prefill_s: Annotated[float, typer.Option(min=1, help="Prompt tokens per second of a replica.")] = 25_000.0,
    token_s: Annotated[float, typer.Option(min=0, help="Seconds per token of an answer.")] = 0.02,
    told_s: Annotated[float, typer.Option(min=0, help="How late gateways hear of each other; inf: never.")] = 0.5,
    rate: Annotated[float, typer.Option(min=0.01, help="Synthetic requests per second and replica.")] = 1.5,
    seconds: Annotated[float, typer.Option(min=1, help="Length of the synthetic trace.")] = 900.0,
    seed: Annotated[int, typer.Option(help="Of the synthetic trace.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per row instead of the table.")] = False,
) -> None:
    """Replay conversations under every strategy and print hit rates, balance and modelled latencies side by side."""
    traces: dict[str, Trace] = {"synthetic": lambda n: synthetic(rate * n, seconds, seed)}
    console = Console(width=None if Console().is_terminal else 140)
    messages = Console(stderr=True)
    folder = os.environ.get(TRACES)
    if folder and (file := Path(folder) / MOONCAKE).exists():
        published = mooncake(file)
        traces["Mooncake"] = lambda n: faster(published, n / REPLICAS_AT_SPEED_1)
    else:
        messages.print(f"{TRACES} names no folder with {MOONCAKE}, so that trace is left out")
    fleets = [
        Fleet(n, g, blocks, prefill_s, token_s, told_s)
        for n in sorted(set(replicas or (4, 16)))
        for g in sorted(set(gateways or (1, 4)))
    ]
    sizes = len({fleet.replicas for fleet in fleets})
    found: list[Outcome] = []
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=messages) as progress:
        bar = progress.add_task("replays", total=len(traces) * (len(fleets) * len(STRATEGIES) + sizes))
        for one in outcomes(traces, fleets):
            found.append(one)
            progress.update(bar, advance=1, description=f"replays ({one.trace}, {one.fleet.replicas} replicas)")
    if as_json:
        for one in found:
            print(json.dumps(asdict(one) | {"rate": rate, "seconds": seconds, "seed": seed}))
    else:
        console.print(table(found))


if __name__ == "__main__":
    typer.run(main)
