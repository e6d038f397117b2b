"""The command: python -m loadtest.overhead --help"""

import os
import sys
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadtest.about import ROOT, about_engine
from loadtest.clusters import ClusterFault, teller
from loadtest.endings import fail, heed_signals
from loadtest.held import Begin, Held, Tell, held
from loadtest.overhead import plot, report, serve_llm
from loadtest.overhead.client import Level
from loadtest.overhead.loads import Address, Arrivals, Asked, client_process, take
from loadtest.overhead.report import Sample
from loadtest.overhead.routers import ROUTERS, commands, program
from loadtest.overhead.targets import (
    DEFAULT_TARGETS,
    MODEL,
    SERVE_LLM,
    SERVE_LLM_SYSTEMS,
    SYSTEMS,
    TARGETS,
    Running,
    Setting,
    System,
    beside,
    read_model,
    routed,
    with_files,
)
from serve_app.config import FakeScript, ModelArgs, Resources, Source
from serve_app.demo_model import DemoModelError
from serve_app.local_cluster import LocalClusterError
from serve_app.model.engine import engine_arguments
from serve_app.ray_api import RayApiError

MODULE = "loadtest.overhead"
FAULTS = (ClusterFault, LocalClusterError, RayApiError)
LEVELS = (1, 16, 64, 256)
# Two cores answer no more in bearable time.
DEMO_LEVELS = (1, 8)
# Of the fake engine, at least: an open loop may have more open than streams were named.
FAKE_SLOTS = 256

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)
console = Console(width=None if Console().is_terminal else 140)
errors = Console(stderr=True)


class Engine(StrEnum):
    VLLM = "vllm"
    FAKE = "fake"


