"""``modelyard serve`` and ``modelyard stop``: plan and deploy a file on a Ray of this machine, follow it, end it.

Printing and order of steps only; ``local_cluster`` knows the processes and ``ray_api`` the cluster's API.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
from rich.console import Console
from rich.live import Live
from rich.table import Table

from serve_app import demo_model, local_cluster
from serve_app.config import GATEWAY_IMPORT_PATH, MODEL_IMPORT_PATH
from serve_app.endpoint import KEY_VARIABLE
from serve_app.keys import KEYS_VARIABLE
from serve_app.local_cluster import LocalClusterError, Session
from serve_app.planning.live import snapshot
from serve_app.planning.reasons import waiting
from serve_app.ray_api import Application, RayApi, RayApiError, ServeState

STOP_GRACE_S = 20.0
READY_TIMEOUT_S = 60.0
# An application that does not run after so long is asked about in the cluster: perhaps there is no room for it.
ROOM_AFTER_S = 5.0
# Polls of the dashboard that may fail in a row before we believe it: it is one busy Python process.
PATIENCE = 5


class ServeError(RuntimeError):
    """Serving failed; the message says why."""


@dataclass(frozen=True)
class Cluster:
    """``session``: set where Modelyard started this Ray. ``fresh``: this very command did."""

    api: RayApi
    session: Session | None
    fresh: bool


# What the file says


def application_names(config: Mapping[str, Any]) -> list[str]:
    return [str(application["name"]) for application in config.get("applications") or ()]


def uses_demo(config: Mapping[str, Any]) -> bool:
    """Whether a model runs the demo model, or borrows its tokenizer (``shape`` without a ``tokenizer``)."""
    sources = [(_args(a).get("source") or {}) for a in config.get("applications") or ()]
    return any(s.get("demo") or (s.get("shape") and not s.get("tokenizer")) for s in sources)


def http_port(config: Mapping[str, Any]) -> int:
    return int((config.get("http_options") or {}).get("port") or 8000)


def url_of(state: ServeState, config: Mapping[str, Any]) -> str:
    """The endpoint. What runs counts: Serve keeps its first host and port for as long as it runs."""
    host = state.http_host or (config.get("http_options") or {}).get("host") or local_cluster.HOST
    prefix = next(
        (
            a.get("route_prefix")
            for a in config.get("applications") or ()
            if a.get("import_path") == GATEWAY_IMPORT_PATH
        ),
        None,
    )
    host = {"0.0.0.0": local_cluster.HOST, "::": "[::1]"}.get(host, host)
    return f"http://{host}:{state.http_port or http_port(config)}{(prefix or '/').rstrip('/')}"


def model_names(config: Mapping[str, Any]) -> list[str]:
    return [str(a["name"]) for a in config.get("applications") or () if a.get("import_path") == MODEL_IMPORT_PATH]


def curl_lines(config: Mapping[str, Any], url: str) -> list[str]:
    """For each model one command that can be pasted into a shell."""
    lines = []
    key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if _asks_for_keys(config) else ""
    for application in config.get("applications") or ():
        if application.get("import_path") != MODEL_IMPORT_PATH:
            continue
        body: dict[str, Any] = {"model": application["name"]}
        if _embeds(_args(application)):
            path, body = "/v1/embeddings", body | {"input": "Hello."}
        else:
            message = {"role": "user", "content": "What is the capital of France?"}
            path, body = "/v1/chat/completions", body | {"messages": [message], "max_tokens": 32, "temperature": 0}
        lines.append(f"curl {url}{path}{key} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}")
    return lines


def _asks_for_keys(config: Mapping[str, Any]) -> bool:
    gateways = (a for a in config.get("applications") or () if a.get("import_path") == GATEWAY_IMPORT_PATH)
    deployments = (d for gateway in gateways for d in gateway.get("deployments") or ())
    return bool(os.environ.get(KEYS_VARIABLE)) or any(
        (d.get("user_config") or {}).get("keys_file") for d in deployments
    )


def _args(application: Mapping[str, Any]) -> Mapping[str, Any]:
    return application.get("args") or {}


def _embeds(args: Mapping[str, Any]) -> bool:
    engine = args.get("engine") or {}
    fake = (args.get("source") or {}).get("fake") or {}
    return engine.get("runner") == "pooling" or engine.get("convert") == "embed" or "embed" in (fake.get("tasks") or ())


# The two commands


def serve(file: Path, config: Mapping[str, Any], console: Console, *, gcs_port: int, dashboard_port: int) -> None:
    """Serve ``config``, which was read from ``file`` and checked, until Ctrl-C.

    Raises what went wrong, as where the cluster can never hold it, after stopping what this call started.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    if uses_demo(config):
        prepare_demo(console)
    cluster = _connect(config, console, gcs_port, dashboard_port)
    # On somebody else's Ray only a Serve that was not there before is ours to shut down.
    ours = cluster.session is not None or not cluster.api.state().running
    try:
        refuse_what_does_not_fit(_plan(file, cluster.api.address), console)
        _deploy(cluster, config, console)
        console.print(f"\nServing at [bold]{url_of(cluster.api.state(), config)}[/]; dashboard {cluster.api.address}")
        for line in curl_lines(config, url_of(cluster.api.state(), config)):
            console.print(f"\n{line}", soft_wrap=True, markup=False)
        console.print("\nCtrl-C stops it.")
        _watch(cluster, application_names(config), console)
    except KeyboardInterrupt:
        _stop(cluster, console, ours)
    except (ServeError, RayApiError):
        if cluster.fresh or cluster.session is None:
            _stop(cluster, console, ours)
        else:
            console.print("Ray runs on with what it still serves; `modelyard stop` ends it.")
        raise


