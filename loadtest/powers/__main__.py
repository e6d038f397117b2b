"""The command: python -m loadtest.powers --help"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import httpx
import typer
from rich.console import Console

from loadtest.about import about_engine, gpus
from loadtest.clusters import ClusterFault, teller
from loadtest.endings import fail, heed_signals
from loadtest.held import held
from loadtest.plan_accuracy import last_error
from loadtest.powers import report
from loadtest.powers.measure import Setting, Started, clients, measure, pools, started
from loadtest.powers.rows import CPU_ROWS, GPU_ROWS, ROWS, Row
from loadtest.powers.starts import Start, missing, waves
from serve_app.demo_model import DemoModelError
from serve_app.local_cluster import LocalClusterError
from serve_app.ray_api import RayApiError

MODULE = "loadtest.powers"
FAULTS = (ClusterFault, LocalClusterError, RayApiError, DemoModelError, httpx.HTTPError, ValueError)
# A cause is one line of this many characters.
CAUSE = 300
Line: TypeAlias = dict[str, Any]
# Of a start that runs: each of its rows with its raw values.
Measure = Callable[[list[Row], Started], Iterator[tuple[Row, Line]]]

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)
console = Console(width=None if Console().is_terminal else 160)
errors = Console(stderr=True)


@app.command()
def run(
    results: Annotated[Path, typer.Option(help="Raw values, a JSON object per variant; what it has is skipped.")],
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[ROW]...", help="Default: all that can run here.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, help="Measured, of each load.")] = 8.0,
    warm_up: Annotated[float, typer.Option(min=0, help="Before that, s.")] = 2.0,
    repeats: Annotated[int, typer.Option(min=1, help="Of each load.")] = 3,
    start_s: Annotated[float, typer.Option(min=1, help="Longest start of a variant.")] = 300.0,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of any, for shapes; default: the demo model's.")
    ] = None,
    at_once: Annotated[
        int, typer.Option(min=1, help="Start so many variants at once, if they fit on a GPU; one is under load.")
    ] = 1,
    budget_s: Annotated[float, typer.Option(help="Begin no variant that might end later than this.")] = 570.0,
    variant_usual_s: Annotated[float, typer.Option(help="What a variant usually takes.")] = 120.0,
) -> None:
    """Measure what the engine's powers gain, row by row, through Modelyard.

    Each variant of a row is a Ray of its own with a gateway and the model; where
    variants of several rows are the same, one start serves all. Raw values are
    written as soon as a row is measured, so a run may be ended and begun again;
    what failed is written too, and tried again then. Rows for GPUs run where
    there are enough, the others where there is none. Exits 1 where a variant
    failed.
    """
    heed_signals()
    have = len(gpus())
    rows = [_row(name) for name in names] if names else [*(GPU_ROWS if have else CPU_ROWS)]
    setting = Setting(seconds, warm_up, repeats, clients(), start_s, tokenizer)
    end = time.monotonic() + budget_s
    known = report.read(results)
    for row in rows:
        if row.gpus > have and missing(row, known):
            console.print(f"{row.name}: needs {row.gpus} GPUs, there are {have}", highlight=False)
    results.parent.mkdir(parents=True, exist_ok=True)
    failed = 0
    with ExitStack() as stack:
        own = pools(setting, stack)
        stack.enter_context(_told_interruption())
        for wave in waves([row for row in rows if row.gpus <= have], known, at_once):
            if (left := end - time.monotonic()) < variant_usual_s * len(wave):
                console.print(f"{wave[0]}: not begun, {left:.0f} s are left", highlight=False)
                continue
            for found in attempt(wave, setting, own):
                with results.open("a") as file:
                    file.write(report.line(found))
                failed += "failed" in found
    _print(results, rows)
    raise typer.Exit(1 if failed else 0)


@app.command()
def show(
    results: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="What `run` wrote.")],
    names: Annotated[list[str] | None, typer.Argument(metavar="[ROW]...")] = None,
) -> None:
    """Print the tables of a file again."""
    _print(results, [_row(name) for name in names] if names else list(ROWS.values()))


@app.command()
def rows() -> None:
    """List the rows: what each compares, and what it needs."""
    for row in ROWS.values():
        needs = f"{row.gpus} GPU" if row.gpus else "CPU"
        console.print(f"{row.name} ({needs}): {row.what}", highlight=False)


@app.command()
def document(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="docs/engine.md")],
) -> None:
    """Write the tables between the marks of a document, from all that is in loadtest/results."""
    file.write_text(report.with_tables(file.read_text(), report.kept()))


@contextmanager
def _told_interruption() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        fail(errors, MODULE, "interrupted; what was measured is kept", 130)


def attempt(wave: Sequence[Start], setting: Setting, own: Sequence[Sequence[Executor]]) -> Iterator[Line]:
    """Start all of ``wave`` at once, then measure one after the other: a line for each row of each."""
    about = about_engine(MODULE) | {"seconds": setting.seconds, "repeats": setting.repeats, "warm_up": setting.warm_up}
    about["at_once"] = len(wave)
    with tempfile.TemporaryDirectory(prefix="powers-", ignore_cleanup_errors=True) as home:
        begins = {}
        for number, start in enumerate(wave):
            folder = Path(home, str(number))
            folder.mkdir()
            begins[str(start)] = partial(started, start.models, setting, folder)
        with held(begins, partial(teller, console)) as up:
            for start in wave:
                tell = teller(console, str(start))
                measuring = partial(measure, setting=setting, own=own, tell=tell)
                for line in lines(start, up[str(start)].started.result, measuring):
                    if "failed" in line:
                        tell(f"{line['row']} failed: {line['failed']}")
                    yield line | {"about": about}


def lines(start: Start, found: Callable[[], Started], measuring: Measure) -> Iterator[Line]:
    """What was measured, or why it could not be, of each row of ``start``. ``found``: waits until it runs."""
    variants = {row.name: variant for row, variant in start.takes}
    try:
        for row, values in measuring([row for row, _ in start.takes], found()):
            yield {"row": row.name, "variant": variants.pop(row.name), **values}
    except FAULTS as fault:
        cause = last_error(str(fault)) if "\n" in str(fault) else str(fault)[-CAUSE:]
        for name, variant in variants.items():
            yield {"row": name, "variant": variant, "failed": cause or type(fault).__name__}


def _print(results: Path, wanted: list[Row]) -> None:
    measured = report.by_row(report.read(results))
    for row in wanted:
        if row.name in measured:
            console.print(report.table(row, measured[row.name]))
    if missing := [row.name for row in wanted if row.name not in measured]:
        console.print(f"Not measured: {', '.join(missing)}", highlight=False)
    console.print(f"Raw values: {os.path.relpath(results)}", soft_wrap=True, highlight=False)


def _row(name: str) -> Row:
    if name not in ROWS:
        fail(errors, MODULE, f"no row {name}; there are {', '.join(ROWS)}", 2)
    return ROWS[name]


if __name__ == "__main__":
    app()
