"""What is compared. A target is an address and headers on a system, which several targets may share, or a router in
front of one; a system is processes that are started for it and ended after it. A new target is one line in ``TARGETS``,
a new system one function in ``SYSTEMS``, a new router one entry in ``routers.ROUTERS``."""

import contextlib
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from loadtest import figures
from loadtest.about import ROOT
from loadtest.clusters import HANDLE_IMPORT_PATH, ClusterFault, cluster, free_ports
from loadtest.endings import ignore_signals
from loadtest.figures import HANDLE, MODELYARD
from loadtest.held import Begin, Tell
from loadtest.overhead import serve_llm
from loadtest.overhead.routers import ROUTERS, Place
from serve_app import demo_model, local_cluster
from serve_app.config import (
    GATEWAY_IMPORT_PATH,
    MODEL_DEPLOYMENT,
    MODEL_IMPORT_PATH,
    QUEUE_DEPTH,
    ModelArgs,
    Source,
)
from serve_app.local_cluster import HOST, Session

MODEL = "bench"
DEFAULT_FILE, DEFAULT_ENTRY = ROOT / "deployments" / "local.yaml", "chat"
# Of one look at an engine that starts; and what its first answer may take.
LOOK_S = 30.0
# Of a model that nobody asks.
ASLEEP = {"min_replicas": 0, "max_replicas": 1, "policy": {"policy_function": QUEUE_DEPTH}}
EVERY_TOKEN = {"x-modelyard-every-token": "1"}

FRONT_END, ENGINE, GATEWAY, PROXY, REST = "front end", "engine", "gateway", "proxy", "Ray"
ROLES = (FRONT_END, ENGINE, GATEWAY, PROXY, REST)
# What the title of a Ray process begins with, and its role: the first that fits.
MODELYARD_TITLES = {
    f"ray::ServeReplica:{MODEL}:Model": FRONT_END,
    "ray::ServeReplica:gateway:Gateway": GATEWAY,
}
HANDLE_TITLES = {
    "ray::ServeReplica:handle:Inner": FRONT_END,
    "ray::ServeReplica:handle:Ingress": GATEWAY,
    "ray::ProxyActor": PROXY,
}
SERVE_LLM_TITLES = {
    "ray::ServeReplica:llm:LLMServer:": FRONT_END,
    "ray::ServeReplica:llm:": GATEWAY,
    "ray::ProxyActor": PROXY,
    "ray::RayWorker": ENGINE,
}
SERVE_LLM = figures.System("ray-serve-llm", "Ray Serve LLM", "Ray's own way", counted=(), roles={})


@dataclass(frozen=True)
class Setting:
    """``args``: the model; ``stream_interval``: of the system bare-interval, in tokens; ``start_s``: how long a system
    may take to start; ``home``: a folder for logs and state, which goes with the run; ``programs``: the command of each
    router; ``engine``: vLLM's arguments for the model, for a system whose Python may not have ours; ``models``: so many
    are deployed in modelyard-models."""

    args: ModelArgs
    stream_interval: int
    start_s: float
    home: Path
    programs: Mapping[str, str] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    models: int = 1


@dataclass(frozen=True)
class Running:
    """``processes``: those that live now, and the role of each; also in another process than the one that started
    them."""

    port: int
    processes: Callable[[], list[tuple[psutil.Process, str]]]


System = Callable[[Setting, Tell], AbstractContextManager[Running]]


@dataclass(frozen=True)
class Target:
    """``router``: what stands in front of the system, by its name in ``ROUTERS``; empty: nothing."""

    system: str
    headers: Mapping[str, str] = field(default_factory=dict)
    router: str = ""


def role_of(title: str, titles: Mapping[str, str]) -> str:
    """By a process's title: haproxy's name, or a command line. ``titles``: of its system's Ray processes."""
    if title == "haproxy":
        return PROXY
    if "VLLM::" in title:
        return ENGINE
    return next((role for beginning, role in titles.items() if title.startswith(beginning)), REST)