def stop(console: Console) -> None:
    """End the Ray that ``modelyard serve`` started on this machine, and all that belongs to it."""
    session = local_cluster.load()
    if session is None:
        console.print("Nothing to stop: no Ray that `modelyard serve` started is known here.")
        return
    _stop(Cluster(RayApi(session.dashboard), session, fresh=False), console, ours=True)


def prepare_demo(console: Console) -> None:
    with console.status("demo model") as status:
        folder = demo_model.prepare(lambda line: status.update(line) if console.is_terminal else console.print(line))
    console.print(f"Demo model: {folder}", soft_wrap=True)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


# Steps


def _connect(config: Mapping[str, Any], console: Console, gcs_port: int, dashboard_port: int) -> Cluster:
    with local_cluster.alone():
        session = local_cluster.load()
        if session is not None:
            if local_cluster.running(session):
                console.print(f"Using the Ray that `modelyard serve` started before ({session.dashboard}).")
                return Cluster(RayApi(session.dashboard), session, fresh=False)
            local_cluster.end(session)  # what a crash left
        api = RayApi(os.environ.get("RAY_DASHBOARD_ADDRESS") or f"http://{local_cluster.HOST}:{dashboard_port}")
        if (version := api.version()) is not None:
            console.print(
                f"Using the Ray {version} at {api.address}, which Modelyard did not start and will not stop.",
                soft_wrap=True,
            )
            _refuse_to_delete(api.state(), config)
            return Cluster(api, None, fresh=False)
        ports = local_cluster.check_ports(http_port(config), gcs_port, dashboard_port)
        session = local_cluster.new_session(gcs_port, dashboard_port, ports)
        try:
            with console.status("starting Ray on this machine"):
                session = local_cluster.start(session, gcs_port, dashboard_port)
        except BaseException:
            local_cluster.end(session)
            raise
        console.print(f"Started Ray; dashboard {session.dashboard}")
        return Cluster(RayApi(session.dashboard), session, fresh=True)


def _refuse_to_delete(state: ServeState, config: Mapping[str, Any]) -> None:
    """A Serve config is the whole state: what it does not name is deleted. Not on a Ray that is not ours."""
    others = sorted({a.name for a in state.applications} - set(application_names(config)))
    if others:
        raise LocalClusterError(
            f"that Ray serves {', '.join(others)}, which the file does not name: deploying would delete "
            f"{'it' if len(others) == 1 else 'them'}. Add them to the file, or run `serve deploy` if that is meant"
        )


