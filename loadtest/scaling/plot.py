"""A picture of a few scenarios over time: one column each, with what arrived, the replicas, and the misses."""

from collections.abc import Sequence
from pathlib import Path

from loadtest.scaling.replay import SAMPLE_S
from loadtest.scaling.report import Verdict, told
from loadtest.scaling.study import SERVE_DEFAULT, Choice, Found, Modelyards

# Okabe and Ito's colours, told apart by everybody, with different dashes and widths besides.
OURS, DEFAULT, TUNED, WORK = "#0072B2", "#D55E00", "#009E73", "#BBBBBB"


SHOWN = ("burst", "diurnal", "azure-5x")


def choices(verdict: Verdict) -> tuple[Choice, ...]:
    """The systems that are drawn: Serve's policy as it comes, at its best (no more GPU-hours if it can), and ours."""
    return SERVE_DEFAULT, (verdict.equal or verdict.best).choice, Modelyards()


def draw(verdicts: Sequence[Verdict], found: Sequence[Found], file: Path, start_s: float) -> None:
    """Those of ``SHOWN`` of which ``found`` has the course over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    seen = {(one.job.scenario, one.job.choice): one.series for one in found if one.series is not None}
    verdicts = [verdict for verdict in verdicts if (verdict.scenario, Modelyards()) in seen]
    figure, axes = pyplot.subplots(
        3, len(verdicts), figsize=(4.6 * len(verdicts), 7.2), sharex="col", squeeze=False, layout="constrained"
    )
    for column, verdict in enumerate(verdicts):
        default, tuned, modelyard = choices(verdict)
        systems = [
            (default, "Serve's policy, defaults", DEFAULT, "-", 1.2),
            (tuned, "Serve's policy, tuned (see below)", TUNED, "--", 1.4),
            (modelyard, "Modelyard, defaults", OURS, "-", 2.0),
        ]
        ours = seen[verdict.scenario, Modelyards()]
        minutes = [at * SAMPLE_S / 60 for at in range(len(ours.arrivals))]
        top, middle, bottom = (axes[row][column] for row in range(3))
        top.fill_between(minutes, ours.arrivals, color=WORK, linewidth=0)
        middle.fill_between(minutes, _smooth(ours.work, 6), color=WORK, linewidth=0, label="work, in busy replicas")
        for choice, name, colour, dash, width in systems:
            course = seen[verdict.scenario, choice]
            middle.step(
                minutes, course.running, where="post", color=colour, linestyle=dash, linewidth=width, label=name
            )
            per_minute = _smooth(course.misses, 6)
            bottom.plot(minutes, [60 / SAMPLE_S * m for m in per_minute], color=colour, linestyle=dash, linewidth=width)
        top.set_title(verdict.scenario, fontsize=11, fontweight="bold", loc="left")
        rows = [("Modelyard", verdict.modelyard), ("Serve, defaults", verdict.default)]
        rows.append((f"Serve, {told(tuned)}", verdict.rows[tuned]))
        text = "\n".join(f"{name}: {row.misses:.2f} % late, {row.gpu_hours:.1f} GPU-h" for name, row in rows)
        bottom.set_xlabel(f"minutes\n\n{text}", fontsize=8.5)
        for axis in (top, middle, bottom):
            axis.set_ylim(0, max(1.0, axis.get_ylim()[1]))
            axis.margins(x=0)
            axis.grid(alpha=0.3, linewidth=0.5)
            axis.spines[["top", "right"]].set_visible(False)
    for row, label in enumerate(("requests/s arriving", "replicas running", "late or refused, per minute")):
        axes[row][0].set_ylabel(label)
    handles, labels = axes[1][0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        title=f"A replica takes {start_s:g} s to start. Late: first token after 2 s + 0.5 ms per prompt token.",
        loc="outside upper center",
        ncols=4,
        frameon=False,
        fontsize=9,
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def _smooth(values: Sequence[float], over: int) -> list[float]:
    """Means of the last ``over``."""
    return [sum(values[max(0, at - over + 1) : at + 1]) / min(over, at + 1) for at in range(len(values))]
