"""Who scales best? Modelyard's policy and Serve's own on the same arrivals, bounds and GPUs. No GPU, no cluster.

    python -m loadtest.scaling                         # every trace that is there
    python -m loadtest.scaling burst azure-5x --json results.json

A request misses its objective when its first token comes later than 2 s and 0.5 ms per prompt token after it
arrived, or when it is refused. ``MODELYARD_TRACES`` names the folder with Azure's two traces.
"""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from loadtest.scaling.engine import Request
from loadtest.scaling.fleet import Fleet
from loadtest.scaling.replay import Run, replay
from loadtest.scaling.scenarios import TRACES, names, scenario
from loadtest.scaling.systems import Modelyard, Serve, ServeSettings, System

# Serve as it comes; with targets that fit these engines; and with delays as short as ours.
SYSTEMS: dict[str, Callable[[Fleet], System]] = {
    "modelyard": Modelyard,
    "serve, untouched": Serve,
    "serve, target 16": lambda fleet: Serve(fleet, ServeSettings(target=16)),
    "serve, target 64": lambda fleet: Serve(fleet, ServeSettings(target=64)),
    "serve, target 16, fast": lambda fleet: Serve(fleet, ServeSettings(16, up_s=1, look_back_s=5, interval_s=1)),
    "serve, target 64, fast": lambda fleet: Serve(fleet, ServeSettings(64, up_s=1, look_back_s=5, interval_s=1)),
}


def missed(request: Request) -> bool:
    return request.refused or request.first_s is None or request.first_s - request.at_s > 2.0 + 0.0005 * request.prompt


def turns(run: Run) -> int:
    """How often the number of replicas changed its direction."""
    wanted = [count for _, count in run.wanted]
    steps = [after - before for before, after in pairwise(wanted) if after != before]
    return sum((a > 0) != (b > 0) for a, b in pairwise(steps))


def measure(name: str, system: str, seed: int) -> dict[str, Any]:
    found = scenario(name, seed)
    runs = replay(found.models, SYSTEMS[system], gpus=found.gpus, seconds=found.seconds, seed=seed)
    requests = [request for run in runs.values() for request in run.requests]
    return {
        "trace": name,
        "system": system,
        "seed": seed,
        "requests": len(requests),
        "missed": sum(map(missed, requests)),
        "refused": sum(request.refused for request in requests),
        "gpu_hours": sum(run.gpu_s for run in runs.values()) / 3600,
        "turns": sum(map(turns, runs.values())),
    }


def main(
    traces: Annotated[list[str] | None, typer.Argument(help=f"Of: {', '.join(names())}. All unless named.")] = None,
    seed: int = 1,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
) -> None:
    console = Console()
    chosen = traces or names()
    if unknown := [name for name in chosen if name not in names()]:
        hint = f" Azure's need {TRACES}." if any(name.startswith("azure") for name in unknown) else ""
        raise typer.BadParameter(f"no trace {', '.join(unknown)}; there are {', '.join(names())}.{hint}")
    todo = [(name, system) for name in chosen for system in SYSTEMS]
    rows = [measure(*each, seed) for each in track(todo, "replaying", console=console, transient=True)]
    table = Table("trace", "system", box=None)
    table.columns[1].no_wrap = True
    for column in ("requests", "missed", "refused", "GPU-hours", "changes of direction"):
        table.add_column(column, justify="right")
    for row in rows:
        share = f"{row['missed'] / row['requests']:.2%}"
        cells = (str(row["requests"]), share, str(row["refused"]), f"{row['gpu_hours']:.1f}", str(row["turns"]))
        table.add_row(row["trace"], row["system"], *cells)
    console.print(table)
    if as_json is not None:
        as_json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    typer.run(main)
