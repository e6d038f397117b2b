"""A picture of a test over time: what came, times to first and between tokens, tokens, replicas and queue, errors."""

import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from loadtest.load import report
from loadtest.load.record import Run
from loadtest.load.report import Bin

# Okabe and Ito's colours, told apart by everybody, with different dashes and fills besides.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GOOD, LATE, FAILED, GREY, LIGHT = "#009E73", "#E69F00", "#D55E00", "#999999", "#CCCCCC"


def draw(run: Run, file: Path) -> None:
    """As .png, .svg, …"""
    file.parent.mkdir(parents=True, exist_ok=True)
    _save(run, file, format=file.suffix[1:], dpi=110)


def svg(run: Run) -> str:
    """To stand in a page."""
    target = io.StringIO()
    _save(run, target, format="svg", metadata={"Date": None})
    text = target.getvalue()
    return text[text.index("<svg") :]


def _save(run: Run, target: Any, **options: Any) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bins = report.bins(run)
    figure, axes = pyplot.subplots(3, 2, figsize=(11.5, 9.2), sharex=True, layout="constrained")
    slo = run.scenario.target
    _came(axes[0][0], bins)
    _times(axes[0][1], run, "ttft", "time to the first token, s", slo.ttft_ms, 1000)
    _times(axes[1][0], run, "itl", "time between an answer's tokens, ms", slo.itl_ms, 1)
    _tokens(axes[1][1], run)
    _replicas(axes[2][0], run)
    _errors(axes[2][1], bins)
    for axis in axes.flat:
        axis.grid(alpha=0.3, linewidth=0.5)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlim(0, bins[-1].at + bins[-1].width)
        axis.axvline(run.seconds, color=GREY, linewidth=0.8, linestyle=":")
    for axis in axes[-1]:
        axis.set_xlabel("s; requests came until the dotted line, and count when they came")
    verdict = "target met" if report.met(run) else "target missed"
    figure.suptitle(f"{run.name}: {run.scenario.what} — {verdict}", fontsize=11)
    figure.savefig(target, **options)
    pyplot.close(figure)


def _legend(axis: Any, **options: Any) -> None:
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, fontsize=8, loc="upper left", **options)
    # Room for it above what is drawn.
    axis.set_ylim(0, max(axis.get_ylim()[1], 1e-9) * 1.25)


def _title(axis: Any, text: str) -> None:
    axis.set_title(text, fontsize=10, loc="left")


def _came(axis: Any, bins: Sequence[Bin]) -> None:
    _title(axis, "requests/s that came, by what became of them")
    parts: list[tuple[str, str, Callable[[Bin], int]]] = [
        ("good", GOOD, lambda each: each.good),
        ("late or slow", LATE, lambda each: each.requests - each.failed - each.good),
        ("failed", FAILED, lambda each: each.failed),
    ]
    _stack(axis, bins, [(name, colour, [value(each) / each.width for each in bins]) for name, colour, value in parts])


def _errors(axis: Any, bins: Sequence[Bin]) -> None:
    _title(axis, "failed requests/s, by kind")
    kinds = list(dict.fromkeys(kind for each in bins for kind in each.errors))
    if not kinds:
        axis.text(0.5, 0.5, "no request failed", transform=axis.transAxes, ha="center", va="center", color=GREY)
        axis.set_yticks([])
        return
    colours = [*COLOURS, *[GREY] * len(kinds)]
    _stack(
        axis,
        bins,
        [
            (kind, colour, [each.errors.get(kind, 0) / each.width for each in bins])
            for kind, colour in zip(kinds, colours, strict=False)
        ],
    )


def _stack(axis: Any, bins: Sequence[Bin], parts: Sequence[tuple[str, str, Sequence[float]]]) -> None:
    below = [0.0] * len(bins)
    for name, colour, values in parts:
        if any(values):
            at, width = [each.at for each in bins], bins[0].width
            axis.bar(at, values, width, bottom=below, color=colour, label=name, align="edge", linewidth=0)
            below = [a + b for a, b in zip(below, values, strict=True)]
    _legend(axis, ncols=2)


def _of_traffic(run: Run) -> Iterator[tuple[str, str, list[Bin]]]:
    for traffic, colour in zip(run.scenario.traffic, COLOURS * len(run.scenario.traffic), strict=False):
        yield traffic.name, colour, report.bins(run, traffic.name)


def _times(axis: Any, run: Run, what: str, title: str, promised: float, per: float) -> None:
    """``what``: ttft or itl. ``per``: ms of the axis's unit."""
    _title(axis, f"{title}: median, and dashed p99")
    for name, colour, bins in _of_traffic(run):
        for share, style, width in (("p50", "-", 1.8), ("p99", "--", 1.1)):
            values = [(each.at + each.width / 2, getattr(each, f"{what}_{share}")) for each in bins]
            shown = [(at, value / per) for at, value in values if value is not None]
            axis.plot(
                [at for at, _ in shown],
                [value for _, value in shown],
                style,
                color=colour,
                linewidth=width,
                marker=".",
                markersize=4,
                label=name if style == "-" and shown else None,
            )
    axis.axhline(promised / per, color=FAILED, linewidth=0.9, linestyle="-.", label="target")
    _legend(axis, ncols=4)


def _tokens(axis: Any, run: Run) -> None:
    _title(axis, "tokens/s of answers")
    for name, colour, bins in _of_traffic(run):
        axis.step(
            [each.at for each in bins],
            [each.tokens_s for each in bins],
            where="post",
            color=colour,
            label=name,
            linewidth=1.5,
        )
    _legend(axis, ncols=3)


def _replicas(axis: Any, run: Run) -> None:
    """Replicas on the left, the queue on the right."""
    _title(axis, "replicas (left); requests that wait, as /ready says (right)")
    right = axis.twinx()
    queues = report.queues(run)
    right.stackplot(
        [each.at for each in queues],
        [each.held for each in queues],
        [each.waiting for each in queues],
        step="post",
        colors=(GREY, LIGHT),
        linewidth=0,
        labels=("wait at gateways", "wait in engines"),
    )
    models = list(dict.fromkeys(sample.model for sample in run.samples))
    for model, colour, style in zip(models, COLOURS * len(models), ("-", "--", ":") * len(models), strict=False):
        samples = [sample for sample in run.samples if sample.model == model]
        axis.step(
            [sample.at for sample in samples],
            [sample.replicas for sample in samples],
            where="post",
            color=colour,
            linestyle=style,
            linewidth=1.8,
            label=model,
        )
    axis.set_zorder(right.get_zorder() + 1)
    axis.patch.set_visible(False)
    right.spines["top"].set_visible(False)
    for each in (axis, right):
        each.yaxis.get_major_locator().set_params(integer=True)
    axis.set_ylim(0, max((sample.replicas for sample in run.samples), default=1) * 1.5 + 0.2)
    right.set_ylim(0, max(1.0, right.get_ylim()[1]) * 1.5)
    handles, labels = (
        a + b for a, b in zip(axis.get_legend_handles_labels(), right.get_legend_handles_labels(), strict=True)
    )
    axis.legend(handles, labels, frameon=False, fontsize=8, loc="upper left", ncols=2)
