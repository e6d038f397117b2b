"""How a changed model is rolled: by what is free now."""

from typing import Any

import pytest

from serve_app.config import ModelArgs
from serve_app.model.placement import placement
from serve_app.model.rollout import NEW_FIRST, OLD_FIRST, rollout
from serve_app.planning.nodes import Node


def args(**more: Any) -> ModelArgs:
    return ModelArgs.model_validate({"source": {"hub": "org/name"}, **more})


def nodes(free: dict[str, dict[str, float]]) -> list[Node]:
    return [Node(name, resources, {"rack": name}) for name, resources in free.items()]


ONE = args()
TP2 = args(tensor_parallel_size=2)
PP2 = args(pipeline_parallel_size=2)
H100 = args(resources={"accelerator_type": "H100"})
SHARE = args(resources={"num_gpus": 0.25})
CUSTOM = args(resources={"custom": {"nvme": 1}})
RACK_B = args(resources={"labels": {"rack": "b"}})
TP2_RACK_B = args(tensor_parallel_size=2, resources={"labels": {"rack": "in(b, c)"}})
CPU_ONLY = args(resources={"num_gpus": 0, "num_cpus": 0.5}, tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("model", "free", "fits"),
    [
        (ONE, {"a": {"CPU": 1, "GPU": 1}}, True),
        (ONE, {"a": {"CPU": 8, "GPU": 0.75}}, False),
        (ONE, {"a": {"CPU": 0.5, "GPU": 1}}, False),
        (ONE, {"a": {"CPU": 8}, "b": {"GPU": 1}}, False),
        (ONE, {}, False),
        (TP2, {"a": {"CPU": 1, "GPU": 2}}, True),
        (TP2, {"a": {"CPU": 8, "GPU": 1}, "b": {"CPU": 8, "GPU": 1}}, False),
        (PP2, {"a": {"CPU": 8, "GPU": 1}, "b": {"CPU": 8, "GPU": 1}}, True),
        (PP2, {"a": {"CPU": 8, "GPU": 1}, "b": {"CPU": 8}}, False),
        (H100, {"a": {"CPU": 8, "GPU": 1, "accelerator_type:H100": 1}}, True),
        (H100, {"a": {"CPU": 8, "GPU": 1, "accelerator_type:L4": 1}}, False),
        (SHARE, {"a": {"CPU": 1, "GPU": 0.25}}, True),
        (CUSTOM, {"a": {"CPU": 1, "GPU": 1, "nvme": 1}}, True),
        (CUSTOM, {"a": {"CPU": 1, "GPU": 1}}, False),
        (RACK_B, {"a": {"CPU": 8, "GPU": 1}, "b": {"CPU": 8}}, False),
        (RACK_B, {"a": {"CPU": 8}, "b": {"CPU": 8, "GPU": 1}}, True),
        (TP2_RACK_B, {"a": {"CPU": 8, "GPU": 2}, "b": {"CPU": 8, "GPU": 1}}, False),
        (TP2_RACK_B, {"a": {"CPU": 8}, "c": {"CPU": 8, "GPU": 2}}, True),
        (CPU_ONLY, {"a": {"CPU": 0.49999999}}, True),
        (CPU_ONLY, {"a": {"CPU": 0.4}}, False),
    ],
)
def test_new_first_where_one_more_replica_fits(model: ModelArgs, free: dict[str, dict[str, float]], fits: bool) -> None:
    """One worker and tensor parallelism need one node, pipeline parallelism as many as it takes."""
    assert rollout(placement(model), nodes(free)).max_surge_percent == (NEW_FIRST if fits else OLD_FIRST)


def test_old_first_where_the_cluster_cannot_be_read() -> None:
    """Waiting for ever for room that is not there is worse than a gap."""
    assert rollout(placement(ONE), None).max_surge_percent == OLD_FIRST


def test_the_log_line_says_which_and_what_for() -> None:
    """An operator reads the way and the resources that decided it."""
    free = nodes({"a": {"CPU": 8.0, "GPU": 1.0}, "b": {"CPU": 8.0, "GPU": 1.0}})
    assert rollout(placement(PP2), free).why.endswith(
        "replica (CPU 1, GPU 2 over several nodes) fits into what is free"
    )
    assert rollout(placement(TP2), free).why.endswith("no room for another replica (CPU 1, GPU 2)")
