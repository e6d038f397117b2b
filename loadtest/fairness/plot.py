"""A picture of waits over time: one row per scenario, in order of arrival on the left and fair on the right."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from loadtest.fairness.report import Order, Round

# Okabe and Ito's colours, told apart by everybody, with different marks besides.
LOOKS = (("#D55E00", ".", 18), ("#0072B2", "o", 22), ("#009E73", "^", 24))
TITLES: Mapping[Order, str] = {"arrival": "in order of arrival", "fair": "fair between keys"}


def draw(rounds: Sequence[Round], file: Path, titles: Mapping[str, str]) -> None:
    """Of every scenario the round in which the machine was least busy; ``titles``: of the scenarios."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    busy = {(one.scenario, one.number): 0.0 for one in rounds}
    for one in rounds:
        busy[one.scenario, one.number] += one.load_average
    calm = {name: min((load, number) for (of, number), load in busy.items() if of == name)[1] for name in titles}
    drawn = {(one.scenario, one.order): one for one in rounds if one.number == calm[one.scenario]}
    figure, axes = pyplot.subplots(
        len(titles), 2, figsize=(10, 3.4 * len(titles)), sharex=True, sharey="row", squeeze=False, layout="constrained"
    )
    for row, (scenario, title) in enumerate(titles.items()):
        for column, order in enumerate(TITLES):
            axis, shown = axes[row][column], drawn[scenario, order]
            for (user, answers), (colour, mark, size) in zip(shown.answers.items(), LOOKS, strict=True):
                came = [answer for answer in answers if answer.came >= 0]
                axis.scatter(
                    [answer.came / 1000 for answer in came],
                    [answer.wait / 1000 for answer in came],
                    color=colour,
                    marker=mark,
                    s=size,
                    linewidth=0,
                    alpha=0.8,
                    label=user,
                )
            axis.set_title(f"{title}: {TITLES[order]}", fontsize=10, loc="left")
            axis.grid(alpha=0.3, linewidth=0.5)
            axis.spines[["top", "right"]].set_visible(False)
        axes[row][0].set_ylabel("s until the first token")
        axes[row][1].legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        axes[row][0].set_ylim(0, axes[row][0].get_ylim()[1])  # shared, so only once everything is drawn
    for axis in axes[-1]:
        axis.set_xlabel("s: when the request came")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
