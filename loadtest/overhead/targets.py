"""What is compared. A target is an address and headers on a system, which several targets may share; a system is
processes that are started for it and ended after it. A new target is one line in ``TARGETS``, a new system one
function in ``SYSTEMS``."""

import contextlib
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from loadtest.about import ROOT
from loadtest.clusters import ClusterFault, cluster, free_ports
from loadtest.figures import MODELYARD
from serve_app import demo_model, local_cluster
from serve_app.config import GATEWAY_IMPORT_PATH, MODEL_IMPORT_PATH, ModelArgs, Source
from serve_app.local_cluster import HOST

MODEL = "bench"
DEFAULT_FILE, DEFAULT_ENTRY = ROOT / "deployments" / "local.yaml", "chat"
# Of one look at an engine that starts; and what its first answer may take.
LOOK_S = 30.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

FRONT_END, ENGINE, GATEWAY, PROXY, REST = "front end", "engine", "gateway", "proxy", "Ray"
ROLES = (FRONT_END, ENGINE, GATEWAY, PROXY, REST)
_TITLES = {f"ray::ServeReplica:{MODEL}:Model": FRONT_END, "ray::ServeReplica:gateway:Gateway": GATEWAY}


@dataclass(frozen=True)
class Setting:
    """``args``: the model; ``stream_interval``: of the system bare-interval, in tokens; ``start_s``: how long a system
    may take to start; ``home``: a folder for logs and state, which goes with the run."""

    args: ModelArgs
    stream_interval: int
    start_s: float
    home: Path


@dataclass(frozen=True)
class Running:
    """``processes``: those that live now, and the role of each."""

    port: int
    processes: Callable[[], list[tuple[psutil.Process, str]]]


Tell = Callable[[str], None]
System = Callable[[Setting, Tell], AbstractContextManager[Running]]


@dataclass(frozen=True)
class Target:
    system: str
    headers: Mapping[str, str] = field(default_factory=dict)


def role_of(title: str) -> str:
    """By a process's title: haproxy's name, or a command line."""
    if title == "haproxy":
        return PROXY
    if "VLLM::" in title:
        return ENGINE
    return next((role for beginning, role in _TITLES.items() if title.startswith(beginning)), REST)


@contextmanager
def bare(setting: Setting, tell: Tell, stream_interval: int = 0) -> Iterator[Running]:
    """vLLM's API server, or the fake engine's app, as the only process between client and engine."""
    (port,) = free_ports(1)
    log = setting.home / "bare.log"
    command = [sys.executable, "-m", "loadtest.overhead.bare", str(port), MODEL, str(stream_interval)]
    with log.open("wb") as output:
        # A session of its own: Ctrl-C is for us, and all of its processes are found by it.
        server = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(setting),
            cwd=ROOT,
            start_new_session=True,
        )

    def processes() -> list[tuple[psutil.Process, str]]:
        return [(one, FRONT_END if one.pid == server.pid else _role(one)) for one in _session(server.pid)]

    try:
        assert server.stdin is not None
        with contextlib.suppress(BrokenPipeError), server.stdin as asked:
            asked.write(setting.args.model_dump_json(exclude_unset=True).encode())
        _wait_for_answer(port, setting, tell, lambda: _end_of(log) if server.poll() is not None else "")
        yield Running(port, processes)
    finally:
        tell("ending")
        # As in `cluster`: half an end is worse than a slow one.
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        local_cluster.end_processes(lambda: _session(server.pid), term_grace_s=10)
        server.wait()


@contextmanager
def signals_kept() -> Iterator[None]:
    """Around a system: its end ignores what would interrupt it, and the next one's time must not."""
    kept = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def bare_interval(setting: Setting, tell: Tell) -> AbstractContextManager[Running]:
    return bare(setting, tell, setting.stream_interval)


@contextmanager
def modelyard(setting: Setting, tell: Tell) -> Iterator[Running]:
    """HAProxy, the gateway, and a replica with the same engine, on a private Ray."""
    entry = {"name": MODEL, "import_path": MODEL_IMPORT_PATH, "route_prefix": None}
    wanted: list[dict[str, Any]] = [
        {"name": "gateway", "import_path": GATEWAY_IMPORT_PATH, "route_prefix": "/"},
        entry | {"args": setting.args.model_dump(mode="json", exclude_unset=True)},
    ]
    with cluster(MODELYARD, setting.home, wanted, tell, start_s=setting.start_s) as found:

        def processes() -> list[tuple[psutil.Process, str]]:
            return [(one, _role(one)) for one in local_cluster.processes(found.session)]

        _wait_for_answer(found.port, setting, tell, lambda: "")
        yield Running(found.port, processes)


SYSTEMS: dict[str, System] = {"bare": bare, "bare-interval": bare_interval, "modelyard": modelyard}
TARGETS = {
    "bare": Target("bare"),
    "bare-interval": Target("bare-interval"),
    "modelyard": Target("modelyard"),
    "modelyard-every-token": Target("modelyard", {"x-modelyard-every-token": "1"}),
}


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


def _wait_for_answer(port: int, setting: Setting, tell: Tell, ended: Callable[[], str]) -> None:
    """Until a request is answered. ClusterFault: too late, or ``ended`` says what came instead."""
    deadline = time.monotonic() + setting.start_s
    body = {"model": MODEL, "prompt": [100, 101], "max_tokens": 2, "ignore_eos": True}
    tell("starting the engine")
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
            raise ClusterFault(f"not ready after {setting.start_s:.0f} s: {last}")
        time.sleep(0.5)


def _end_of(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-25:])


def _role(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        name = process.name()
        return role_of(name if name == "haproxy" else " ".join(process.cmdline()))
    return REST


def _session(leader: int) -> list[psutil.Process]:
    """The living processes of the session that ``leader`` began, also those whose parent is gone."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
