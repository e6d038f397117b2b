"""What arrives: synthetic traces, seeded, and the two that Azure published of its LLM services.

The Azure traces are AzureLLMInferenceDataset2023 of github.com/Azure/AzurePublicDataset (CC BY 4.0): arrival time,
prompt and generated tokens of a chat and of a code-completion service in the same hour, 19,366 and 8,819 requests.
They are found in the folder that ``MODELYARD_TRACES`` names.
"""

import csv
import math
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from random import Random

from loadtest.scaling.engine import Request

AZURE = {"chat": "azure_llm_2023_conv.csv", "code": "azure_llm_2023_code.csv"}

# Synthetic lengths in tokens, log-normal: median and sigma, cut at the longest. Near those of Azure's chat trace.
PROMPT, PROMPT_SIGMA, PROMPT_MOST = 900.0, 0.7, 8000
OUTPUT, OUTPUT_SIGMA, OUTPUT_MOST = 130.0, 0.9, 1000


def synthetic(rate: Callable[[float], float], seconds: float, seed: int) -> list[Request]:
    """Arrivals at random with ``rate(second)`` requests per second."""
    random = Random(seed)
    highest = max(rate(s) for s in range(math.ceil(seconds)))
    requests = []
    for at in arrivals(rate, highest, seconds, random):
        prompt = _length(random, PROMPT, PROMPT_SIGMA, PROMPT_MOST)
        requests.append(Request(at, prompt, _length(random, OUTPUT, OUTPUT_SIGMA, OUTPUT_MOST)))
    return requests


def arrivals(rate: Callable[[float], float], highest: float, seconds: float, random: Random) -> Iterator[float]:
    """Seconds at which requests come: at random, ``rate(second)`` per second, which is never more than ``highest``."""
    at = 0.0
    while (at := at + random.expovariate(highest)) < seconds:
        if random.random() * highest < rate(at):
            yield at


def _length(random: Random, median: float, sigma: float, most: int) -> int:
    return min(most, max(1, round(random.lognormvariate(math.log(median), sigma))))


def constant(rate: float) -> Callable[[float], float]:
    return lambda at: rate


def bursts(low: float, high: float, seconds: float, seed: int) -> Callable[[float], float]:
    """``low``, and ``high`` in bursts of one to five minutes, with two to twelve minutes between them."""
    random = Random(seed)
    times, at = [], 0.0
    while (at := at + random.uniform(120, 720)) < seconds:
        times.append((at, at := at + random.uniform(60, 300)))
    return lambda at: high if any(begin <= at < end for begin, end in times) else low


def ramp(low: float, high: float, seconds: float) -> Callable[[float], float]:
    """Up for half of the time, the rest in equal parts level and down."""
    points = [(0.0, low), (0.5 * seconds, high), (0.75 * seconds, high), (seconds, low)]
    return lambda at: between(points, at)


def between(points: Sequence[tuple[float, float]], at: float) -> float:
    """The value at ``at`` of the lines between ``points``, which rise in their first; beyond them the nearest one's."""
    if at <= points[0][0]:
        return points[0][1]
    for (begin, from_), (end, to) in pairwise(points):
        if at <= end:
            return from_ + (to - from_) * (at - begin) / (end - begin)
    return points[-1][1]


def diurnal(low: float, high: float, day_s: float) -> Callable[[float], float]:
    """A sine, lowest at the beginning."""
    return lambda at: low + (high - low) * (1 - math.cos(2 * math.pi * at / day_s)) / 2


def azure(folder: Path, speed: float, seconds: float) -> dict[str, list[Request]]:
    """Both traces on one clock, ``speed`` times as fast, played over and over until ``seconds``."""
    rows = {name: list(_rows(folder / file)) for name, file in AZURE.items()}
    begin = min(trace[0][0] for trace in rows.values())
    hour = 3600 / speed
    return {
        name: [
            Request(at, prompt, output)
            for turn in range(math.ceil(seconds / hour))
            for stamp, prompt, output in trace
            if (at := turn * hour + (stamp - begin) / speed) < seconds
        ]
        for name, trace in rows.items()
    }


def _rows(file: Path) -> Iterator[tuple[float, int, int]]:
    with file.open(newline="") as lines:
        for row in csv.DictReader(lines):
            # Seven digits of a second; Python takes six.
            stamp = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            yield stamp, int(row["ContextTokens"]), max(1, int(row["GeneratedTokens"]))