@contextmanager
def bare(setting: Setting, tell: Tell, stream_interval: int = 0) -> Iterator[Running]:
    """vLLM's API server, or the fake engine's app, as the only process between client and engine."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "loadtest.overhead.bare", str(port), MODEL, str(stream_interval)]
    given = setting.args.model_dump_json(exclude_unset=True).encode()
    log, env = setting.home / "bare.log", _environment(setting)
    with _server(command, port, log, env, setting.start_s, tell, given) as leader:
        yield Running(port, partial(_server_processes, leader))


def _server_processes(leader: int) -> list[tuple[psutil.Process, str]]:
    return [(one, FRONT_END if one.pid == leader else _role(one, {})) for one in _session(leader)]


@contextmanager
def routed(name: str, behind: Running, setting: Setting, tell: Tell) -> Iterator[Running]:
    """The router ``name`` in front of ``behind``."""
    router, (port, metrics) = ROUTERS[name], free_ports(2)
    place = Place(port, behind.port, metrics, setting.home, MODEL)
    command = [setting.programs[name], *router.arguments(place)]
    log, env = setting.home / f"{name}.log", os.environ | router.environment
    # It has nothing to lose.
    with _server(command, port, log, env, setting.start_s, tell, grace_s=1.0) as leader:
        yield Running(port, partial(_router_processes, leader, behind))


def _router_processes(leader: int, behind: Running) -> list[tuple[psutil.Process, str]]:
    return [(one, GATEWAY) for one in _session(leader)] + behind.processes()


@contextmanager
def _server(
    command: Sequence[str],
    port: int,
    log: Path,
    env: Mapping[str, str],
    start_s: float,
    tell: Tell,
    given: bytes = b"",
    grace_s: float = 10.0,
) -> Iterator[int]:
    """A server that answers; its process's id, which is its session's too. ``given``: its standard input. ``grace_s``:
    what its end may take."""
    with log.open("wb") as output:
        # A session of its own: Ctrl-C is for us, and all of its processes are found by it.
        server = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(env),
            cwd=ROOT,
            start_new_session=True,
        )
    try:
        assert server.stdin is not None
        with contextlib.suppress(BrokenPipeError), server.stdin as asked:
            asked.write(given)
        wait_for_answer(port, start_s, tell, lambda: _end_of(log) if server.poll() is not None else "")
        yield server.pid
    finally:
        tell("ending")
        ignore_signals()
        local_cluster.end_processes(lambda: _session(server.pid), grace_s)
        server.wait()


def bare_interval(setting: Setting, tell: Tell) -> AbstractContextManager[Running]:
    return bare(setting, tell, setting.stream_interval)


def modelyard(
    setting: Setting,
    tell: Tell,
    settings: Mapping[str, str] | None = None,
    others: Sequence[dict[str, Any]] = (),
) -> AbstractContextManager[Running]:
    """HAProxy, the gateway, and a replica with the same engine, on a private Ray. ``others``: more entries."""
    entry = {"name": MODEL, "import_path": MODEL_IMPORT_PATH, "route_prefix": None}
    wanted: list[dict[str, Any]] = [
        {"name": "gateway", "import_path": GATEWAY_IMPORT_PATH, "route_prefix": "/"},
        entry | {"args": setting.args.model_dump(mode="json", exclude_unset=True)},
        *others,
    ]
    return _on_ray(MODELYARD, wanted, MODELYARD_TITLES, setting, tell, settings)


def modelyard_beside_models(setting: Setting, tell: Tell) -> AbstractContextManager[Running]:
    """The same with ``setting.models`` deployed: all others are fakes, and asleep."""
    asleep = {"name": MODEL_DEPLOYMENT, "autoscaling_config": ASLEEP}
    fake = {"source": {"fake": {}}, "resources": {"num_cpus": 0.01, "num_gpus": 0}}
    others = [
        {
            "name": f"asleep-{number}",
            "import_path": MODEL_IMPORT_PATH,
            "route_prefix": None,
            "args": fake,
            "deployments": [asleep],
        }
        for number in range(1, setting.models)
    ]
    return modelyard(setting, tell, others=others)


def modelyard_niceness_0(setting: Setting, tell: Tell) -> AbstractContextManager[Running]:
    """The same with Ray's workers at the niceness of everybody else; Ray gives them 15."""
    return modelyard(setting, tell, {"RAY_worker_niceness": "0"})


def handle(setting: Setting, tell: Tell) -> AbstractContextManager[Running]:
    """Serve's own proxy, a plain ingress, and a replica with the same engine behind a ``DeploymentHandle``."""
    args = {"name": MODEL, "model": setting.args.model_dump(mode="json", exclude_unset=True)}
    wanted = [{"name": "handle", "import_path": HANDLE_IMPORT_PATH, "route_prefix": "/", "args": args}]
    return _on_ray(HANDLE, wanted, HANDLE_TITLES, setting, tell)


def serve_llm_handle(setting: Setting, tell: Tell) -> AbstractContextManager[Running]:
    """Ray Serve LLM as it comes: Serve's own proxy, its ingress, and a replica behind a ``DeploymentHandle``."""
    return _serve_llm(setting, tell, {})


def serve_llm_direct(setting: Setting, tell: Tell) -> AbstractContextManager[Running]:
    """Ray Serve LLM with direct streaming: HAProxy asks a router of its own which replica, and talks HTTP to it."""
    return _serve_llm(setting, tell, {"RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING": "1", "RAY_SERVE_ENABLE_HA_PROXY": "1"})


def _serve_llm(setting: Setting, tell: Tell, settings: Mapping[str, str]) -> AbstractContextManager[Running]:
    args = serve_llm.llm_config(setting.args, MODEL, setting.engine)
    wanted = [{"name": "llm", "import_path": serve_llm.IMPORT_PATH, "route_prefix": "/", "args": args}]
    return _on_ray(SERVE_LLM, wanted, SERVE_LLM_TITLES, setting, tell, settings)


