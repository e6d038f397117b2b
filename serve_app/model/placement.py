"""What one replica asks of the cluster: its actor's resources and, for several workers, its placement group.

* one worker: the GPU (or its share) on the replica actor itself; vLLM runs in one child process.
* tensor parallel: all GPUs in one bundle, so on one node (STRICT_PACK); vLLM's own worker processes in the replica.
* pipeline parallel: one bundle per worker, packed but allowed over several nodes; Ray workers, and the replica
  actor's own bundle without a GPU.
* no GPUs: CPUs on the actor; vLLM's worker processes share them.

An accelerator type and labels bind every bundle.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.config import ModelArgs
from serve_app.planning.nodes import ACCELERATOR, PIN, Need


@dataclass(frozen=True, slots=True)
class Placement:
    """Options of a Serve deployment. ``bundles``, ``strategy`` and ``bundle_labels`` (a label selector for all
    bundles) are None where no placement group is needed, ``bundle_labels`` also where there are no labels."""

    actor_options: dict[str, Any]
    bundles: list[dict[str, float]] | None = None
    strategy: str | None = None
    bundle_labels: list[dict[str, str]] | None = None

    @property
    def needs(self) -> tuple[Need, ...]:
        """What one replica takes; each element has to fit on one node."""
        return needs(self.actor_options, self.bundles, self.strategy, self.bundle_labels)


def placement(args: ModelArgs) -> Placement:
    wants = args.resources
    actor: dict[str, Any] = {"num_cpus": wants.num_cpus}
    if wants.custom:
        actor["resources"] = dict(wants.custom)
    if wants.accelerator_type:
        actor["accelerator_type"] = wants.accelerator_type
    if args.env:
        actor["runtime_env"] = {"env_vars": dict(args.env)}

    # Ray takes a space after the comma of in(a, b) for part of the value.
    labels = {key: value.replace(" ", "") for key, value in wants.labels.items()}
    if args.workers == 1 or wants.num_gpus == 0:
        return Placement(actor | {"num_gpus": wants.num_gpus} | ({"label_selector": labels} if labels else {}))

    first = {"CPU": wants.num_cpus} | dict(wants.custom)
    pin = {f"{ACCELERATOR}{wants.accelerator_type}": PIN} if wants.accelerator_type else {}
    # One selector is Serve's way to say the same of all bundles.
    bundle_labels = [labels] if labels else None
    if args.pipeline_parallel_size == 1:
        gpus = float(args.workers)
        bundles = [first | {"GPU": gpus} | pin]
        return Placement(actor | {"num_gpus": gpus}, bundles, "STRICT_PACK", bundle_labels)
    bundles = [first | pin, *([{"GPU": 1.0} | pin] * args.workers)]
    return Placement(actor | {"num_gpus": 0}, bundles, "PACK", bundle_labels)


def needs(
    actor: Mapping[str, Any],
    bundles: Sequence[Mapping[str, float]] | None = None,
    strategy: str | None = None,
    bundle_labels: Sequence[Mapping[str, str]] | None = None,
) -> tuple[Need, ...]:
    """What a replica with these options of a Serve deployment takes; each element has to fit on one node.

    ``actor``: Serve's ``ray_actor_options``; without ``num_cpus`` a replica takes one.
    """
    if bundles is None:
        kind = {f"{ACCELERATOR}{actor['accelerator_type']}": PIN} if actor.get("accelerator_type") else {}
        cpus, gpus = actor.get("num_cpus"), actor.get("num_gpus") or 0
        own = {"CPU": 1 if cpus is None else cpus, "GPU": gpus, **(actor.get("resources") or {}), **kind}
        return (Need(own, dict(actor.get("label_selector") or {})),)
    labels = [dict(each) for each in bundle_labels or [{}]]
    labels = labels * len(bundles) if len(labels) == 1 else labels
    if strategy == "STRICT_PACK":
        return (Need(total(bundles), {key: value for each in labels for key, value in each.items()}),)
    return tuple(Need(dict(bundle), each) for bundle, each in zip(bundles, labels, strict=True))


def total(bundles: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for bundle in bundles for name in bundle)
    return {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in names}
