"""Many open streams on one gateway replica: its memory, and how long a further request waits for its first token.

python -m loadtest.many_streams --help
"""

import asyncio
import json
import os
import resource
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import psutil
import typer
import uvloop
from rich.console import Console
from rich.table import Table

from loadtest import streams
from loadtest.about import ROOT, about_run
from loadtest.clusters import MODEL, ClusterFault, Running, applications, cluster, teller
from loadtest.endings import fail, heed_signals
from loadtest.figures import MODELYARD, percentile
from loadtest.overhead.loads import client_process
from loadtest.streams import Load, StreamFault
from serve_app.gateway.upstream import Connection, ConnectionBroken
from serve_app.local_cluster import LocalClusterError
from serve_app.ray_api import RayApiError

MODULE = "loadtest.many_streams"
# Roles whose memory is told.
GATEWAY, PROXY, REPLICA = "gateway replica", "HAProxy", "engine replica"
SLACK_S = 120.0

console = Console(width=None if Console().is_terminal else 120)


@dataclass(frozen=True)
class Plan:
    """``count`` streams, ``per_s`` opened a second, each with an event every ``interval_s``; all of them stay open for
    ``hold_s``, in which ``probes`` further requests are sent one by one."""

    count: int
    per_s: float
    interval_s: float
    hold_s: float
    probes: int

    def chunks(self, number: int) -> int:
        """Events of stream ``number``: all streams end at about the same time."""
        left_s = (self.count - number) / self.per_s + self.hold_s
        return max(1, round(left_s / self.interval_s))


@dataclass(frozen=True)
class Waits:
    """Seconds to the first token: of requests alone, of the streams while they were opened, and of requests beside all
    of them. ``open_s``: how long all streams were open."""

    alone: Sequence[float]
    opening: Sequence[float]
    beside: Sequence[float]
    open_s: float


def apply(port: int, plan: Plan) -> Waits:
    """The client. Raises ``StreamFault`` where a stream was refused, cut or incomplete."""
    waits: Waits = uvloop.run(_apply(port, plan))
    return waits


async def _apply(port: int, plan: Plan) -> Waits:
    probe = Load(port, MODEL, 1, 1, 0.0)

    async def probes() -> list[float]:
        found = []
        connection = await Connection.open("127.0.0.1", port)
        try:
            for _ in range(plan.probes):
                found.append((await streams.stream(connection, probe))[0])
                await asyncio.sleep(plan.hold_s / 2 / plan.probes)
        finally:
            connection.close()
        return found

    async def one(number: int) -> float:
        connection = await Connection.open("127.0.0.1", port)
        try:
            load = Load(port, MODEL, 1, plan.chunks(number), plan.interval_s)
            return (await streams.stream(connection, load))[0]
        finally:
            connection.close()

    alone = await probes()
    begin = time.perf_counter()
    opened = []
    try:
        async with asyncio.timeout(plan.count / plan.per_s + plan.hold_s + SLACK_S):
            for number in range(plan.count):
                opened.append(asyncio.create_task(one(number)))
                await asyncio.sleep(begin + (number + 1) / plan.per_s - time.perf_counter())
            all_open = time.perf_counter()
            beside = await probes()
            if over := [task for task in opened if task.done()]:
                over[0].result()
                raise StreamFault(f"{len(over)} streams were over too soon: were all of them accepted?")
            open_s = time.perf_counter() - all_open
            return Waits(alone, await asyncio.gather(*opened), beside, open_s)
    except TimeoutError:
        raise StreamFault("the streams were not over in time") from None
    except ConnectionBroken as error:
        raise StreamFault(f"a stream was cut: {error}") from error
    finally:
        for task in opened:
            task.cancel()
        await asyncio.gather(*opened, return_exceptions=True)


def memory(one: Running) -> dict[str, int]:
    """Resident bytes by role."""
    sums: dict[str, int] = {GATEWAY: 0, PROXY: 0, REPLICA: 0}
    for process, role in one.watched().values():
        if role in sums:
            try:
                sums[role] += process.memory_info().rss
            except psutil.Error:
                continue
    return sums


