"""reasons: what is missing, in words that name what is needed and what there is."""

import pytest

from serve_app.planning.nodes import GIB, Need, Node, parse_nodes
from serve_app.planning.packing import Want, pack
from serve_app.planning.reasons import crowded, never, waiting

NODES = parse_nodes("2x4xL4-24G:16cpu:rack=a,1x8xH200-141G:96cpu:rack=b:1nvme")
NONE = parse_nodes("2x8cpu:16G")


def want(resources: dict[str, float], labels: dict[str, str] | None = None, **more: int | float | str) -> Want:
    return Want("m", (Need(resources, labels or {}),), 1, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wanted", "nodes", "words"),
    [
        (want({"GPU": 1}), NODES, None),
        (want({"GPU": 16}), NODES, "needs 16 GPUs of one node; the cluster has 16 GPUs, but at most 8 on one node"),
        (want({"GPU": 32}), NODES, "needs 32 GPUs of one node; the cluster has 16 GPUs"),
        (want({"GPU": 2}), NONE, "needs 2 GPUs of one node; the cluster has no GPU"),
        (want({"GPU": 0.5}), NONE, "needs 0.5 of a GPU; the cluster has no GPU"),
        (
            want({"GPU": 1, "accelerator_type:B200": 0.001}),
            NODES,
            "needs accelerator type B200; the cluster has H200 and L4",
        ),
        (
            want({"GPU": 8, "accelerator_type:L4": 0.001}),
            NODES,
            "needs accelerator type L4 and 8 GPUs of one node; such nodes have 8 GPUs, but at most 4 on one node",
        ),
        (want({"GPU": 1}, {"rack": "c"}), NODES, "needs label rack: c; the cluster has rack: a and b"),
        (want({"GPU": 1}, {"zone": "c"}), NODES, "needs label zone: c; the cluster has no label zone"),
        (
            want({"GPU": 1, "nvme": 1}, {"rack": "a"}),
            NODES,
            "needs label rack: a, 1 GPU and 1 nvme; such nodes have none",
        ),
        (want({"GPU": 1, "CPU": 200}), NODES, "needs 1 GPU and 200 CPUs; the cluster has at most 96 on one node"),
        (
            want({"GPU": 1}, gpu_bytes=200 * GIB, of_what="weights 180 GiB"),
            NODES,
            "needs 1 GPU and 200 GiB on each (weights 180 GiB); the cluster has at most 141 GiB on each",
        ),
        (
            want({"CPU": 1}, ram_bytes=20 * GIB),
            NONE,
            "needs 1 CPU and 20 GiB of memory; the cluster has at most 16 GiB on one node",
        ),
    ],
)
def test_what_fits_on_no_node(wanted: Want, nodes: tuple[Node, ...], words: str | None) -> None:
    """The first thing that no node has beside what was asked before it; None where one replica fits."""
    assert never(wanted, nodes) == words


def test_pipeline_parallel_needs_a_sum() -> None:
    """Each of its GPUs would find a place, all of them do not."""
    replica = Want("pp", (Need({"CPU": 1}), *[Need({"GPU": 1.0})] * 20), 1)
    assert never(replica, NODES) == "needs 20 GPUs, on one node or several; such nodes have 16 GPUs"


def test_fragmentation_is_named() -> None:
    """Enough GPUs are free, but not together."""
    nodes = parse_nodes("2x4xL4-24G:16cpu")
    packing = pack([Want("one", (Need({"GPU": 1}),), 5)], nodes)
    wanted = want({"GPU": 4})
    assert never(wanted, nodes) is None
    free = [left.node for left in packing.left]
    assert crowded(wanted, free) == "needs 4 GPUs of one node; the cluster has 3 GPUs free"
    assert crowded(want({"GPU": 1, "CPU": 17}), free) == (
        "needs 1 GPU and 17 CPUs; such nodes have at most 16 free on one node"
    )
    three = parse_nodes("3x4xL4-24G")
    packing = pack([Want("two", (Need({"GPU": 2}),), 1), Want("three", (Need({"GPU": 3}),), 2)], three)
    assert crowded(wanted, [left.node for left in packing.left]) == (
        "needs 4 GPUs of one node; the cluster has 4 GPUs free, but at most 2 on one node"
    )


def test_parts_of_a_gpu_that_are_free() -> None:
    """0.4 is no place for 0.5."""
    nodes = parse_nodes("1x1xL4-24G")
    packing = pack([Want("some", (Need({"GPU": 0.6}),), 1)], nodes)
    assert crowded(want({"GPU": 0.5}), [left.node for left in packing.left]) == (
        "needs 0.5 of a GPU; the cluster has at most 0.4 of one free"
    )


def test_what_is_about_to_be_placed_lacks_nothing() -> None:
    """While one replica fits into what is free there is nothing to say; once none does there is, with what is free."""
    nodes = parse_nodes("1x1xL4-24G:4cpu")
    assert waiting(want({"CPU": 2}), nodes, nodes) is None
    packing = pack([Want("some", (Need({"CPU": 3}),), 1)], nodes)
    assert waiting(want({"CPU": 2}), nodes, [left.node for left in packing.left]) == (
        "no room for 1 replica: needs 2 CPUs; the cluster has at most 1 free on one node "
        f"(free: {nodes[0].name} 1 of 4 CPUs)"
    )
