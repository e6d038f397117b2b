"""The command: python -m loadtest.scaling --help"""

import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadtest.scaling import plot, raw, report, study
from loadtest.scaling.outcome import TPOT_S, TTFT_PROMPT_TOKEN_S, TTFT_S, outcome
from loadtest.scaling.replay import SAMPLE_S, replay
from loadtest.scaling.scenarios import CODELLAMA_7B, LLAMA_8B, START_S, TRACES, available, many, scenarios
from loadtest.scaling.study import Found, Job
from loadtest.scaling.systems import Modelyard
from serve_app import scaling
from serve_app.config import Scaling

ROOT = Path(__file__).resolve().parents[2]

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)
console = Console(width=None if Console().is_terminal else 120)


@app.command()
def run(
    only: Annotated[
        list[str] | None, typer.Option("--scenario", help="One of them, may be repeated; all without it.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds, from 1 on.")] = 3,
    start_s: Annotated[float, typer.Option(min=0, help="How long a replica takes to start, s.")] = START_S,
    processes: Annotated[int | None, typer.Option(min=1, help="At once. Default: as many as CPUs.")] = None,
    out: Annotated[Path | None, typer.Option(help="Raw results. Default: a dated file in loadtest/results.")] = None,
) -> None:
    """Replay every scenario under Modelyard's policy, Serve's policy with many
    settings, and fixed fleets; print a table of each.

    The Azure traces (AzureLLMInferenceDataset2023 of
    github.com/Azure/AzurePublicDataset) are read from the folder that
    MODELYARD_TRACES names, and left out without it. The rest is made from seeds.
    """
    unknown = sorted(set(only or ()) - scenarios().keys())
    if unknown:
        _fail(f"no scenario {', '.join(unknown)}; there are {', '.join(scenarios())}")
    names, missing = available(only or list(scenarios()))
    if missing:
        console.print(f"{TRACES} names no folder of traces, so left out: {', '.join(missing)}")
    todo = study.jobs(names, seeds, start_s)
    found: list[Found] = []
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("replays", total=len(todo))
        for one in study.do_all(todo, processes):
            found.append(one)
            progress.update(bar, advance=1, description=f"replays ({one.job.scenario})")
    out = out or ROOT / "loadtest" / "results" / f"scaling-start-{start_s:g}s-{datetime.now(UTC):%Y-%m-%dT%H%M}.jsonl"
    drawn = [v for v in report.verdicts(found) if v.scenario in plot.SHOWN]
    with_series = [Job(v.scenario, choice, 1, start_s) for v in drawn for choice in plot.choices(v)]
    raw.write(out, _about(start_s, seeds), found, with_series)
    show(out)


@app.command()
def show(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="What `run` wrote.")],
    picture: Annotated[
        Path | None, typer.Option(help="Draw the replays over time, as .png or .svg; needs matplotlib.")
    ] = None,
) -> None:
    """Print the tables of a run again, and draw it."""
    about, found = raw.read(file)
    verdicts = report.verdicts(found)
    for verdict in verdicts:
        console.print(report.table(verdict, about["start_s"]))
    if picture is not None:
        plot.draw(verdicts, found, picture, about["start_s"])
    console.print(f"Raw results: {os.path.relpath(file)}", soft_wrap=True, highlight=False)


@app.command()
def large(
    models: Annotated[int, typer.Option(min=1)] = 200,
    gpus: Annotated[int, typer.Option(min=1)] = 1000,
    seconds: Annotated[float, typer.Option(min=1, help="Simulated time.")] = 300.0,
) -> None:
    """How long a large fleet takes: many models under Modelyard's policy, and one
    call of it.
    """
    scenario = many(models, gpus, seconds)
    began = time.perf_counter()
    load = scenario.models(1)
    made = time.perf_counter()
    runs = replay(load, Modelyard, gpus=gpus, seconds=seconds, seed=1)
    took = time.perf_counter() - made
    total = outcome(runs.values())
    what = f"{models} models, {gpus} GPUs, {seconds:g} s: {total.requests:,} requests made in {made - began:.0f} s"
    came = f"{total.gpu_hours:.0f} GPU-hours, {100 * total.misses / total.requests:.2f} % missed"
    console.print(f"{what} and replayed in {took:.0f} s; {came}", highlight=False, soft_wrap=True)
    console.print(f"one call of decide: {_decide_us():.1f} µs", highlight=False)


def _decide_us(calls: int = 100_000) -> float:
    """Mean time of a call with a queue, µs."""
    found = scaling.Signals(8, 400, 60, 3.2, 40, 256, 4, 90_000.0)
    state, fleet, settings = scaling.State(), scaling.Fleet(8, 8, 1, 64), Scaling()
    began = time.perf_counter()
    for call in range(calls):
        _, state = scaling.decide(found, fleet, settings, state, call / 10)
    return (time.perf_counter() - began) / calls * 1e6


def _about(start_s: float, seeds: int) -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "commit": commit.stdout.strip(),
        "command": " ".join(["python -m loadtest.scaling", *sys.argv[1:]]),
        "python": platform.python_version(),
        "ray": version("ray"),
        "start_s": start_s,
        "seeds": seeds,
        "engines": {"chat": asdict(LLAMA_8B), "code": asdict(CODELLAMA_7B)},
        "late_after": {"s": TTFT_S, "s_per_prompt_token": TTFT_PROMPT_TOKEN_S, "slow_s_per_token": TPOT_S},
        "sample_s": SAMPLE_S,
    }


def _fail(reason: str) -> NoReturn:
    console.print(f"[red]{reason}[/]", soft_wrap=True, highlight=False)
    raise typer.Exit(2)


if __name__ == "__main__":
    app()
