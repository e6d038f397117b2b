"""The command: python -m loadtest.powers --help"""

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from loadtest.about import about_engine, gpus
from loadtest.clusters import ClusterFault, teller
from loadtest.endings import fail, heed_signals
from loadtest.plan_accuracy import last_error
from loadtest.powers import report
from loadtest.powers.measure import Setting, Tell, clients, measure
from loadtest.powers.rows import CPU_ROWS, GPU_ROWS, ROWS, Row, Variant
from serve_app.demo_model import DemoModelError
from serve_app.local_cluster import LocalClusterError
from serve_app.ray_api import RayApiError

MODULE = "loadtest.powers"
FAULTS = (ClusterFault, LocalClusterError, RayApiError, DemoModelError, httpx.HTTPError, ValueError)
# A cause is one line of this many characters.
CAUSE = 300
Measure = Callable[[Row, Variant, Setting, Path, Tell], dict[str, Any]]

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
    budget_s: Annotated[float, typer.Option(help="Begin no row that might end later than this.")] = 570.0,
    variant_usual_s: Annotated[float, typer.Option(help="What a row's variants usually take, each.")] = 120.0,
) -> None:
    """Measure what the engine's powers gain, row by row, through Modelyard.

    Each variant of a row is a Ray of its own with a gateway and the model. Its
    raw values are written as soon as it is measured, so a run may be ended and
    begun again; what failed is written too, and tried again then. Rows for
    GPUs run where there are enough, the others where there is none. Exits 1
    where a variant failed.
    """
    heed_signals()
    have = len(gpus())
    rows = [_row(name) for name in names] if names else [*(GPU_ROWS if have else CPU_ROWS)]
    setting = Setting(seconds, warm_up, repeats, clients(), start_s, tokenizer)
    end = time.monotonic() + budget_s
    failed = 0
    for row in rows:
        wanted = missing(row, report.read(results))
        if wanted and row.gpus > have:
            console.print(f"{row.name}: needs {row.gpus} GPUs, there are {have}", highlight=False)
            continue
        if (left := end - time.monotonic()) < variant_usual_s * len(wanted):
            console.print(f"{row.name}: not begun, {left:.0f} s are left", highlight=False)
            continue
        for variant in wanted:
            found = attempt(row, variant, setting)
            results.parent.mkdir(parents=True, exist_ok=True)
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


def missing(row: Row, lines: Iterable[Mapping[str, Any]]) -> list[Variant]:
    """The variants of ``row`` that ``lines`` do not have; those that failed are missing too."""
    known = {(line["row"], line["variant"]) for line in lines if "failed" not in line}
    return [variant for variant in row.variants if (row.name, variant.name) not in known]


def attempt(row: Row, variant: Variant, setting: Setting, measure: Measure = measure) -> dict[str, Any]:
    """The line of one variant, measured or failed."""
    about = about_engine(MODULE) | {"seconds": setting.seconds, "repeats": setting.repeats, "warm_up": setting.warm_up}
    found: dict[str, Any] = {"row": row.name, "variant": variant.name, "about": about}
    tell = teller(console, f"{row.name}, {variant.name}")
    with tempfile.TemporaryDirectory(prefix="powers-", ignore_cleanup_errors=True) as home:
        try:
            return found | measure(row, variant, setting, Path(home), tell)
        except KeyboardInterrupt:
            fail(errors, MODULE, "interrupted; what was measured is kept", 130)
        except FAULTS as fault:
            cause = last_error(str(fault)) if "\n" in str(fault) else str(fault)[-CAUSE:]
            tell(f"failed: {cause}")
            return found | {"failed": cause or type(fault).__name__}


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
