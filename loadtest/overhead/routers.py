"""Routers of other projects, each a process in front of one server. None is in our locks: see ``program``."""

import shutil
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from serve_app.local_cluster import HOST


@dataclass(frozen=True)
class Place:
    """``port``: the router's own; ``behind``: that of the server; ``metrics``: a free one, for whoever cannot do
    without; ``home``: a folder for files. ``model``: the id that the server knows."""

    port: int
    behind: int
    metrics: int
    home: Path
    model: str

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.behind}"


@dataclass(frozen=True)
class Router:
    """``package``: what pip installs, with a command of the router's name, or ``command``. ``arguments``: of that
    command, with nothing tuned but the log, which is as quiet as it can be. ``words``: no prompts of token ids."""

    package: str
    arguments: Callable[[Place], list[str]]
    words: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    command: str = ""


def _rust(at: Place) -> list[str]:
    """Two that share their ancestor."""
    return [
        *("--host", HOST, "--port", str(at.port)),
        *("--worker-urls", at.url, "--worker-startup-check-interval", "1"),
        *("--prometheus-host", HOST, "--prometheus-port", str(at.metrics)),
        *("--log-level", "error"),
    ]


def _litellm(at: Place) -> list[str]:
    upstream = {"model": f"hosted_vllm/{at.model}", "api_base": f"{at.url}/v1", "api_key": "none"}
    config = at.home / "litellm.yaml"
    config.write_text(yaml.safe_dump({"model_list": [{"model_name": at.model, "litellm_params": upstream}]}))
    return ["--config", str(config), "--host", HOST, "--port", str(at.port), "--num_workers", "1"]


def _haproxy(at: Place) -> list[str]:
    """The least that can stand between a client and an engine: it copies bytes and decides nothing."""
    config = at.home / "haproxy.cfg"
    lines = [
        "defaults",
        "  mode http",
        "  option http-no-delay",  # else it holds back what fills no packet
        *(f"  timeout {each}" for each in ("connect 5s", "client 1h", "server 1h")),
        "listen all",
        f"  bind {HOST}:{at.port}",
        f"  server engine {at.url.removeprefix('http://')}",
    ]
    config.write_text("\n".join(lines) + "\n")
    return ["-db", "-f", str(config)]


ROUTERS = {
    "haproxy": Router("ray[serve]", _haproxy, command="modelyard-haproxy"),
    "vllm-router": Router("vllm-router==0.1.17", _rust),
    "smg": Router("smg==1.13.0", lambda at: ["launch", *_rust(at)], words=True),
    "litellm": Router(
        "litellm[proxy]==1.108.7",
        _litellm,
        words=True,
        environment={
            "LITELLM_LOG": "ERROR",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # or it asks the network for one
            "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",  # on the loopback, without a key
        },
    ),
}


def commands(peers: Iterable[str], others: Iterable[str] = ()) -> dict[str, str]:
    """Name → command, of ``NAME=COMMAND``: a router's, or one of ``others``. ValueError: not that."""
    given = {}
    names = (*ROUTERS, *others)
    for peer in peers:
        name, _, command = peer.partition("=")
        if name not in names or not command:
            raise ValueError(f"--peer {peer}: not NAME=COMMAND; names are {', '.join(names)}")
        given[name] = command
    return given


def program(name: str, given: Mapping[str, str]) -> str:
    """The command of the router ``name``: as ``given``, else the one installed here. FileNotFoundError: what to do."""
    if name in given:
        if found := shutil.which(given[name]):
            return found
        raise FileNotFoundError(f"{name}: {given[name]} is no command")
    # Beside this interpreter, whether or not its environment is the shell's.
    command = ROUTERS[name].command or name
    found = shutil.which(command, path=sysconfig.get_path("scripts")) or shutil.which(command)
    if found:
        return found
    raise FileNotFoundError(
        f"{name} is not installed: pip install '{ROUTERS[name].package}', in an environment of its own, and name its "
        f"command: --peer {name}=/path/to/bin/{name}"
    )
