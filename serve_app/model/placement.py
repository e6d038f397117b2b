"""What one replica asks of the cluster: its actor's resources and, for several workers, its placement group.

* one worker: the GPU (or its share) on the replica actor itself; vLLM runs in one child process.
* tensor parallel: all GPUs in one bundle, so on one node (STRICT_PACK); vLLM's own worker processes in the replica.
* pipeline parallel: one bundle per worker, packed but allowed over several nodes; Ray workers, and the replica
  actor's own bundle without a GPU.
* no GPUs: CPUs on the actor; vLLM's worker processes share them.
"""

from dataclasses import dataclass
from typing import Any

from serve_app.config import ModelArgs


@dataclass(frozen=True, slots=True)
class Placement:
    """Options of a Serve deployment. ``bundles`` and ``strategy`` are None where no placement group is needed."""

    actor_options: dict[str, Any]
    bundles: list[dict[str, float]] | None = None
    strategy: str | None = None


def placement(args: ModelArgs) -> Placement:
    wants = args.resources
    actor: dict[str, Any] = {"num_cpus": wants.num_cpus}
    if wants.custom:
        actor["resources"] = dict(wants.custom)
    if wants.accelerator_type:
        actor["accelerator_type"] = wants.accelerator_type
    if args.env:
        actor["runtime_env"] = {"env_vars": dict(args.env)}

    if args.workers == 1 or wants.num_gpus == 0:
        return Placement(actor | {"num_gpus": wants.num_gpus})

    first = {"CPU": wants.num_cpus} | dict(wants.custom)
    # Ray's own resource name of an accelerator type; a sliver of it pins a bundle to such nodes.
    pin = {f"accelerator_type:{wants.accelerator_type}": 0.001} if wants.accelerator_type else {}
    if args.pipeline_parallel_size == 1:
        gpus = float(args.workers)
        return Placement(actor | {"num_gpus": gpus}, [first | {"GPU": gpus} | pin], "STRICT_PACK")
    return Placement(actor | {"num_gpus": 0}, [first | pin, *([{"GPU": 1.0} | pin] * args.workers)], "PACK")