@contextmanager
def _on_ray(
    system: figures.System,
    wanted: list[dict[str, Any]],
    titles: Mapping[str, str],
    setting: Setting,
    tell: Tell,
    settings: Mapping[str, str] | None = None,
) -> Iterator[Running]:
    with cluster(system, setting.home, wanted, tell, start_s=setting.start_s, settings=settings) as found:
        wait_for_answer(found.port, setting.start_s, tell, lambda: "")
        yield Running(found.port, partial(_ray_processes, found.session, titles))


def _ray_processes(session: Session, titles: Mapping[str, str]) -> list[tuple[psutil.Process, str]]:
    return [(one, _role(one, titles)) for one in local_cluster.processes(session)]


@contextmanager
def beside(begin: Begin[Running], cache: str, tell: Tell) -> Iterator[Running]:
    """With a folder of its own for what vLLM compiles: engines that start at once would write the same files."""
    os.environ.setdefault("VLLM_CACHE_ROOT", cache)  # of this process, which holds no other system
    with begin(tell) as running:
        yield running


SYSTEMS: dict[str, System] = {
    "bare": bare,
    "bare-interval": bare_interval,
    "modelyard": modelyard,
    "modelyard-niceness-0": modelyard_niceness_0,
    "modelyard-models": modelyard_beside_models,
    "handle": handle,
    "ray-serve-llm": serve_llm_handle,
    "ray-serve-llm-direct": serve_llm_direct,
}
# Both run on one Python, which may be another than this one.
SERVE_LLM_SYSTEMS = ("ray-serve-llm", "ray-serve-llm-direct")
TARGETS = {
    "bare": Target("bare"),
    **{name: Target("bare", router=name) for name in ROUTERS},
    "bare-interval": Target("bare-interval"),
    "modelyard": Target("modelyard"),
    "modelyard-every-token": Target("modelyard", EVERY_TOKEN),
    "modelyard-niceness-0": Target("modelyard-niceness-0"),
    "modelyard-models": Target("modelyard-models"),
    "handle": Target("handle"),
    "handle-every-token": Target("handle", EVERY_TOKEN),
    "ray-serve-llm": Target("ray-serve-llm"),
    "ray-serve-llm-direct": Target("ray-serve-llm-direct"),
}
DEFAULT_TARGETS = ("bare", "modelyard", "modelyard-every-token")


def read_model(file: Path | None) -> ModelArgs:
    """``args:`` of a model entry, as YAML or JSON; by default those of the demo model in `deployments/local.yaml`.

    OSError, yaml.YAMLError, ValueError: not there, or not that.
    """
    if file is not None:
        return ModelArgs.model_validate(yaml.safe_load(file.read_text()))
    entries = yaml.safe_load(DEFAULT_FILE.read_text())["applications"]
    return ModelArgs.model_validate(next(entry["args"] for entry in entries if entry["name"] == DEFAULT_ENTRY))


def with_files(args: ModelArgs, tell: Tell) -> ModelArgs:
    """``args`` without the demo model by its name: where that is kept depends on ``MODELYARD_HOME``, and each private
    Ray has its own."""
    source = args.source
    if source.demo is not None:
        source = Source(path=str(demo_model.prepare(tell)), tokenizer=source.tokenizer)
    elif source.shape is not None and source.tokenizer is None:
        source = Source(shape=source.shape, tokenizer=str(demo_model.prepare(tell)))
    return args.model_copy(update={"source": source})


def _environment(setting: Setting) -> dict[str, str]:
    """What a replica's engine would find in its environment."""
    env = os.environ | {
        "VLLM_NO_USAGE_STATS": "1",
        # The folder of a shape goes with the run.
        "TMPDIR": str(setting.home),
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)]),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    # Ray gives it to every actor. With as many threads as there are CPUs vLLM alone is a third slower on a GPU of 16.
    env["OMP_NUM_THREADS"] = str(max(1, int(setting.args.resources.num_cpus)))
    return env | setting.args.env


def wait_for_answer(port: int, start_s: float, tell: Tell, ended: Callable[[], str], model: str = MODEL) -> None:
    """Until a request to ``model`` is answered. ClusterFault: too late, or ``ended`` says what came instead."""
    deadline = time.monotonic() + start_s
    body = {"model": model, "prompt": "the of", "max_tokens": 2, "ignore_eos": True}
    tell("waiting for an answer")
    while True:
        last = "no answer"
        with contextlib.suppress(httpx.HTTPError):
            answer = httpx.post(f"http://{HOST}:{port}/v1/completions", json=body, timeout=LOOK_S, trust_env=False)
            if answer.is_success:
                return
            last = answer.text[:500]
        if why := ended():
            raise ClusterFault(f"the server ended:\n{why}")
        if time.monotonic() > deadline:
            raise ClusterFault(f"not ready after {start_s:.0f} s: {last}")
        time.sleep(0.5)


def _end_of(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-25:])


def _role(process: psutil.Process, titles: Mapping[str, str]) -> str:
    with contextlib.suppress(psutil.Error):
        name = process.name()
        return role_of(name if name == "haproxy" else " ".join(process.cmdline()), titles)
    return REST


def _session(leader: int) -> list[psutil.Process]:
    """The living processes of the session that ``leader`` began, also those whose parent is gone."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
