"""Deployment files and memories for tests: entries as a person writes them, sizes that are easy to reckon with."""

from collections.abc import Mapping
from typing import Any

from serve_app.config import ModelArgs
from serve_app.planning.memory import ReplicaMemory
from serve_app.planning.nodes import GIB
from serve_app.planning.sizing import Sizer

GATEWAY = {"name": "gateway", "import_path": "serve_app.gateway:app", "route_prefix": "/"}
CONTEXT = 16 * 1024


def model(name: str, *, deployment: Mapping[str, Any] | None = None, **args: Any) -> dict[str, Any]:
    """A model's entry. ``deployment``: options of its ``Model``."""
    return {
        "name": name,
        "import_path": "serve_app.model:app",
        "route_prefix": None,
        "args": {"source": {"hub": "org/name"}, **args},
        "deployments": [{"name": "Model", **(deployment or {})}],
    }


def scaled(least: int, most: int) -> dict[str, Any]:
    return {"autoscaling_config": {"min_replicas": least, "max_replicas": most}}


def config(*entries: Mapping[str, Any]) -> dict[str, Any]:
    return {"applications": [GATEWAY, *entries]}


def sizer(weights_gib: float, *, kv_gib: float = 1.0) -> Sizer:
    """A model with so much weight and so much KV cache for a full sequence, halved by fp8, divided by its workers."""

    def sized(args: ModelArgs, gpu_bytes: int | None) -> ReplicaMemory:
        context = int(args.engine.get("max_model_len", CONTEXT))
        per_token = kv_gib * GIB / CONTEXT / args.workers
        if args.engine.get("kv_cache_dtype") == "fp8":
            per_token /= 2
        return ReplicaMemory(
            utilization=args.gpu_memory_utilization or 0.9,
            weights=int(weights_gib * GIB / args.workers),
            working=0,
            kv_per_token=per_token,
            context=context,
            max_num_seqs=args.max_num_seqs,
        )

    return sized
