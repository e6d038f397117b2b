"""The command: python -m loadtest.fairness --help"""

import json
import multiprocessing
import os
import signal
import tempfile
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadtest.about import ROOT, about_run
from loadtest.clusters import MODEL, ClusterFault, applications, cluster, teller
from loadtest.endings import fail, heed_signals
from loadtest.fairness import load as client
from loadtest.fairness import plot, report, simulation
from loadtest.fairness.load import Answer, Load, User
from loadtest.fairness.report import ORDERS, Order, Round
from loadtest.figures import MODELYARD
from loadtest.streams import StreamFault
from serve_app import keys
from serve_app.config import CARD_DEPLOYMENT, GATEWAY_DEPLOYMENT
from serve_app.keys import Priority
from serve_app.local_cluster import LocalClusterError
from serve_app.ray_api import RayApiError

MODULE = "loadtest.fairness"
# What all send where nobody is told apart: within a key the gateway serves in order of arrival.
EVERYBODY = "everybody"

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)
console = Console(width=None if Console().is_terminal else 120)


@dataclass(frozen=True)
class Scenario:
    """``users``: name → requests that it always has open, and its key's priority."""

    title: str
    users: dict[str, tuple[int, Priority]]

    @property
    def told(self) -> str:
        return f"{self.title}; open: {', '.join(f'{user} {at_once}' for user, (at_once, _) in self.users.items())}"


SCENARIOS = {
    "flood": Scenario("one key floods", {"flood": (200, "normal"), "steady": (1, "normal"), "third": (2, "normal")}),
    "priority": Scenario("three classes", {"high": (48, "high"), "normal": (48, "normal"), "low": (48, "low")}),
}


@dataclass(frozen=True)
class Setting:
    """The model and the gateway under load; see the options of ``run``. ``alone_s``: of each user's turn alone."""

    slots: int
    overcommit: int
    max_waiting: int
    seconds: float
    alone_s: float
    first_token_s: float = 0.1
    interval_s: float = 0.02


@app.command()
def run(
    only: Annotated[
        list[str] | None, typer.Option("--scenario", help="flood or priority, may be repeated; both without it.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each scenario.")] = 5,
    seconds: Annotated[float, typer.Option(min=5, help="Of each load with all users, s.")] = 15.0,
    slots: Annotated[int, typer.Option(min=1, help="The engine's max_num_seqs.")] = 32,
    overcommit: Annotated[int, typer.Option(min=0, help="The model's own, untouched: 8.")] = 8,
    max_waiting: Annotated[int, typer.Option(min=0, help="Requests that may wait at the gateway.")] = 128,
    out: Annotated[Path | None, typer.Option(help="Raw answers. Default: a dated file in loadtest/results.")] = None,
) -> None:
    """Three keys at a model that is full: what each gets and how long it waits.

    A load test on Ray Serve: HAProxy, the gateway, a keys file, and one
    replica with the scripted engine. In each round of a scenario every user
    asks alone; then all ask at once with the same key, which the gateway
    serves in order of arrival; then each with a key of its own.

    flood: one key keeps 200 requests open, one keeps one, one keeps two.
    priority: keys of the classes high, normal and low keep 48 open each.

    Takes a quarter of an hour, two cores and 2 GB. Exits 2 where an answer was
    incomplete or anything but 200 or 429: then there are no figures.
    """
    heed_signals()
    if unknown := sorted(set(only or ()) - SCENARIOS.keys()):
        fail(console, MODULE, f"no scenario {', '.join(unknown)}; there are {', '.join(SCENARIOS)}", 2)
    names = [name for name in SCENARIOS if name in (only or SCENARIOS)]
    setting = Setting(slots, overcommit, max_waiting, seconds, alone_s=max(5.0, seconds / 3))
    out = out or ROOT / "loadtest" / "results" / f"fairness-{datetime.now(UTC):%Y-%m-%dT%H%M}.jsonl"
    about = about_run(MODULE) | {"setting": asdict(setting)}
    try:
        taken = measure(setting, names, rounds)
    except KeyboardInterrupt:
        fail(console, MODULE, "interrupted; nothing was written", 130)
    except (StreamFault, ClusterFault, LocalClusterError, RayApiError) as error:
        fail(console, MODULE, str(error), 2)
    report.write(out, about, taken)
    show(out)


