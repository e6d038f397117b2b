"""Draw the dashboard's panels from a Prometheus: the same queries that Grafana would ask.

python -m loadtest.dashboard http://127.0.0.1:9090 --minutes 10 --plot dashboard.png
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from loadtest.about import ROOT

FILE = ROOT / "deployments" / "grafana" / "modelyard.json"
POINTS = 200
COLUMNS = 3
ROOM_FOR_NAMES = 1.4
UNITS = {"s": "seconds", "percentunit": "share", "reqps": "per second", "short": ""}


@dataclass(frozen=True)
class Query:
    """``legend``: Grafana's template for the name of a series, such as ``{{model}} p99``."""

    expr: str
    legend: str

    def filled(self, model: str = ".*", window: str = "1m") -> str:
        """The expression with values for Grafana's variables. ``window``: what its rates look back."""
        return self.expr.replace("$model", model).replace("$__rate_interval", window)

    def name(self, labels: dict[str, str]) -> str:
        name = self.legend
        for label, value in labels.items():
            name = name.replace("{{" + label + "}}", value)
        return name


@dataclass(frozen=True)
class Panel:
    """``unit``: Grafana's word for it. ``row``: the title of the row it is in."""

    row: str
    title: str
    unit: str
    queries: tuple[Query, ...]


def panels(dashboard: dict[str, Any]) -> list[Panel]:
    """Those that show data, in the dashboard's order."""
    found, row = [], ""
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
            continue
        queries = tuple(Query(target["expr"], target["legendFormat"]) for target in panel["targets"])
        found.append(Panel(row, panel["title"], panel["fieldConfig"]["defaults"]["unit"], queries))
    return found


@dataclass(frozen=True)
class Series:
    """``points``: Unix time in seconds, and the value then."""

    name: str
    points: tuple[tuple[float, float], ...]


def history(client: httpx.Client, panel: Panel, start: float, end: float, window: str) -> list[Series]:
    """What a panel's queries found between two Unix times in seconds. Raises ``httpx.HTTPError``."""
    found = []
    for query in panel.queries:
        times = {"start": start, "end": end, "step": (end - start) / POINTS}
        answer = client.get("/api/v1/query_range", params={"query": query.filled(window=window), **times})
        for series in answer.raise_for_status().json()["data"]["result"]:
            points = tuple((float(at), float(value)) for at, value in series["values"])
            found.append(Series(query.name(series["metric"]), points))
    return found


def draw(shown: Sequence[tuple[Panel, list[Series]]], start: float, end: float, title: str, file: Path) -> None:
    """One small plot per panel; the time axis is 0 at ``start``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = -(-len(shown) // COLUMNS)
    figure, axes = pyplot.subplots(
        rows, COLUMNS, figsize=(5 * COLUMNS, 2.7 * rows), sharex=True, squeeze=False, layout="constrained"
    )
    for axis, (panel, found) in zip(axes.flat, shown, strict=False):
        for series in found:
            minutes = [(at - start) / 60 for at, _ in series.points]
            axis.plot(minutes, [value for _, value in series.points], label=series.name, linewidth=1.4)
        axis.set_title(f"{panel.row}: {panel.title}", fontsize=10, loc="left")
        axis.set_xlim(0, (end - start) / 60)
        axis.tick_params(labelsize=8, labelbottom=True)
        axis.spines[["top", "right"]].set_visible(False)
        if not found:
            axis.set_yticks([])
            axis.text(0.5, 0.5, "nothing in this time", transform=axis.transAxes, ha="center", color="grey")
            continue
        axis.set_ylabel(UNITS[panel.unit], fontsize=8)
        axis.grid(alpha=0.3, linewidth=0.5)
        highest = 1 if panel.unit == "percentunit" else max(axis.get_ylim()[1], 1e-3)
        axis.set_ylim(0, highest)
        axis.set_yticks([tick for tick in axis.get_yticks() if tick <= highest])
        axis.set_ylim(0, ROOM_FOR_NAMES * highest)
        axis.legend(frameon=False, fontsize=7, loc="upper left", ncols=2)
    for axis in axes.flat[len(shown) :]:
        axis.set_visible(False)
    figure.suptitle(title, fontsize=11)
    figure.supxlabel("minutes", fontsize=9)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=80)
    pyplot.close(figure)


def main(
    prometheus: Annotated[str, typer.Argument(help="Where Prometheus answers.")] = "http://127.0.0.1:9090",
    minutes: Annotated[float, typer.Option(help="How far to look back.")] = 10,
    window: Annotated[str, typer.Option(help="What rates look back: four scrapes, as Grafana takes them.")] = "1m",
    plot: Annotated[Path, typer.Option(help="The picture, as .png or .svg; needs matplotlib.")] = Path("dashboard.png"),
) -> None:
    """Draw every panel of the dashboard for the last minutes."""
    end = time.time()
    start = end - 60 * minutes
    with httpx.Client(base_url=prometheus, timeout=30, trust_env=False) as client:
        found = [(panel, history(client, panel, start, end, window)) for panel in panels(json.loads(FILE.read_text()))]
    draw(
        found, start, end, "The dashboard's queries, asked of a Prometheus and drawn with matplotlib: not Grafana", plot
    )
    typer.echo(plot)


if __name__ == "__main__":
    typer.run(main)
