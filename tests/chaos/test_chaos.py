"""Everything that can end ends, in the middle of everything: on real Ray Serve behind HAProxy, scripted engine."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from tests.chaos.run import Outcome, Plan, chaos
from tests.serve.cluster import Cluster, cluster

# Losses in the message of a run that failed; the file has all of them.
SHOWN = 20


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster of its own; it fails if a process survives its end."""
    with cluster(tmp_path, haproxy=True) as running:
        yield running


@pytest.mark.serve
def test_a_short_run(yard: Cluster) -> None:
    """Each kind of fault at least once under 16 clients: nothing hangs, is cut, wrong, leaked or left behind, and 99 %
    of what could be finished elsewhere is."""
    _passes(_run(yard, Plan(seed=1, requests=120, clients=16)))


@pytest.mark.chaos
def test_a_long_run(yard: Cluster) -> None:
    """The same with 1,000 requests from 64 clients, and faults until the last one was sent."""
    outcome = _run(yard, Plan(seed=int(os.environ.get("SEED", "1")), requests=1000, clients=64))
    if folder := os.environ.get("RESULTS"):
        print(outcome.save(Path(folder)))
    _passes(outcome)


def _run(yard: Cluster, plan: Plan) -> Outcome:
    started = time.monotonic()

    def tell(what: str) -> None:
        print(f"{time.monotonic() - started:5.0f} s  {what}", flush=True)

    outcome = chaos(yard, plan, tell)
    Console(file=sys.stdout, width=100).print(outcome.table())
    return outcome


def _passes(outcome: Outcome) -> None:
    assert outcome.faults == [], "\n".join([*outcome.faults, *outcome.tally.examples[:SHOWN]])
