"""A picture of a run: throughput, time to the first token, time per token and CPU over the number of streams, or, where
all loads have a rate, over that."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from loadtest.overhead.client import Level
from loadtest.overhead.report import Figures, Sample, by_load
from loadtest.overhead.targets import ROLES

# Okabe and Ito's colours, told apart by everybody, with different marks besides.
LOOKS = (
    *(("#000000", "s"), ("#0072B2", "o"), ("#D55E00", "^"), ("#009E73", "D")),
    *(("#CC79A7", "v"), ("#E69F00", "P"), ("#56B4E9", "X"), ("#777777", "*")),
)
PARTS = ("#0072B2", "#999999", "#D55E00", "#E69F00", "#DDDDDD")


def draw(samples: Sequence[Sample], file: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    closed = [one for one in samples if one.streams]
    found = by_load(closed or samples)
    targets = list(dict.fromkeys(one.target for one in samples))
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 7), layout="constrained")

    def lines(axis: Any, name: str, *shown: tuple[str, Callable[[Figures], float]]) -> None:
        for target, (colour, mark) in zip(targets, LOOKS * len(targets), strict=False):
            mine = [(level.streams or level.rate, of) for (level, whose), of in found.items() if whose == target]
            for style, value in shown:
                axis.plot(
                    [amount for amount, _ in mine],
                    [value(of) for _, of in mine],
                    style,
                    color=colour,
                    marker=mark,
                    markersize=5,
                    label=target if style == "-" else None,
                )
        axis.set_title(name, fontsize=10, loc="left")
        axis.set_xscale("log", base=2)
        levels = sorted({level.streams or level.rate for level, _ in found})
        axis.set_xticks(levels, [f"{level:g}" for level in levels])
        axis.set_xlabel("streams at once" if closed else "requests offered per second")
        if axis.get_yscale() == "linear":
            axis.set_ylim(bottom=0)

    axes[0][1].set_yscale("log")
    axes[0][1].yaxis.set_major_formatter("{x:g}")
    lines(axes[0][0], "tokens/s", ("-", lambda of: of.tok_s))
    lines(axes[0][1], "TTFT, ms: p50 and (dashed) p99", ("-", lambda of: of.ttft_p50), ("--", lambda of: of.ttft_p99))
    lines(axes[1][0], "TPOT p50, ms", ("-", lambda of: of.tpot_p50))
    axes[0][0].legend(frameon=False, fontsize=9)
    _bars(axes[1][1], found, targets)
    for axis in axes.flat:
        axis.grid(alpha=0.3, linewidth=0.5)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def _bars(axis: Any, found: dict[tuple[Level, str], Figures], targets: Sequence[str]) -> None:
    """CPU by role, under the largest load."""
    most = max(level for level, _ in found)
    shown = [target for target in targets if (most, target) in found]
    left = [0.0] * len(shown)
    for role, colour in zip(ROLES, PARTS, strict=True):
        values = [found[most, target].cpu.get(role, 0.0) for target in shown]
        if any(values):
            axis.barh(shown, values, left=left, color=colour, label=role)
            left = [a + b for a, b in zip(left, values, strict=True)]
    axis.invert_yaxis()
    axis.set_title(f"CPU, ms per 1,000 tokens, load {most}", fontsize=10, loc="left")
    axis.locator_params(axis="x", nbins=5)
    axis.legend(frameon=False, fontsize=8, ncol=5, loc="upper center", bbox_to_anchor=(0.4, -0.08))