def _plan(file: Path, address: str) -> Mapping[str, Any] | None:
    """``modelyard plan``'s JSON for the cluster at ``address``; None where it cannot tell, which it says itself.

    In a process of its own, as the check: it imports Ray.
    """
    command = [sys.executable, "-m", "serve_app.cli", "plan", str(file), "--checked", "--json"]
    command += ["--cluster", "live", "--address", address]
    answer = subprocess.run(command, stdout=subprocess.PIPE, check=False).stdout
    try:
        plan: Mapping[str, Any] = json.loads(answer)
    except ValueError:
        return None
    return plan


def refuse_what_does_not_fit(plan: Mapping[str, Any] | None, console: Console) -> None:
    """ServeError: ``plan`` says that something does not fit at its fewest replicas, and no node will be added.

    What does not fit at max replicas, or is not known, is printed: it does not keep the rest from serving.
    """
    if plan is None:
        console.print("Whether the file fits was not checked.")
        return
    short = [problem for problem in plan["problems"] if problem["at"] == "min"]
    if short and not plan["nodes_are_added"]:
        raise ServeError("\n".join(["nothing was deployed: there is no room for all of it.", *map(_lacks, short)]))
    for problem in plan["problems"]:
        console.print(f"Warning: {_lacks(problem)}", soft_wrap=True, markup=False)
    if plan["problems"] and plan["nodes_are_added"]:
        console.print("Nodes are added to this cluster as they are needed; deploying.")


def _lacks(problem: Mapping[str, Any]) -> str:
    at = " at max" if problem["at"] == "max" else ""
    text = f"{problem['name']}: {problem['found']} of {problem['wanted']} replicas fit{at}. It {problem['why']}."
    return text + "".join(f"\n  would fit: {change}" for change in problem["changes"])


def _deploy(cluster: Cluster, config: Mapping[str, Any], console: Console) -> None:
    cluster.api.deploy(config)
    names = application_names(config)
    start = time.monotonic()
    shown = _Progress(console)
    failures = 0
    room = Room(cluster.api)
    with shown:
        while True:
            try:
                state, failures = cluster.api.state(), 0
            except RayApiError:
                failures += 1
                if failures > PATIENCE:
                    raise
                time.sleep(1)
                continue
            applications = [state.application(n) or Application(n, "NOT_STARTED", "", "") for n in names]
            applications = room.explain(applications)
            shown.update(applications, time.monotonic() - start)
            failed = [a for a in applications if a.status == "DEPLOY_FAILED"]
            if failed or all(a.status == "RUNNING" for a in applications):
                break
            time.sleep(0.5)
    if failed:
        raise ServeError("\n".join(f"{a.name} cannot be deployed:\n{a.message}" for a in failed))
    _await_endpoint(url_of(state, config), model_names(config))


class Room:
    """Says of applications that wait why there is no room for them: Serve's own message does not."""

    def __init__(self, api: RayApi, after_s: float = ROOM_AFTER_S) -> None:
        """``after_s``: how long an application may take to start before it is asked about, and between two looks."""
        self._api = api
        self._after_s = after_s
        self._at = time.monotonic()
        self._waiting: dict[str, str] = {}

    def explain(self, applications: list[Application]) -> list[Application]:
        waits = any(a.status == "DEPLOYING" for a in applications)
        if waits and time.monotonic() - self._at >= self._after_s:
            self._at = time.monotonic()
            with suppress(RayApiError):  # the next look will tell
                seen = snapshot(self._api)
                told = {name: waiting(want, seen.nodes, seen.free) for name, want in seen.waiting.items()}
                self._waiting = {name: why for name, why in told.items() if why}
        return [
            replace(a, message=self._waiting[a.name]) if a.status == "DEPLOYING" and a.name in self._waiting else a
            for a in applications
        ]


def _await_endpoint(url: str, models: list[str]) -> None:
    """Until the gateway answers and lists the models: it learns about them a moment after Serve has them."""
    if not models:
        return
    deadline = time.monotonic() + READY_TIMEOUT_S
    last = "no answer"
    while time.monotonic() < deadline:
        try:
            response = httpx.get(f"{url}/v1/models", trust_env=False, timeout=5)
            if response.status_code == httpx.codes.UNAUTHORIZED:
                return  # it asks for a key, so it is there
            listed = {str(m["id"]) for m in response.json()["data"]} if response.is_success else set()
            last = f"status {response.status_code}, models: {', '.join(sorted(listed)) or 'none'}"
            if listed.issuperset(models):
                return
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            last = str(error) or type(error).__name__
        time.sleep(0.3)
    raise ServeError(
        f"all applications run, but {url}/v1/models does not list every model after {READY_TIMEOUT_S:.0f} s ({last})"
    )