def measure(plan: Plan) -> tuple[dict[str, int], dict[str, int], Waits]:
    """Memory before, the most of it while streams were open, and what requests waited."""
    wanted = applications(MODELYARD, plan.count + 8)
    with (
        tempfile.TemporaryDirectory(prefix="many-streams-") as home,
        client_process() as pool,
        cluster(MODELYARD, Path(home), wanted, teller(console, MODELYARD.title)) as one,
    ):
        before = most = memory(one)
        applied = pool.submit(apply, one.port, plan)
        while not applied.done():
            time.sleep(1)
            now = memory(one)
            most = {role: max(most[role], now[role]) for role in most}
        return before, most, applied.result()


def table(plan: Plan, before: Mapping[str, int], most: Mapping[str, int], waits: Waits) -> Table:
    shown = Table(title=f"{plan.count:,} streams, an event every {plan.interval_s:g} s", title_justify="left")
    for column in ("", "p50", "p99"):
        shown.add_column(column, justify="left" if not column else "right")
    for words, found in (
        ("TTFT of a request alone, ms", waits.alone),
        (f"TTFT while {plan.per_s:g} are opened a second, ms", waits.opening),
        ("TTFT of a request beside all of them, ms", waits.beside),
    ):
        shown.add_row(words, *(f"{1000 * percentile(sorted(found), share):.1f}" for share in (0.5, 0.99)))
    shown.add_section()
    for role in before:
        shown.add_row(f"{role}: MiB before, and at most", f"{before[role] / 2**20:.0f}", f"{most[role] / 2**20:.0f}")
    return shown


def main(
    count: Annotated[int, typer.Option("--streams", min=2, help="Streams that are open at once.")] = 5000,
    per_s: Annotated[float, typer.Option("--per-s", min=1, help="Streams opened a second.")] = 100.0,
    interval_s: Annotated[float, typer.Option("--interval", min=0.01, help="Seconds between events of one.")] = 0.5,
    hold_s: Annotated[float, typer.Option("--hold", min=1, help="Seconds that all of them stay open.")] = 40.0,
    probes: Annotated[int, typer.Option(min=2, help="Further requests, one by one, before and meanwhile.")] = 200,
    out: Annotated[
        Path | None, typer.Option(help="Raw values, as JSON. Default: a dated file in loadtest/results.")
    ] = None,
) -> None:
    """Open many slow streams through HAProxy and one gateway replica, and
    send further requests beside them.

    A private Ray on this machine with the scripted engine. Every stream must
    be whole. Takes about three minutes, two cores and 4 GB. Exits 2 where a
    stream was refused or broke: then there are no figures.
    """
    heed_signals()
    # A socket for each stream here, two in HAProxy and in the gateway, one in the replica.
    needed, (_, allowed) = 2 * count + 1000, resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed < needed:
        fail(console, MODULE, f"needs {needed:,} open files, and {allowed:,} are allowed: ulimit -n {needed}", 2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, allowed))
    plan = Plan(count, per_s, interval_s, hold_s, probes)
    about = about_run(MODULE) | {"plan": asdict(plan)}
    try:
        before, most, waits = measure(plan)
    except KeyboardInterrupt:
        fail(console, MODULE, "interrupted; nothing was written", 130)
    except (StreamFault, ClusterFault, LocalClusterError, RayApiError) as error:
        fail(console, MODULE, str(error), 2)
    console.print(table(plan, before, most, waits))
    out = out or ROOT / "loadtest" / "results" / f"many-streams-{datetime.now(UTC):%Y-%m-%dT%H%M}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    record = about | {"memory_bytes": {"before": before, "most": most}, "ttft_s": asdict(waits)}
    out.write_text(json.dumps(record, indent=1) + "\n")
    console.print(f"Raw values: {os.path.relpath(out)}", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    typer.run(main)
