"""The command: python -m loadtest.load --help"""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from loadtest.about import ROOT
from loadtest.endings import fail
from loadtest.load import lengths as quantiles
from loadtest.load import outputs, plot, record, scenario
from loadtest.load.scenario import ScenarioFault
from loadtest.scaling import traces
from loadtest.scaling.scenarios import HOUR_S, TRACES
from serve_app import status
from serve_app.endpoint import EndpointError

MODULE = "loadtest.load"
LOCUSTFILE = ROOT / "loadtest" / "locustfile.py"

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)
console = Console(width=None if Console().is_terminal else 120)


@app.command()
def run(
    name: Annotated[str, typer.Argument(help="One of `scenarios`, or a file.")] = "local",
    url: Annotated[str, typer.Option(help="The endpoint, with or without /v1.")] = "http://127.0.0.1:8000",
    trace: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help=f"Folder of Azure's traces; `${TRACES}` is one."),
    ] = None,
    speed: Annotated[float, typer.Option(min=0.001, help="So many times as fast as the trace.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of arrivals, lengths and texts.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = outputs.FOLDER,
) -> None:
    """Run a scenario on locust, headless, with progress; write a report as HTML,
    PNG and JSON.

    With --trace the requests of all traffic that has a rate come when and as
    long as those of Azure's public traces of a chat and of a code service
    (AzureLLMInferenceDataset2023 of github.com/Azure/AzurePublicDataset),
    instead of at random.

    Exits 0 where the scenario's target (SLO) is met, 1 where it is missed, 2
    for an input that cannot be run or where nothing was answered, 130 where it
    was interrupted. The API key, if any, is taken from MODELYARD_API_KEY.
    """
    try:
        scenario.read(scenario.find(name))
        status.read(url)
    except (ScenarioFault, OSError, EndpointError) as error:
        fail(console, MODULE, str(error), 2)
    options = ["--scenario", name, "--host", url, "--seed", str(seed), "--out", str(out)]
    if trace is not None:
        options += ["--trace", str(trace), "--speed", str(speed)]
    locust = [sys.executable, "-m", "locust", "-f", os.path.relpath(LOCUSTFILE), "--headless", "--only-summary"]
    os.execv(sys.executable, [*locust, "--loglevel", "WARNING", *options])


@app.command()
def show(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="The JSON that `run` wrote.")],
    picture: Annotated[
        Path | None, typer.Option(help="Draw it here, as .png or .svg, instead of beside the file.")
    ] = None,
) -> None:
    """Print a run's tables again, and draw its picture and page anew."""
    try:
        found = record.read(file)
    except ValueError as error:
        fail(console, MODULE, str(error), 2)
    if picture is not None:
        plot.draw(found, picture)
    else:
        outputs.draw(found, file)
    outputs.show(file, console)


@app.command()
def scenarios() -> None:
    """List the scenarios that come with the load tests."""
    table = Table("name", "s", "what", box=None)
    for name, file in scenario.shipped().items():
        found = scenario.read(file)
        table.add_row(name, f"{found.seconds:g}", found.what)
    console.print(table)


@app.command()
def lengths(
    trace: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder of Azure's traces.")],
    out: Annotated[Path, typer.Option(help="Where the table goes.")] = quantiles.FILE,
) -> None:
    """Write the table of lengths that synthetic load is drawn from."""
    try:
        found = traces.azure(trace, 1.0, HOUR_S)
    except (OSError, KeyError, ValueError) as error:
        fail(console, MODULE, f"{trace} has none of Azure's traces that can be read: {error}", 2)
    out.write_text(json.dumps(quantiles.table(found), indent=1) + "\n")


if __name__ == "__main__":
    app()
