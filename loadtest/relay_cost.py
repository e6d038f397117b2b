"""What does a streamed chunk cost on its way through proxy and gateway? Modelyard against plain Ray Serve.

python -m loadtest.relay_cost --help
"""

import json
import os
import re
import tempfile
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from loadtest import streams
from loadtest.about import ROOT, about_run
from loadtest.clusters import MODEL, ClusterFault, Running, applications, cluster, cpu_s, teller
from loadtest.endings import fail, heed_signals
from loadtest.figures import GOAL_RATIO, HANDLE, MODELYARD, Round, cost, met, ratio, table, used
from loadtest.overhead.loads import client_process
from loadtest.streams import Load, StreamFault, Taken
from serve_app.local_cluster import LocalClusterError
from serve_app.ray_api import RayApiError

# What two answers to one question may differ in.
_OWN = re.compile(rb'"(id|created|system_fingerprint)":("[^"]*"|\d+),')

MODULE = "loadtest.relay_cost"
ALONE_CHUNKS = 8

console = Console(width=None if Console().is_terminal else 120)


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds of each system; a warm-up comes first.")] = 7,
    at_once: Annotated[int, typer.Option("--streams", min=1, help="Concurrent streams, one connection each.")] = 64,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks per stream.")] = 128,
    interval_ms: Annotated[float, typer.Option(min=0, help="Time between two chunks of a stream.")] = 5.0,
    passes: Annotated[int, typer.Option(min=1, help="Streams after each other on each connection.")] = 1,
    alone: Annotated[int, typer.Option(min=1, help="Streams one at a time, per round, for the TTFT.")] = 20,
    out: Annotated[
        Path | None, typer.Option(help="Raw values, as JSON. Default: a dated file in loadtest/results.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Exit 1 where the goal is not met.")] = False,
) -> None:
    """CPU time of proxy and gateway per 1,000 streamed chunks: Modelyard against
    plain Ray Serve.

    Two private Ray clusters run on this machine, side by side. One is
    Modelyard (HAProxy, gateway, the replica's own HTTP port), the other is
    Serve as it comes (its Python proxy, a FastAPI ingress, a
    DeploymentHandle). Both stream the same bytes from the same scripted
    engine. They take turns, round by round; a client process applies the
    load.

    CPU time (user and system) is read from the operating system before and
    after each round, of every process that has to do with proxying or the
    gateway. The engine's replica and the client are not counted.

    Takes about two minutes, two cores and 3 GB. Exits 2 where a stream broke:
    then there are no figures.
    """
    heed_signals()
    out = out or ROOT / "loadtest" / "results" / f"relay-cost-{datetime.now(UTC):%Y-%m-%dT%H%M}.json"
    asked = {"streams": at_once, "chunks": chunks, "interval_ms": interval_ms, "passes": passes, "alone": alone}
    about = about_run(MODULE) | {"load": asked}
    load = Load(0, MODEL, at_once, chunks, interval_ms / 1000, passes)
    try:
        taken = measure(load, rounds, alone)
    except KeyboardInterrupt:
        fail(console, MODULE, "interrupted; nothing was written", 130)
    except (StreamFault, ClusterFault, LocalClusterError, RayApiError) as error:
        fail(console, MODULE, str(error), 2)
    console.print(table(taken, f"{at_once} streams × {chunks} chunks at {interval_ms:g} ms"))
    write(out, about, taken)
    console.print(f"Raw values: {os.path.relpath(out)}", soft_wrap=True, highlight=False)
    if check and not met(taken):
        raise typer.Exit(1)


def measure(load: Load, rounds: int, alone: int) -> list[Round]:
    """Start both systems and take ``rounds`` of each, in turn."""
    taken: list[Round] = []
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="relay-cost-")))
        pool = stack.enter_context(client_process())
        running = []
        for system in (MODELYARD, HANDLE):
            folder, wanted = home / system.key, applications(system, load.streams)
            running.append(stack.enter_context(cluster(system, folder, wanted, teller(console, system.title))))
        bodies = {_OWN.sub(b"", pool.submit(streams.body, _on(load, one)).result()) for one in running}
        if len(bodies) != 1:
            raise ClusterFault(f"the systems answer differently: {[body[:300] for body in bodies]}")
        for number in range(rounds + 1):
            # Always in this order: so a gateway has given its idle leases back before each of its rounds, and every
            # round pays for its leases.
            for one in running:
                done = take_round(one, pool, load, alone)
                what = f"round {number} of {rounds}" if number else "warm-up"
                cpu = done.cpu_ms_per_1000(one.system.counted)
                rate = f"{done.chunks_per_s:,.0f} chunks/s"
                console.print(f"{what}, {one.system.title}: {cpu:.1f} ms per 1,000 chunks, {rate}", highlight=False)
                if number:
                    taken.append(done)
    return taken


def take_round(one: Running, pool: Executor, load: Load, alone: int) -> Round:
    load = _on(load, one)
    busy = os.getloadavg()[0]
    watched = one.watched()
    roles = {pid: role for pid, (_, role) in watched.items()}
    before = cpu_s(watched)
    many: Taken = pool.submit(streams.run, load).result()
    after = cpu_s(watched)
    single = Load(load.port, load.model, 1, ALONE_CHUNKS, load.interval_s, alone)
    few: Taken = pool.submit(streams.run, single).result()
    try:
        seconds = used(before, after, roles)
    except KeyError as error:
        raise ClusterFault(f"{one.system.title}: a process ended in the middle of a round: {error.args[0]}") from None
    return Round(one.system.key, load.total, many.seconds, seconds, many.ttft_s, few.ttft_s, busy)


def _on(load: Load, one: Running) -> Load:
    return Load(one.port, load.model, load.streams, load.chunks, load.interval_s, load.passes)


def write(out: Path, about: dict[str, Any], taken: list[Round]) -> None:
    summary = {
        system.key: {"cpu_ms_per_1000_chunks": asdict(cost(taken, system)), "counted": system.counted}
        for system in (MODELYARD, HANDLE)
    }
    verdict = {"ratio": ratio(taken), "goal": GOAL_RATIO, "met": met(taken)}
    record = about | {"summary": summary | verdict, "rounds": [asdict(one) for one in taken]}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
