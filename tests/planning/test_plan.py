"""plan: what fits, what does not, and the nearest change that would; every advice is tried here again."""

import random
import time
from dataclasses import replace
from typing import Any

import pytest

from serve_app.config import ModelArgs
from serve_app.planning.changes import Action, Change
from serve_app.planning.fleet import fleet
from serve_app.planning.memory import ReplicaMemory
from serve_app.planning.nodes import GIB, Node, parse_nodes
from serve_app.planning.plan import Plan, make_plan
from serve_app.planning.sizing import Sizer
from tests.planning.fleets import config, model, scaled, sizer


def planned(nodes: str | tuple[Node, ...], *entries: dict[str, Any], **sizers: Sizer) -> Plan:
    """``nodes``: as for --nodes."""
    given = parse_nodes(nodes) if isinstance(nodes, str) else nodes
    return make_plan(fleet(config(*entries)), sizers, given)


def test_everything_fits() -> None:
    """No problem, no note; at max the further replicas are there too."""
    plan = planned("1x8xH200-141G", model("chat", deployment=scaled(1, 4)), chat=sizer(16))
    assert (plan.fits, plan.problems, plan.notes) == (True, (), ())
    assert [p and len(p.placed) for p in (plan.at_min, plan.at_max)] == [2, 5]


def test_without_nodes_there_is_nothing_to_fit_on() -> None:
    """What is needed is known all the same."""
    plan = make_plan(fleet(config(model("chat"))), {"chat": sizer(16)}, None)
    assert (plan.at_min, plan.at_max, plan.problems) == (None, None, ())
    assert plan.memory["chat"].on(None).weights == 16 * GIB


def test_tensor_parallel_two_on_a_cluster_with_one_gpu() -> None:
    """Refused with what is needed and what there is; one GPU of that size would hold it."""
    plan = planned("1x1xH200-141G", model("code", tensor_parallel_size=2), code=sizer(14))
    (problem,) = plan.problems
    assert (problem.name, problem.at, problem.wanted, problem.found) == ("code", "min", 1, 0)
    assert problem.never
    assert problem.why == "needs 2 GPUs of one node; the cluster has 1 GPU"
    assert problem.changes == ("tensor_parallel_size: 1", "1 node with 2 H200, 141 GiB each")
    assert not plan.starts


def test_an_accelerator_type_that_nobody_has() -> None:
    """Named with those that there are; one of them would do."""
    plan = planned("1x1xL4-24G,1x1xH200-141G", model("chat", resources={"accelerator_type": "H100"}), chat=sizer(40))
    assert plan.problems[0].why == "needs accelerator type H100; the cluster has H200 and L4"
    assert plan.problems[0].changes == ("resources.accelerator_type: H200",)


@pytest.mark.parametrize(
    ("weights", "kv", "nodes", "changes"),
    [
        # 10 + 16 GiB do not fit into 21.6, 10 + 8 do; 11 of 16 parts of the context do.
        (
            10,
            16,
            "1x4xL4-24G",
            ("engine.kv_cache_dtype: fp8", "engine.max_model_len: 11264", "tensor_parallel_size: 2"),
        ),
        # Not even the weights fit: only more GPUs help.
        (40, 1, "1x4xL4-24G", ("tensor_parallel_size: 2",)),
        (60, 1, "1x4xL4-24G", ("tensor_parallel_size: 4",)),
        (600, 1, "1x4xL4-24G", ()),
    ],
)
def test_too_large_for_its_gpu(weights: float, kv: float, nodes: str, changes: tuple[str, ...]) -> None:
    """The smallest change first, each with the value that just does."""
    plan = planned(nodes, model("big"), big=sizer(weights, kv_gib=kv))
    assert plan.problems[0].changes == changes
    assert "on each (weights" in plan.problems[0].why


def test_too_many_replicas_at_max() -> None:
    """The fleet starts; its maximum is out of reach, and how far it gets is said."""
    plan = planned("1x4xL4-24G", model("chat", deployment=scaled(1, 6)), chat=sizer(10))
    (problem,) = plan.problems
    assert (problem.at, problem.wanted, problem.found, plan.starts) == ("max", 6, 4, True)
    assert problem.changes == ("max_replicas: 4", "1 more node like L4-1 (4 L4, 24 GiB each)")


@pytest.mark.parametrize(("deployment", "key"), [({"num_replicas": 6}, "num_replicas"), (scaled(6, 8), "min_replicas")])
def test_too_many_replicas_at_min(deployment: dict[str, Any], key: str) -> None:
    """By the key that the file has."""
    plan = planned("1x4xL4-24G", model("chat", deployment=deployment), chat=sizer(10))
    assert plan.problems[0].at == "min"
    assert plan.problems[0].changes[0] == f"{key}: 4"


def test_fragmentation_is_said_and_more_nodes_are_counted() -> None:
    """Four GPUs are free, two on each node; the 16 GiB of each are not the reason."""
    entries = [
        model("three", tensor_parallel_size=3, deployment={"num_replicas": 2}),
        model("two", tensor_parallel_size=2),
    ]
    plan = planned("2x4xL4-24G", *entries, three=sizer(3), two=sizer(2))
    (problem,) = plan.problems
    assert problem.why == "needs 2 GPUs of one node; the cluster has 2 GPUs free, but at most 1 on one node"
    assert problem.changes == ("tensor_parallel_size: 1", "1 more node like L4-1 (4 L4, 24 GiB each)")


def test_what_would_cure_all_of_it() -> None:
    """Where several things do not fit, how many more nodes let all of them."""
    entries = [model(f"m{i}", tensor_parallel_size=4) for i in range(5)]
    plan = planned("2x4xL4-24G", *entries)
    assert len(plan.problems) == 3
    assert plan.cure == "3 more nodes like L4-1 (4 L4, 24 GiB each)"