@app.command()
def show(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="What `run` wrote.")],
    picture: Annotated[
        Path | None, typer.Option(help="Draw the waits of one round over time, as .png or .svg; needs matplotlib.")
    ] = None,
) -> None:
    """Print the tables of a run again, and draw it."""
    _, taken = report.read(file)
    names = dict.fromkeys(one.scenario for one in taken)
    for name in names:
        try:
            console.print(report.table(taken, name, SCENARIOS[name].told))
        except ValueError as error:
            fail(console, MODULE, f"the loads were too short: {error}", 2)
    if picture is not None:
        plot.draw(taken, picture, {name: SCENARIOS[name].title for name in names})
    console.print(f"Raw answers: {os.path.relpath(file)}", soft_wrap=True, highlight=False)


@app.command()
def simulate(
    slots: Annotated[int, typer.Option(min=1, help="Requests that the model serves at once.")] = 64,
    flood: Annotated[int, typer.Option(min=0, help="Requests that the flooding key always has open.")] = 500,
    tokens_s: Annotated[float, typer.Option(min=1, help="Tokens per second of each request.")] = 50.0,
    pause_s: Annotated[float, typer.Option(min=0, help="Pause of the polite key after each answer, s.")] = 1.0,
    requests: Annotated[int, typer.Option(min=20, help="Requests of the polite key.")] = 200,
) -> None:
    """The queue alone, at a size that no load test reaches: a polite key beside a
    flooding one. Seeded, no cluster, a second.
    """
    console.print(simulation.table(simulation.Load(slots, tokens_s, flood, pause_s, requests)))


def measure(setting: Setting, names: list[str], rounds: int) -> list[Round]:
    """Start the system and take ``rounds`` of each scenario."""
    taken: list[Round] = []
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fairness-")))
        made = {user: keys.make(user) for user in (EVERYBODY, *(u for name in names for u in SCENARIOS[name].users))}
        priorities = {user: given for name in names for user, (_, given) in SCENARIOS[name].users.items()}
        entries = [entry | {"priority": priorities.get(user, "normal")} for user, (_, entry) in made.items()]
        file = home / "keys.yaml"
        file.write_text(json.dumps({"keys": entries}))  # which is YAML too
        secrets = {user: secret for user, (secret, _) in made.items()}
        # spawn: the client inherits nothing of this process but its code.
        # Ctrl-C is for us; its streams end with the cluster.
        context, ignore = multiprocessing.get_context("spawn"), (signal.SIGINT, signal.SIG_IGN)
        pool = stack.enter_context(ProcessPoolExecutor(1, context, initializer=signal.signal, initargs=ignore))
        wanted, tell = system(setting, file), teller(console, MODELYARD.title)
        running = stack.enter_context(cluster(MODELYARD, home, wanted, tell, secrets[EVERYBODY]))
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("loads", total=rounds * len(names) * len(ORDERS))
            for number in range(1, rounds + 1):
                for name in names:
                    for order in ORDERS:
                        progress.update(bar, description=f"loads (round {number}, {name}, {order})")
                        taken.append(take_round(setting, name, number, order, running.port, secrets, pool))
                        progress.advance(bar)
    return taken


def system(setting: Setting, keys_file: Path) -> list[dict[str, Any]]:
    """What Serve runs: the relay's cost is measured on the same, but for the keys and the bounds."""
    gateway, model = applications(MODELYARD, setting.slots)
    gateway["deployments"] = [{"name": GATEWAY_DEPLOYMENT, "user_config": {"keys_file": str(keys_file)}}]
    model["args"]["overcommit"] = setting.overcommit
    limits = {"max_waiting": setting.max_waiting}
    model["deployments"] = [{"name": CARD_DEPLOYMENT, "user_config": {"limits": limits}}]
    return [gateway, model]


def take_round(
    setting: Setting, scenario: str, number: int, order: Order, port: int, secrets: dict[str, str], pool: Executor
) -> Round:
    busy = os.getloadavg()[0]
    seconds = setting.alone_s if order == "alone" else setting.seconds
    key = {user: secrets[EVERYBODY if order == "arrival" else user] for user in SCENARIOS[scenario].users}
    users = [User(user, at_once, key[user]) for user, (at_once, _) in SCENARIOS[scenario].users.items()]
    answers: dict[str, list[Answer]] = {}
    for together in [[user] for user in users] if order == "alone" else [users]:
        load = Load(port, MODEL, tuple(together), seconds, setting.first_token_s, setting.interval_s, seed=number)
        answers |= pool.submit(client.run, load).result()
    return Round(scenario, number, order, seconds, busy, answers)


if __name__ == "__main__":
    app()
