"""How long a polite key waits beside a flooding one, with the gateway's queue and in order of arrival.

A simulation of one full model: no cluster, no clock, the gateway's own ``serve_app.admission``. Seeded: the same
numbers every time.
"""

import heapq
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from rich.table import Table

from serve_app.admission import FairQueue, Ticket

FLOOD, POLITE = "flood", "polite"


@dataclass(frozen=True)
class Load:
    """``slots``: requests that the model serves at once, each at ``tokens_s`` tokens per second. ``flood``: requests
    that one key always has open. The polite one has one open, pauses ``pause_s`` after each, and asks ``requests``."""

    slots: int
    tokens_s: float
    flood: int
    pause_s: float
    requests: int
    seed: int = 1


def tokens(load: Load, key: str, number: int) -> int:
    """Of one request, prompt and answer: the same under either order. Mostly some hundred, some a few thousand."""
    drawn = random.Random(f"{load.seed}/{key}/{number}").lognormvariate(6, 0.8)
    return max(1, round(drawn))


def queue_times(load: Load, ticket: Callable[[str, int], Ticket]) -> dict[str, list[float]]:
    """Seconds in the queue of each request, by key, until the polite key has had ``load.requests``.

    ``ticket(key, tokens)``: what it waits with.
    """
    queue: FairQueue[tuple[str, int]] = FairQueue()
    came: dict[tuple[str, int], float] = {}
    waited: dict[str, list[float]] = {FLOOD: [], POLITE: []}
    numbers = {FLOOD: 0, POLITE: 0}
    free = load.slots
    # (when, which event, key, whether it frees a slot; else a request comes)
    events = [(0.0, n, FLOOD, False) for n in range(load.flood)] + [(0.0, load.flood, POLITE, False)]
    ids = len(events)
    while len(waited[POLITE]) < load.requests:
        now, _, key, frees = heapq.heappop(events)
        if frees:
            free += 1
            heapq.heappush(events, (now + (load.pause_s if key == POLITE else 0.0), ids, key, False))
            ids += 1
        else:
            item = (key, numbers[key])
            numbers[key] += 1
            came[item] = now
            queue.push(ticket(key, tokens(load, *item)), item)
        while free and (served := queue.pop()) is not None:
            free -= 1
            waited[served[0]].append(now - came.pop(served))
            heapq.heappush(events, (now + tokens(load, *served) / load.tokens_s, ids, served[0], True))
            ids += 1
    return waited


def in_order_of_arrival(_key: str, _tokens: int) -> Ticket:
    """One key for all: the queue is then first come, first served."""
    return Ticket()


def fair(key: str, tokens: int) -> Ticket:
    return Ticket(key, tokens=tokens)


def table(load: Load) -> Table:
    """Seconds in the queue by key, fair and in order of arrival."""
    shown = Table(
        title=f"{load.slots} slots at {load.tokens_s:g} tokens/s; one key with {load.flood} requests open, one with a "
        "single one",
        caption="a simulation: seconds in the queue",
    )
    shown.add_column("order", no_wrap=True)
    for name in ("polite p50", "polite p95", "flood p50", "flood p95"):
        shown.add_column(name, justify="right", no_wrap=True)
    for name, ticket in (("of arrival", in_order_of_arrival), ("fair by tokens between keys", fair)):
        waited = queue_times(load, ticket)
        shown.add_row(name, *(f"{figure:.2f}" for key in (POLITE, FLOOD) for figure in _p50_p95(waited[key])))
    return shown


def _p50_p95(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return (values or [0.0])[0], (values or [0.0])[0]
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    return cuts[9], cuts[18]
