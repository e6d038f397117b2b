"""A test's files, JSON, PNG and HTML, and what is printed of it."""

import os
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from loadtest.load import page, plot, record, report
from loadtest.load.record import Run
from loadtest.load.report import Check, Figures

FOLDER = Path(".modelyard/loadtest")
MET, MISSED, NOTHING, INTERRUPTED = 0, 1, 2, 130
NONE = "–"
COLUMNS = ("traffic", "requests", "failed", "good", "TTFT p50", "p90", "p99", "ITL p50", "p99", "tokens/s", "in/out")
CAPTION = "times in ms; in/out: tokens of a prompt and of an answer, mean"
# Beyond this the client's own delay is worth a remark. It counts in all times either way.
LATE_MS = 100.0


def write(run: Run, folder: Path, name: str) -> Path:
    """The three files of ``run`` in ``folder``; returns the JSON one. Raises ``OSError``."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.json"
    record.write(file, run, report.document(run))
    draw(run, file)
    return file


def draw(run: Run, file: Path) -> None:
    """The picture and the page beside ``file``."""
    plot.draw(run, file.with_suffix(".png"))
    file.with_suffix(".html").write_text(page.render(run))


def status(run: Run) -> int:
    """What a command that ran it ends with."""
    if not run.whole:
        return INTERRUPTED
    if not report.answered(run):
        return NOTHING
    return MET if report.met(run) else MISSED


def show(file: Path, console: Console | None = None) -> None:
    """Print the tables of what ``write`` wrote. Raises ``ValueError``, ``OSError``."""
    console = console or Console(width=None if Console().is_terminal else 120)
    run = record.read(file)
    table = Table(*COLUMNS, title=f"{run.name}: {run.scenario.what}", caption=CAPTION, box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for cells in rows(run):
        table.add_row(*cells)
    console.print(table)
    for kind, count in report.errors(run.answers).items():
        console.print(f"{count} failed: {kind}", highlight=False, markup=False)
    for check in report.checks(run):
        console.print(f"[{'green]met' if check.met else 'red]missed'}[/] {told(check)}", highlight=False)
    for line in remarks(run):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if (found := file.with_suffix(".html")).exists():
        console.print(f"Report: {os.path.relpath(found)} (.png and .json beside it)", highlight=False, soft_wrap=True)


def rows(run: Run) -> Iterator[tuple[str, ...]]:
    """The cells of the table: one row for each kind of traffic."""
    for traffic in run.scenario.traffic:
        of = report.figures([each for each in run.answers if each.traffic == traffic.name], run.scenario.target)
        yield (traffic.name, *_cells(of))


def _cells(of: Figures) -> Iterator[str]:
    yield from (f"{of.requests:,}", f"{of.failed:,}", f"{of.good / of.requests:.1%}" if of.requests else NONE)
    yield from (number(value) for value in (of.ttft_p50, of.ttft_p90, of.ttft_p99, of.itl_p50, of.itl_p99))
    yield from (number(of.tokens_s), f"{of.prompt_mean:,.0f}/{of.output_mean:,.0f}")


def number(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def told(check: Check) -> str:
    """What was found, and what was promised."""
    is_share = not check.what.endswith("ms")
    shown = [
        NONE if value is None else f"{value:.1%}" if is_share else number(value)
        for value in (check.found, check.promised)
    ]
    bound = "at least" if check.what == "good answers" else "at most"
    return f"{check.what}: {shown[0]} ({bound} {shown[1]})"


def remarks(run: Run) -> Iterator[str]:
    """What a reader must know to judge the figures."""
    if not run.whole:
        yield f"Interrupted after {run.seconds:.0f} of {run.scenario.seconds:g} s; {run.left} open ones do not count."
    why = ", ".join(f"{count} {what}" for what, count in report.misses(run).items())
    if why:
        yield f"Not good: {why}."
    late = max((each.late for each in run.answers), default=0.0)
    if late > LATE_MS:
        yield f"The client sent a request up to {late:,.0f} ms after it was due: this machine was too busy."
    if not run.samples:
        yield "The endpoint told nothing of its replicas (/ready)."