def _watch(cluster: Cluster, names: list[str], console: Console) -> None:
    """Print changes until Ctrl-C; returns when this Ray is gone."""
    shown = dict.fromkeys(names, "RUNNING")
    failures = 0
    while True:
        time.sleep(2)
        try:
            state, failures = cluster.api.state(), 0
        except RayApiError as error:
            failures += 1
            if cluster.session is not None and not local_cluster.running(cluster.session):
                console.print("Ray was stopped from elsewhere.")
                return
            if failures == PATIENCE:
                console.print(f"{error}; still trying")
            continue
        for name in names:
            application = state.application(name)
            status = application.status if application else "deleted"
            if status != shown[name]:
                shown[name] = status
                console.print(_line(application) if application else f"{name}: deleted", soft_wrap=True, markup=False)


def _stop(cluster: Cluster, console: Console, ours: bool) -> None:
    # Where our Ray is gone, its address may be another one's by now.
    if ours and (cluster.session is None or local_cluster.running(cluster.session)):
        hint = f"stopping: open requests may finish within {STOP_GRACE_S:.0f} s (Ctrl-C: at once)"
        with suppress(RayApiError, KeyboardInterrupt), console.status(hint):
            cluster.api.shut_down(STOP_GRACE_S)
    if cluster.session is None:
        serve_there = "Serve on it is shutting down." if ours else "Serve on it too, as it did before."
        console.print(f"The Ray that Modelyard did not start runs on. {serve_there}")
        return
    with _uninterrupted(), local_cluster.alone(), console.status("ending processes"):
        ended = local_cluster.end(cluster.session)
    if ended.left:
        raise LocalClusterError("the stop is incomplete:\n" + "\n".join(ended.left))
    taken = {t.port: t.who for t in ended.taken}
    free = ", ".join(str(port) for port in cluster.session.ports if port not in taken)
    console.print(f"Stopped: {ended.count} processes ended, none left; free again: ports {free}.", soft_wrap=True)
    for port, who in taken.items():
        console.print(
            f"Port {port} is in use by {who or 'a process of another user'}, which is not ours.", soft_wrap=True
        )


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Half a stop is worse than a slow one, and it is bounded."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


class _Progress:
    """Applications on the way up: a live table on a terminal, one line per change elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=4) if console.is_terminal else None
        self._shown: dict[str, str] = {}

    def __enter__(self) -> "_Progress":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def update(self, applications: Iterable[Application], elapsed_s: float) -> None:
        if self._live:
            self._live.update(_table(applications, elapsed_s))
            return
        for application in applications:
            line = _line(application)
            if self._shown.get(application.name) != line:
                self._shown[application.name] = line
                self._console.print(f"{elapsed_s:5.1f} s  {line}", soft_wrap=True, markup=False)


def _table(applications: Iterable[Application], elapsed_s: float) -> Table:
    table = Table("application", "status", "replicas", "message", box=None, caption=f"{elapsed_s:.0f} s")
    for a in applications:
        colour = {"RUNNING": "green", "DEPLOY_FAILED": "red", "UNHEALTHY": "red"}.get(a.status, "yellow")
        # The message is Ray's text: shown as it is, not as markup.
        table.add_row(a.name, f"[{colour}]{a.status}[/]", a.replicas, _brief(a.message).replace("[", "\\["))
    return table


def _line(application: Application) -> str:
    parts = (f"{application.name}: {application.status}", application.replicas, _brief(application.message))
    return "  ".join(part for part in parts if part)


def _brief(message: str) -> str:
    """The first line says what happened; the last one of a traceback says why."""
    lines = message.strip().splitlines()
    return " … ".join(dict.fromkeys([lines[0], lines[-1].strip()])) if lines else ""