@app.command()
def run(
    only: Annotated[
        list[str] | None,
        typer.Option("--target", help=f"{', '.join(TARGETS)}; may be repeated. Default: {', '.join(DEFAULT_TARGETS)}."),
    ] = None,
    peers: Annotated[
        list[str] | None,
        typer.Option(
            "--peer",
            metavar="NAME=COMMAND",
            help="Where a router is installed, or the Python that has Ray Serve LLM; may be repeated.",
        ),
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
    streams: Annotated[
        list[int] | None,
        typer.Option("--streams", min=1, help="At once; may be repeated. Default: 1, 16, 64, 256; demo model: 1, 8."),
    ] = None,
    rates: Annotated[
        list[float] | None,
        typer.Option("--rate", min=0.1, max=10_000, help="Requests per second, come what may; may be repeated."),
    ] = None,
    arrivals: Annotated[Arrivals, typer.Option(help="How requests of a rate follow each other.")] = Arrivals.POISSON,
    side_by_side: Annotated[
        bool, typer.Option("--side-by-side", help="Start all systems at once, and alternate between them.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each system is started.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Of each load, per round.")] = 3,
    seconds: Annotated[float, typer.Option(min=1, help="Measured, of each load.")] = 10.0,
    warm_up: Annotated[float, typer.Option(min=0, help="Before that, s.")] = 3.0,
    prompt_tokens: Annotated[int, typer.Option("--prompt", min=1, help="Tokens of a prompt.")] = 64,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 128,
    clients: Annotated[int | None, typer.Option(min=1, help="Client processes. Default: by CPUs, 8 at most.")] = None,
    stream_interval: Annotated[int, typer.Option(min=1, help="Tokens per event of bare-interval.")] = 8,
    models: Annotated[int, typer.Option(min=1, help="Models deployed in modelyard-models; one is awake.")] = 20,
    start_s: Annotated[float, typer.Option(min=1, help="Longest time until a system answers, s.")] = 600.0,
    out: Annotated[Path | None, typer.Option(help="Raw values. Default: a dated file in loadtest/results.")] = None,
) -> None:
    """vLLM's own API server against Modelyard in front of the same engine.

    One system runs at a time, so one GPU is enough: vLLM alone, then a private
    Ray with HAProxy, the gateway and a replica with the same engine arguments;
    in every second round the other way round. Clients in processes of their
    own keep so many streams open (/v1/completions, random prompts, answers of
    one length), or start so many requests per second. Have the machine to
    yourself: Ray's workers run at niceness 15 (RAY_worker_niceness), so they
    yield to others where vLLM alone does not.

    With --side-by-side all systems are up, one is under load, and the others
    idle: each load is taken of every target before the next, so what drifts
    meets all alike, and one waits for a start once. Their engines must fit the
    machine together: engine.gpu_memory_utilization and kv_cache_memory_bytes.

    Routers (haproxy, which decides nothing, vllm-router, smg, litellm) stand in
    front of the server of bare. The last two take no prompts of token ids: with
    one of them all targets of the run get words.

    Each load's raw values are written as it ends: what an interrupted run has
    taken can be shown. A system that does not start is left out. Exits 2 then,
    or where nothing is answered.
    """
    heed_signals()
    names = only or list(DEFAULT_TARGETS)
    if unknown := sorted(set(names) - TARGETS.keys()):
        fail(errors, MODULE, f"no target {', '.join(unknown)}; there are {', '.join(TARGETS)}", 2)
    demo = engine is Engine.VLLM and model is None
    if not streams and not rates:
        streams = list(DEMO_LEVELS if demo else LEVELS)
    levels = sorted({*(Level(streams=each) for each in streams or ()), *(Level(rate=each) for each in rates or ())})
    processes = clients or min(8, max(1, (os.cpu_count() or 1) // 2))
    routers = [router for name in names if (router := TARGETS[name].router)]
    words = any(ROUTERS[router].words for router in routers)
    asked = Asked(tuple(levels), arrivals, rounds, repeats, seconds, warm_up, prompt_tokens, words, tokens, processes)
    out = out or ROOT / "loadtest" / "results" / f"overhead-{datetime.now(UTC):%Y-%m-%dT%H%M}.jsonl"
    try:
        given = commands(peers or (), (SERVE_LLM.key,))
        programs = {router: program(router, given) for router in routers}
        pythons = dict.fromkeys(SERVE_LLM_SYSTEMS, given.get(SERVE_LLM.key, sys.executable))
        if llm := pythons.keys() & {TARGETS[name].system for name in names}:
            serve_llm.check(pythons[SERVE_LLM.key])
        slots = max(FAKE_SLOTS, *(level.streams for level in levels))
        args = scripted(slots) if engine is Engine.FAKE else with_files(read_model(model), _say)
        given_engine = engine_arguments(args, MODEL) if llm else {}
    except (OSError, ImportError, yaml.YAMLError, ValueError, DemoModelError) as error:
        fail(errors, MODULE, str(error), 2)
    about = about_engine(MODULE) | {"load": asdict(asked), "stream_interval": stream_interval, "model": called(args)}
    about |= {"side_by_side": side_by_side, "models": models, "args": args.model_dump(mode="json", exclude_unset=True)}
    about["environment"] = {name: os.environ[name] for name in sorted(os.environ) if name.startswith(("RAY_", "VLLM_"))}
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with out.open("w") as file, tempfile.TemporaryDirectory(prefix="overhead-") as home:
            file.write(report.line(about))
            setting = Setting(args, stream_interval, start_s, Path(home), programs, given_engine, models)
            plan = order(list(dict.fromkeys(names)), rounds, side_by_side)
            for taken in measure(setting, plan, asked, pythons):
                file.write(report.line(taken))
                file.flush()
    except KeyboardInterrupt:
        fail(errors, MODULE, f"interrupted; {_kept(out)}", 130)
    except FAULTS as error:
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
    for fault in report.faults(samples):
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


def order(names: Sequence[str], rounds: int, side_by_side: bool = False) -> list[tuple[int, list[str]]]:
    """Round, and the targets whose systems are up at once: one system's, or all. Every second round goes backwards, so
    that what drifts meets all alike."""
    systems = list(dict.fromkeys(TARGETS[name].system for name in names))
    found = []
    for number in range(1, rounds + 1):
        turned = systems if number % 2 else systems[::-1]
        alone = [[name for name in names if TARGETS[name].system == system] for system in turned]
        found += [(number, one) for one in ([list(names)] if side_by_side else alone)]
    return found


def measure(
    setting: Setting, plan: Sequence[tuple[int, list[str]]], asked: Asked, pythons: Mapping[str, str] | None = None
) -> Generator[Sample]:
    """Start the systems of each step of ``plan`` (see ``order``) and take its targets' loads. ``pythons``: of systems
    that want another. ClusterFault: one went away; or, once the loads of all others are taken, did not start."""
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with ExitStack() as stack:
        pools = [stack.enter_context(client_process()) for _ in range(asked.clients)]
        for ready in [pool.submit(os.getpid) for pool in pools]:
            ready.result()
        progress = stack.enter_context(Progress(*columns, console=errors))
        total = asked.repeats * len(asked.levels) * sum(len(targets) for _, targets in plan)
        bar = progress.add_task("loads", total=total)
        lost: dict[str, str] = {}

        def tells(name: str) -> Tell:
            return teller(progress.console, name)

        for number, targets in plan:
            names = [name for name in dict.fromkeys(TARGETS[name].system for name in targets) if name not in lost]
            systems = {name: _begin(SYSTEMS[name], setting, name, alone=len(names) == 1) for name in names}
            with held(systems, tells, pythons) as systems_up:
                running = _up(systems_up, lost)
                targets = [name for name in targets if TARGETS[name].system in running]
                routers = {
                    name: _begin(partial(routed, router, running[TARGETS[name].system]), setting, name, alone=True)
                    for name in targets
                    if (router := TARGETS[name].router) and name not in lost
                }
                with held(routers, tells) as routers_up:
                    reached = {name: running[TARGETS[name].system] for name in targets if not TARGETS[name].router}
                    reached |= _up(routers_up, lost)
                    for where, level, target in _turns(number, [n for n in targets if n in reached], asked):
                        progress.update(bar, description=f"round {number}: {target}, load {level}")
                        at = reached[target]
                        to = Address(at.port, MODEL, TARGETS[target].headers)
                        taken = take(to, target, where, level, asked, pools, at.processes())
                        progress.console.print(_brief(taken), highlight=False, soft_wrap=True)
                        progress.advance(bar)
                        yield taken
        if lost:
            raise ClusterFault("\n".join(f"{name} was left out: {fault}" for name, fault in lost.items()))


def _up(all_held: Mapping[str, Held[Running]], lost: dict[str, str]) -> dict[str, Running]:
    """Those that run, once each does or cannot; why not is added to ``lost``."""
    found = {}
    for name, one in all_held.items():
        try:
            found[name] = one.started.result()
        except FAULTS as fault:
            lost[name] = str(fault)
    return found


def _begin(start: System, setting: Setting, name: str, *, alone: bool) -> Begin[Running]:
    """Start the system or router ``name``, with a folder of its own. ``alone``: or others start at the same time."""
    home = setting.home / name
    home.mkdir(exist_ok=True)
    begin = partial(start, replace(setting, home=home))
    return begin if alone else partial(beside, begin, str(home / "vllm"))


def _turns(number: int, targets: Sequence[str], asked: Asked) -> Iterator[tuple[tuple[int, int], Level, str]]:
    """Round and repeat, load and target: each load of all targets before the next, backwards in every second repeat."""
    for repeat in range(1, asked.repeats + 1):
        for level in asked.levels:
            for target in targets if repeat % 2 else reversed(targets):
                yield (number, repeat), level, target


def _brief(taken: Sample) -> str:
    what = f"round {taken.round}, {taken.target}, load {taken.level}"
    try:
        found = report.figures(taken)
    except ValueError as error:
        return str(error)
    failed = f", {found.errors:.0f} failed" if found.errors else ""
    return f"{what}: {found.tok_s:,.0f} tok/s, TTFT p50 {found.ttft_p50:.1f} ms, TPOT {found.tpot_p50:.2f} ms{failed}"


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
