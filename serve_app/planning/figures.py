"""A plan in numbers: of each model what its replicas hold where they landed, and the whole plan as JSON. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serve_app.planning.fleet import Unit
from serve_app.planning.nodes import Node
from serve_app.planning.packing import Packing, Placed
from serve_app.planning.plan import Plan


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """``weights``, ``working``, ``kv_bytes``: bytes on each GPU (of the fullest worker); ``kv_tokens`` of one replica,
    on the smallest GPU that one landed on. ``at_min``, ``at_max``: sequences of full context (``context`` tokens) at
    once, of all replicas that found a place. None: not known without nodes or without their memory.
    """

    weights: int
    working: int
    context: int
    kv_bytes: int | None
    kv_tokens: int | None
    at_min: float | None
    at_max: float | None


def model_figures(plan: Plan, unit: Unit) -> ModelFigures | None:
    """None where the model's memory is not known, or ``unit`` is none."""
    found = plan.memory.get(unit.name)
    if found is None:
        return None
    devices = [_devices(plan, unit, packing) for packing in (plan.at_min, plan.at_max)]
    known = [device for each in devices if each for device in each]
    smallest = min(known, default=None)
    memory = found.on(smallest)
    kv_bytes = kv_tokens = None
    if smallest is not None:
        kv_tokens = memory.kv_tokens(smallest)
        kv_bytes = memory.kv_bytes or max(0, int(smallest * memory.utilization) - memory.weights - memory.working)
    at_min, at_max = (
        None if each is None else math.fsum(found.on(device).full_sequences(device) for device in each)
        for each in devices
    )
    return ModelFigures(memory.weights, memory.working, memory.context, kv_bytes, kv_tokens, at_min, at_max)


def _devices(plan: Plan, unit: Unit, packing: Packing | None) -> list[int] | None:
    """The memory of the smallest device of each placed replica; None where one is not known."""
    if packing is None:
        return None
    of_gpus = unit.args is not None and unit.args.resources.num_gpus > 0
    sizes: list[int] = []
    for placed in packing.placed:
        if placed.name == unit.name:
            nodes = [plan.nodes[spot.node] for spot in placed.spots if spot.gpus or not of_gpus]
            own = [node.gpu_bytes if of_gpus else node.ram_bytes for node in nodes]
            known = [size for size in own if size is not None]
            if len(known) < len(own):
                return None
            sizes.append(min(known))
    return sizes


def as_json(plan: Plan, unknown: Mapping[str, str]) -> dict[str, Any]:
    """The plan for machines; ``docs/plan.md`` describes the keys. ``unknown``: why a model's memory is not known."""
    return {
        "fits": plan.fits and not unknown if plan.at_min is not None else None,
        "starts": plan.starts if plan.at_min is not None else None,
        "nodes_are_added": plan.grows,
        "models": [_model(plan, unit, unknown) for unit in plan.units],
        "nodes": [_node(node) for node in plan.nodes],
        "min": _packing(plan, plan.at_min),
        "max": _packing(plan, plan.at_max),
        "problems": [
            {
                "name": p.name,
                "at": p.at,
                "wanted": p.wanted,
                "found": p.found,
                "never": p.never,
                "why": p.why,
                "changes": list(p.changes),
            }
            for p in plan.problems
        ],
        "cure": plan.cure or None,
        "notes": list(plan.notes),
        "deploy": None
        if plan.changes is None
        else [
            {"application": c.application, "action": c.action.value, "why": c.why, "keys": list(c.keys)}
            for c in plan.changes
        ],
    }


def _model(plan: Plan, unit: Unit, unknown: Mapping[str, str]) -> dict[str, Any]:
    figures = model_figures(plan, unit)
    memory = None
    if figures is not None:
        memory = {
            "weights_bytes": figures.weights,
            "working_bytes": figures.working,
            "kv_cache_bytes": figures.kv_bytes,
            "kv_tokens": figures.kv_tokens,
            "context_tokens": figures.context,
            "sequences_min": figures.at_min,
            "sequences_max": figures.at_max,
        }
    return {
        "name": unit.name,
        "min_replicas": unit.least,
        "max_replicas": unit.most,
        "needs": [{"resources": _finite(need.resources), "labels": dict(need.labels)} for need in unit.needs],
        "memory": memory,
        "memory_unknown": unknown.get(unit.name),
    }


def _node(node: Node) -> dict[str, Any]:
    return {
        "name": node.name,
        "resources": _finite(node.resources),
        "labels": dict(node.labels),
        "gpu_bytes": node.gpu_bytes,
        "memory_bytes": node.ram_bytes,
    }


def _packing(plan: Plan, packing: Packing | None) -> dict[str, Any] | None:
    if packing is None:
        return None
    return {
        "placed": [_placed(plan, placed) for placed in packing.placed],
        "missing": dict(packing.missing),
        "free_gpus": {
            node.name: list(left.gpus) for node, left in zip(plan.nodes, packing.left, strict=True) if left.gpus
        },
        "every_way_tried": packing.proven,
    }


def _placed(plan: Plan, placed: Placed) -> dict[str, Any]:
    return {
        "name": placed.name,
        "replica": placed.replica,
        "on": [
            {"node": plan.nodes[spot.node].name, "gpus": list(spot.gpus), "share": spot.share} for spot in placed.spots
        ],
    }


def _finite(resources: Mapping[str, float]) -> dict[str, float | None]:
    """JSON has no infinity: None is "enough"."""
    return {name: None if math.isinf(amount) else amount for name, amount in resources.items()}