def test_advice_never_makes_room_at_the_cost_of_another() -> None:
    """A larger tensor parallel size would take the other's GPU, so it is not named."""
    plan = planned("1x2xL4-24G", model("big"), model("other"), big=sizer(30), other=sizer(10))
    assert [problem.name for problem in plan.problems] == ["big"]
    assert plan.problems[0].changes == ()


def test_where_memory_is_not_known_counts_are_what_is_planned() -> None:
    """Neither an unknown GPU nor an unknown model stops the rest; it is noted where it matters."""
    unknown_gpu = planned("1x2xL4", model("big"), big=sizer(500))
    assert unknown_gpu.fits
    assert "was not checked: say it with --gpu-memory" in unknown_gpu.notes[0]
    assert planned("1x2xL4-24G", model("big")).fits
    assert planned("1x2xL4", model("big")).notes == ()


def test_ray_may_put_a_model_where_it_cannot_run() -> None:
    """Noted for models that name no type, where there are nodes on which they would fail."""
    mixed = "1x1xL4-24G,1x1xH200-141G"
    (note,) = planned(mixed, model("big"), big=sizer(40)).notes
    assert "It may put big, which needs 45.6 GiB, on L4: set resources.accelerator_type" in note
    assert planned(mixed, model("big", resources={"accelerator_type": "H200"}), big=sizer(40)).notes == ()
    assert planned(mixed, model("small"), small=sizer(4)).notes == ()


def test_serve_spreads_what_the_plan_packs() -> None:
    """Where only packing makes it fit, the setting that packs is named; elsewhere nothing is said."""
    chat, large = model("chat", deployment={"num_replicas": 2}), model("large", tensor_parallel_size=4)
    (note,) = planned("2x4xL4-24G", chat, large).notes
    assert "large may find no room: set RAY_SERVE_USE_PACK_SCHEDULING_STRATEGY=1" in note
    assert planned("3x4xL4-24G", chat, large).notes == ()


def test_a_cache_too_small_for_a_sequence_is_a_problem_everywhere() -> None:
    """Also without nodes: no GPU helps."""

    def tiny(args: ModelArgs, gpu_bytes: int | None) -> ReplicaMemory:
        return replace(sizer(4)(args, gpu_bytes), kv_bytes=1 << 20)

    plan = make_plan(fleet(config(model("chat"))), {"chat": tiny}, None)
    assert plan.problems[0].why.startswith("sets its KV cache to 1 MiB, which holds")


def test_cpu_engines_that_would_each_take_all_the_memory() -> None:
    """Two on one node, neither with a size for its cache: a note, for whether it fails depends on NUMA nodes."""
    entries = [model(name, resources={"num_gpus": 0}) for name in ("a", "b")]
    (note,) = planned("1x8cpu:64G", *entries, a=sizer(1), b=sizer(1)).notes
    assert "set it for a and b, of which several are on one node" in note
    assert planned("2x2cpu:64G", *entries, a=sizer(1), b=sizer(1)).notes == ()


# --- Beside what runs


RUNNING = {("a", "Model"): [(0,)], ("b", "Model"): [(1,)]}
STAYS = [Change("a", Action.NONE, ""), Change("b", Action.LIVE, "")]


def test_what_runs_and_is_not_restarted_stays_where_it_is() -> None:
    """Two single GPUs stand on two nodes: a model of two finds no room, though a fresh deploy would have it."""
    units = fleet(config(model("a"), model("b"), model("pair", tensor_parallel_size=2)))
    nodes = parse_nodes("2x2xL4-24G")
    assert make_plan(units, {}, nodes).fits
    plan = make_plan(units, {}, nodes, STAYS, RUNNING)
    assert plan.problems[0].name == "pair"
    assert plan.problems[0].changes[0].startswith("stop what runs and deploy anew")
    restarted = [Change("a", Action.RESTART, ""), Change("b", Action.NONE, "")]
    assert make_plan(units, {}, nodes, restarted, RUNNING).fits


def test_replicas_that_run_count_towards_those_that_are_wanted() -> None:
    """And are numbered first, where they are."""
    units = fleet({"applications": [model("b", deployment=scaled(1, 2))]})
    plan = make_plan(units, {}, parse_nodes("2x1xL4-24G"), STAYS, RUNNING)
    assert plan.at_max is not None
    assert [(p.replica, p.spots[0].node) for p in plan.at_max.placed] == [(1, 1), (2, 0)]


def test_where_nodes_are_added_it_is_said() -> None:
    """What does not fit now may then."""
    plan = make_plan(fleet(config(model("a", tensor_parallel_size=4))), {}, parse_nodes("1x1xL4"), grows=True)
    assert "Nodes are added to this cluster" in plan.notes[0]


def test_a_large_fleet_is_planned_in_a_moment() -> None:
    """200 models, up to 1,200 replicas, 300 nodes, a hundred of them too few. (Generous: busy test machines.)"""
    rng = random.Random(1)
    entries = [
        model(f"m{i}", tensor_parallel_size=rng.choice([1, 1, 2, 4, 8]), deployment=scaled(1, rng.randint(2, 9)))
        for i in range(200)
    ]
    sizers = {f"m{i}": sizer(rng.choice([1, 15, 60, 130])) for i in range(200)}
    start = time.monotonic()
    plan = planned("180x8xH200-141G:rack=a,100x4xL4-24G,20x64cpu", *entries, **sizers)
    assert time.monotonic() - start < 6
    assert len(plan.problems) > 20
