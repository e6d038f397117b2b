"""A private Ray for each system under load: started, found and ended by the code behind ``modelyard serve``."""

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console

from loadtest.about import ROOT
from loadtest.endings import ignore_signals
from loadtest.figures import HANDLE, MODELYARD, System
from serve_app import local_cluster, ray_env
from serve_app.config import GATEWAY_IMPORT_PATH, MODEL_IMPORT_PATH
from serve_app.local_cluster import Session
from serve_app.ray_api import RayApi, RayApiError

MODEL = "fake"
HANDLE_IMPORT_PATH = "loadtest.handle_app:app"
START_S = 180.0


class ClusterFault(RuntimeError):
    """A system did not start, or is not what the measurement expects."""


@dataclass(frozen=True)
class Running:
    system: System
    session: Session
    port: int

    def watched(self) -> dict[int, tuple[psutil.Process, str]]:
        """Every process of this cluster and its role, by process id; each counted role must be there."""
        found = {}
        for process in local_cluster.processes(self.session):
            with suppress(psutil.Error):
                name = process.name()
                title = name if name == "haproxy" else " ".join(process.cmdline())
                found[process.pid] = (process, self.system.role_of(title))
        missing = set(self.system.counted) - {role for _, role in found.values()}
        if missing:
            raise ClusterFault(f"{self.system.title}: no process is the {', the '.join(sorted(missing))}")
        return found


def cpu_s(watched: dict[int, tuple[psutil.Process, str]]) -> dict[int, float]:
    """User and system seconds since each process started; those that have ended are left out."""
    seconds = {}
    for pid, (process, _role) in watched.items():
        with suppress(psutil.Error):
            times = process.cpu_times()
            seconds[pid] = times.user + times.system
    return seconds


def applications(system: System, slots: int) -> list[dict[str, Any]]:
    """What Serve runs in ``system``. ``slots``: streams that the engine takes at once."""
    model: dict[str, Any] = {"source": {"fake": {}}, "resources": {"num_gpus": 0, "num_cpus": 0.01}}
    model["engine"] = {"max_num_seqs": slots}
    if system is HANDLE:
        return [
            {
                "name": "handle",
                "import_path": HANDLE_IMPORT_PATH,
                "route_prefix": "/",
                "args": {"name": MODEL, "model": model},
            }
        ]
    return [
        {"name": "gateway", "import_path": GATEWAY_IMPORT_PATH, "route_prefix": "/"},
        {"name": MODEL, "import_path": MODEL_IMPORT_PATH, "route_prefix": None, "args": model},
    ]


@contextmanager
def cluster(
    system: System,
    home: Path,
    wanted: list[dict[str, Any]],
    tell: Callable[[str], None],
    key: str | None = None,
    start_s: float = START_S,
    settings: Mapping[str, str] | None = None,
) -> Iterator[Running]:
    """Start Ray with the applications ``wanted`` of ``system`` on it; end every process of it afterwards. ``home``: a
    folder for its state file. ``key``: one that the gateway knows, where it asks for one. ``start_s``: the longest
    time until the endpoint answers. ``settings``: variables of Ray's processes."""
    http, gcs, dashboard, metrics, stats, fallback = free_ports(6)
    # Read by local_cluster for its state file, at the start and at the end.
    before = os.environ.get("MODELYARD_HOME")
    os.environ["MODELYARD_HOME"] = str(home)
    session = local_cluster.new_session(gcs, dashboard, (http, gcs, dashboard))
    try:
        tell("starting Ray")
        plain = system is not MODELYARD
        env = private_environment(session, plain=plain, metrics=metrics, stats=stats, fallback=fallback)
        session = local_cluster.start(session, gcs, dashboard, env | dict(settings or {}))
        api = RayApi(session.dashboard)
        options = {"host": local_cluster.HOST, "port": http}
        api.deploy({"proxy_location": "EveryNode", "http_options": options, "applications": wanted})
        deadline = time.monotonic() + start_s
        while state := _state(api, [str(a["name"]) for a in wanted], http, system, key):
            tell(state)
            if time.monotonic() > deadline:
                raise ClusterFault(f"{system.title}: not ready after {start_s:.0f} s: {state}")
            time.sleep(0.5)
        yield Running(system, session, http)
    finally:
        tell("ending")
        ignore_signals()
        ended = local_cluster.end(session)
        if before is None:
            del os.environ["MODELYARD_HOME"]
        else:
            os.environ["MODELYARD_HOME"] = before
        if ended.left:
            raise ClusterFault("processes would not end:\n" + "\n".join(ended.left))


def private_environment(session: Session, *, plain: bool, metrics: int, stats: int, fallback: int) -> dict[str, str]:
    """What Ray's processes get in a cluster beside others. ``plain``: without what Modelyard sets, as in a shell that
    knows nothing of it. The ports are HAProxy's two and Serve's fallback proxy's."""
    env = local_cluster.environment(session)
    if plain:
        for setting in ray_env.SETTINGS:
            env.pop(setting.name)
    # Replicas import this very tree.
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    return env | {
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback),
    }


def _state(api: RayApi, names: list[str], port: int, system: System, key: str | None) -> str:
    """What is still missing, in words; empty once the endpoint answers."""
    with suppress(RayApiError):
        state = api.state()
        for name in names:
            application = state.application(name)
            status = application.status if application else "NOT_STARTED"
            if status == "DEPLOY_FAILED" and application:
                raise ClusterFault(f"{system.title}: {name} cannot be deployed:\n{application.message}")
            if status != "RUNNING":
                return f"{name}: {status}"
        with suppress(httpx.HTTPError, ValueError):
            url = f"http://{local_cluster.HOST}:{port}/{'v1/models' if system is MODELYARD else 'openapi.json'}"
            headers = {"authorization": f"Bearer {key}"} if key else {}
            answer = httpx.get(url, headers=headers, trust_env=False, timeout=5)
            if answer.is_success and (system is not MODELYARD or answer.json()["data"]):
                return ""
        return "waiting for the endpoint"
    return "waiting for Ray's dashboard"


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server((local_cluster.HOST, 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def teller(console: Console, title: str) -> Callable[[str], None]:
    """Prints each change of what a system is doing, once."""
    last = ""

    def tell(what: str) -> None:
        nonlocal last
        if what != last:
            console.print(f"{title}: {what}", highlight=False)
        last = what

    return tell
