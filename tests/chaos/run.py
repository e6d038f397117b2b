"""One run: a model of three replicas behind two gateways, clients, faults, and what came of it."""

import asyncio
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop
from rich.table import Table

from serve_app.config import GATEWAY_DEPLOYMENT, GATEWAY_IMPORT_PATH, MODEL_DEPLOYMENT
from tests.chaos import judge
from tests.chaos.judge import Aftermath, Kind, Tally
from tests.chaos.load import Load
from tests.chaos.monkey import ALL, Monkey
from tests.serve.cluster import GATEWAY, Cluster, fake_app

MODEL = "chaos"
REPLICAS = 3
# Short bounds on silence and on leaving, and an engine process to kill and to stop.
LIMITS: dict[str, Any] = {"silence_s": 3.0, "grace_s": 2.0}
SCRIPT: dict[str, Any] = {"process": True}
# Serve's own part: by default it finds a stopped replica out after minutes. What leaves gets longer than `grace_s`.
OPTIONS = {"health_check_period_s": 1, "health_check_timeout_s": 3, "graceful_shutdown_timeout_s": 4}
PROGRESS_S = 5.0
QUIET_S = 10.0
# What a gateway's log says of a replica that went away under a request.
LOST_REPLICA = re.compile(rf"\breplica \S+ of {MODEL}: ")


@dataclass(frozen=True)
class Plan:
    """``requests``: at least so many, and more until every one of ``kinds`` of faults has been. ``limit_s``: a client
    waits no longer for its answer."""

    seed: int
    requests: int
    clients: int
    kinds: Sequence[str] = ALL
    limit_s: float = 120.0


@dataclass(frozen=True)
class Outcome:
    """``injected``: faults by kind. ``moves``: how often a request lost its replica. ``continued``: streams that the
    replicas alive at the end took over. ``load_average``: the machine's, over the last minute."""

    plan: Plan
    tally: Tally
    after: Aftermath
    injected: Counter[str]
    moves: int
    continued: int
    seconds: float
    load_average: float

    @property
    def faults(self) -> list[str]:
        return judge.faults(self.tally, self.after)

    def figures(self) -> dict[str, Any]:
        kinds = self.tally.kinds
        return {
            "requests": kinds.total(),
            "answered": kinds[Kind.ANSWER],
            "errors": dict(sorted(self.tally.errors.items())),
            "clients that left early": kinds[Kind.ABORT],
            "broken by a killed gateway": kinds[Kind.GATEWAY],
            "hung": kinds[Kind.HUNG],
            "silently cut": kinds[Kind.CUT],
            "wrong text": kinds[Kind.WRONG],
            "leaked counters": self.after.leaked,
            "orphan processes": len(self.after.orphans),
            "hit and not replaced": len(self.after.not_replaced),
            "resumable": self.tally.resumable,
            "finished of those": self.tally.finished,
            "lost their replica": self.moves,
            "streams continued on the last replicas": self.continued,
            "faults": dict(sorted(self.injected.items())),
            "seconds": round(self.seconds),
        }

    def table(self) -> Table:
        table = Table("chaos", f"seed {self.plan.seed}, {self.plan.clients} clients")
        table.columns[1].justify = "right"
        for what, figure in self.figures().items():
            parts = figure if isinstance(figure, dict) else {}
            table.add_row(what, str(sum(parts.values()) if isinstance(figure, dict) else figure))
            for part, count in parts.items():
                table.add_row(f"  {part}", str(count))
        return table

    def save(self, folder: Path) -> Path:
        """As JSON, beside the other runs."""
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"chaos-seed{self.plan.seed}-{time.strftime('%Y-%m-%dT%H%M')}.json"
        run = {
            "plan": asdict(self.plan),
            "cpus": os.cpu_count(),
            "load_average": self.load_average,
            "figures": self.figures(),
            "failed": self.faults,
            "losses": self.tally.examples,
        }
        file.write_text(json.dumps(run, indent=1) + "\n")
        return file


def chaos(cluster: Cluster, plan: Plan, tell: Callable[[str], None]) -> Outcome:
    """Deploy, load and hurt, wait until all is quiet, judge."""
    cluster.deploy(gateways(), model(REPLICAS, 0))
    monkey = Monkey(cluster, model, REPLICAS, plan.seed, plan.kinds, tell)
    load = Load(cluster.http_port, MODEL, plan.seed, clients=plan.clients, at_least=plan.requests, limit_s=plan.limit_s)
    started = time.monotonic()
    try:
        uvloop.run(_both(load, monkey, tell))
        seconds = time.monotonic() - started
        tell("no more faults: waiting for the model to be whole and quiet")
        not_replaced = monkey.settle()
        reports, leaked = _last_reports(cluster, monkey)
        after = Aftermath(leaked, monkey.orphans(), tuple(not_replaced), tuple(monkey.trouble))
    finally:
        monkey.stopped.kill()
    judged = [judge.judge(record, monkey.gateway_kills) for record in load.records]
    return Outcome(
        plan=plan,
        tally=judge.tally(judged, monkey.faults),
        after=after,
        injected=Counter(fault.kind for fault in monkey.faults),
        moves=len(LOST_REPLICA.findall(cluster.log(GATEWAY, GATEWAY_DEPLOYMENT))),
        continued=sum(report["engine"].get("resumed", 0) for report in reports),
        seconds=seconds,
        load_average=os.getloadavg()[0],
    )


async def _both(load: Load, monkey: Monkey, tell: Callable[[str], None]) -> None:
    progress = asyncio.create_task(_progress(load, tell))
    try:
        faults = asyncio.to_thread(monkey.run, lambda: load.enough)
        await asyncio.gather(load.run(lambda: monkey.done), faults)
    finally:
        progress.cancel()


async def _progress(load: Load, tell: Callable[[str], None]) -> None:
    while True:
        await asyncio.sleep(PROGRESS_S)
        ends = Counter(record.end for record in load.records)
        ended = ", ".join(f"{ends[end]} {end}" for end in sorted(ends))
        tell(f"{load.sent} sent, {load.sent - len(load.records)} open; {ended}")


def _last_reports(cluster: Cluster, monkey: Monkey) -> tuple[list[dict[str, Any]], int]:
    """What the replicas report, and what they and the gateways still hold, once that is nothing, or when they have had
    the time to become so."""
    deadline = time.monotonic() + QUIET_S
    try:
        while True:
            reports = cluster.reports(MODEL)
            held = judge.leaked(reports) + cluster.held_by_gateways(MODEL)
            if not held or time.monotonic() > deadline:
                return reports, held
            time.sleep(0.2)
    except AssertionError as error:
        monkey.trouble.append(str(error))
        return [], 0


def model(replicas: int, version: int) -> dict[str, Any]:
    """The model's application. Another ``version`` is another engine in Serve's eyes, with the same text."""
    app = fake_app(MODEL, replicas=replicas, limits=LIMITS, overcommit=8 + version, **SCRIPT)
    (options,) = (d for d in app["deployments"] if d["name"] == MODEL_DEPLOYMENT)
    options.update(OPTIONS)
    return app


def gateways() -> dict[str, Any]:
    """Two of them, small enough for any machine."""
    # Imported here: the fast tier collects this file and must not pay for Ray.
    from serve_app.gateway.app import Gateway

    options = {"name": GATEWAY_DEPLOYMENT, "num_replicas": 2}
    options["ray_actor_options"] = Gateway.ray_actor_options | {"num_cpus": 0.1}  # type: ignore[attr-defined]
    return {"name": GATEWAY, "import_path": GATEWAY_IMPORT_PATH, "route_prefix": "/", "deployments": [options]}
