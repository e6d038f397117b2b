"""Collects what a plan needs from outside: checkpoints' configs and, where one is asked, a cluster. An adapter."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from serve_app import local_cluster
from serve_app.config import ModelArgs
from serve_app.planning.changes import changes
from serve_app.planning.checkpoint import Checkpoint, CheckpointError, checkpoint_config
from serve_app.planning.fleet import Unit, fleet
from serve_app.planning.live import Snapshot, snapshot
from serve_app.planning.memory import PlanError, ReplicaMemory, replica_memory
from serve_app.planning.nodes import Node
from serve_app.planning.plan import Plan, make_plan
from serve_app.planning.sizing import Sizer
from serve_app.ray_api import RayApi

# Hubs are slow to answer, not to be asked.
_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Gathered:
    """``checkpoints`` by model; ``unknown``: why a model's memory cannot be told, one line each."""

    units: tuple[Unit, ...]
    checkpoints: Mapping[str, Checkpoint]
    unknown: Mapping[str, str]

    def plan(self, config: Mapping[str, Any], nodes: Sequence[Node] | None, live: Snapshot | None) -> Plan:
        """``live``: compare the file with what runs there."""
        sizers: dict[str, Sizer] = {
            name: partial(_sized, checkpoint)
            for name, checkpoint in self.checkpoints.items()
            if name not in self.unknown
        }
        if live is None:
            return make_plan(self.units, sizers, nodes)
        deploy = changes(config, live.deployed, live.free, live.http)
        return make_plan(self.units, sizers, nodes, deploy, live.running, grows=live.grows)


def gather(config: Mapping[str, Any]) -> Gathered:
    """Reads the config of each model's checkpoint. ``config``: a checked file."""
    units = fleet(config)
    models = [unit for unit in units if unit.args is not None and unit.args.source.fake is None]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = list(pool.map(_checkpoint, models))
    checkpoints = {unit.name: a for unit, a in zip(models, answers, strict=True) if isinstance(a, Checkpoint)}
    unknown = {unit.name: a for unit, a in zip(models, answers, strict=True) if isinstance(a, str)}
    for unit in models:
        if (checkpoint := checkpoints.get(unit.name)) and unit.args:
            try:
                _sized(checkpoint, unit.args, None)
            except PlanError as error:
                unknown[unit.name] = str(error)
    return Gathered(units, checkpoints, unknown)


def dashboard_address() -> str:
    """Where to look for a cluster that nobody named: what the environment says, what `modelyard serve` started, or
    Ray's default."""
    if named := os.environ.get("RAY_DASHBOARD_ADDRESS"):
        return named
    session = local_cluster.load()
    return session.dashboard if session else f"http://{local_cluster.HOST}:{local_cluster.DASHBOARD_PORT}"


def cluster(address: str | None, *, required: bool) -> Snapshot | None:
    """The cluster at ``address``, or at ``dashboard_address()``.

    None: none was named or ``required``, and none answers. RayApiError: it does not answer, or refuses our token.
    """
    api = RayApi(address or dashboard_address())
    if address is None and not required and api.version() is None:
        return None
    return snapshot(api)


def _checkpoint(unit: Unit) -> Checkpoint | str:
    assert unit.args is not None
    try:
        return checkpoint_config(unit.args.source, unit.args.engine, unit.args.env)
    except CheckpointError as error:
        return str(error)


def _sized(checkpoint: Checkpoint, args: ModelArgs, gpu_bytes: int | None) -> ReplicaMemory:
    return replica_memory(args, checkpoint.config, checkpoint.stored_bytes, gpu_bytes)
