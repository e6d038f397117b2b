"""``modelyard plan``: what was asked for, collected, planned and printed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer
import yaml
from rich.console import Console
from rich.text import Text

from serve_app.local_cluster import LocalClusterError
from serve_app.plan_inputs import Gathered, cluster, gather
from serve_app.planning.explain import explain
from serve_app.planning.figures import as_json as plan_as_json
from serve_app.planning.live import Snapshot
from serve_app.planning.memory import PlanError
from serve_app.planning.nodes import Node, NodesError, parse_gib, parse_nodes
from serve_app.planning.plan import Plan
from serve_app.planning.report import report
from serve_app.ray_api import RayApiError

FITS, DOES_NOT_FIT, CANNOT_TELL = 0, 1, 2


class CannotTell(RuntimeError):
    """There is no plan; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of the command; see ``modelyard plan --help``."""

    live: bool = False
    address: str | None = None
    nodes: str | None = None
    gpu_memory: str | None = None
    model: str | None = None
    explain: bool = False


def run(file: Path, asked: Asked, console: Console, *, as_json: bool = False) -> int:
    """Print the plan for a checked ``file``. The exit status; CannotTell where there is nothing to print."""
    config = _only(yaml.safe_load(file.read_text()), asked.model)
    nodes, live, said = _nodes(asked)
    gathered = gather(config)
    try:
        plan = gathered.plan(config, nodes, None if asked.model else live)
    except PlanError as error:
        raise CannotTell(str(error)) from error
    if asked.explain:
        console.print(_explained(plan, gathered, asked))
    elif as_json:
        typer.echo(json.dumps(plan_as_json(plan, gathered.unknown), indent=2, ensure_ascii=False))
    else:
        console.print(Text(f"{file}, {said}\n"), report(plan, gathered.unknown), sep="\n")
    for name, why in gathered.unknown.items():
        typer.echo(f"{name}: {why}", err=True)
    if plan.problems:
        return DOES_NOT_FIT
    return CANNOT_TELL if gathered.unknown else FITS


def _only(config: Mapping[str, Any], model: str | None) -> Mapping[str, Any]:
    if model is None:
        return config
    entries = config.get("applications") or ()
    if kept := [entry for entry in entries if entry.get("name") == model]:
        return {**config, "applications": kept}
    names = ", ".join(str(entry.get("name")) for entry in entries)
    raise CannotTell(f"--model {model}: the file has no such application; it has {names}")


def _nodes(asked: Asked) -> tuple[Sequence[Node] | None, Snapshot | None, str]:
    """The nodes to plan for, the cluster that they come from, and where that is in words."""
    try:
        size = parse_gib(asked.gpu_memory) if asked.gpu_memory else None
        if asked.nodes is not None:
            if asked.live or asked.address:
                raise CannotTell("give either --nodes or --cluster live, not both")
            return parse_nodes(asked.nodes, size), None, f"on {asked.nodes}"
        live = cluster(asked.address, required=asked.live)
    except (NodesError, RayApiError, LocalClusterError) as error:
        raise CannotTell(str(error)) from error
    if live is None:
        return None, None, "without nodes: no cluster runs here"
    nodes = [node if node.gpu_bytes or not node.gpus else replace(node, gpu_bytes=size) for node in live.nodes]
    return nodes, live, f"on the cluster at {live.address}"


def _explained(plan: Plan, gathered: Gathered, asked: Asked) -> Any:
    models = [unit for unit in plan.units if unit.name in gathered.checkpoints and unit.args]
    if asked.model is None and len(models) != 1:
        names = ", ".join(unit.name for unit in models)
        raise CannotTell(f"--explain shows one model: name it with --model; the file has {names}")
    if not models:
        raise CannotTell(f"--explain: the memory of {asked.model} is not known")
    unit = models[0]
    assert unit.args is not None
    size = parse_gib(asked.gpu_memory) if asked.gpu_memory else _device(plan, cpu=not unit.args.resources.num_gpus)
    if size is None:
        raise CannotTell("--explain divides the memory of one GPU: say how large it is with --gpu-memory, as in 141G")
    try:
        return explain(unit.name, unit.args, gathered.checkpoints[unit.name], size)
    except PlanError as error:
        raise CannotTell(f"{unit.name}: {error}") from error


def _device(plan: Plan, *, cpu: bool) -> int | None:
    """The memory of the first device that the model landed on, else of the largest there is."""
    spots = [spot.node for placed in (plan.at_max.placed if plan.at_max else ()) for spot in placed.spots]
    sizes = [node.ram_bytes if cpu else node.gpu_bytes for node in plan.nodes]
    landed = [size for at in spots if (size := sizes[at]) is not None]
    return next(iter(landed), max((size for size in sizes if size is not None), default=None))
