"""packing: nothing is ever placed where it does not fit, and what fits finds a place."""

import itertools
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.planning.nodes import GIB, Need, Node, matches, parse_nodes
from serve_app.planning.packing import Packing, Want, pack

TINY = 1e-9


def gpus(count: float, cpus: float = 0, **labels: str) -> Need:
    return Need({"GPU": count, "CPU": cpus}, labels)


def want(name: str, count: int, *needs: Need, gib: float = 0, per_node: int | None = None) -> Want:
    return Want(name, needs, count, gpu_bytes=int(gib * GIB), per_node=per_node)


def where(packing: Packing, name: str) -> list[list[tuple[int, tuple[int, ...]]]]:
    """(node, its GPUs) of each need of each replica."""
    return [[(spot.node, spot.gpus) for spot in p.spots] for p in packing.placed if p.name == name]


# --- Ray's rules


def test_tensor_parallel_takes_whole_gpus_of_one_node() -> None:
    """Four free GPUs on two nodes are no place for a model that needs three of one."""
    nodes = parse_nodes("2x2xL4-24G")
    assert pack([want("tp2", 2, gpus(2))], nodes).missing == {}
    packing = pack([want("tp3", 1, gpus(3))], nodes)
    assert packing.missing == {"tp3": 1}
    assert packing.proven


def test_a_share_lies_on_one_gpu_and_several_shares_on_the_same() -> None:
    """0.6 + 0.4 fill one GPU; three times 0.6 need three, though their sum is 1.8."""
    one = parse_nodes("1x1xL4-24G")
    packing = pack([want("a", 1, gpus(0.6)), want("b", 1, gpus(0.4))], one)
    assert (where(packing, "a"), where(packing, "b")) == ([[(0, (0,))]], [[(0, (0,))]])
    assert packing.left[0].gpus == (0.0,)
    assert pack([want("a", 3, gpus(0.6))], parse_nodes("1x2xL4-24G")).missing == {"a": 1}


def test_shares_leave_whole_gpus_whole() -> None:
    """Small models fill the GPU that is shared already before they touch the next."""
    packing = pack([want("small", 3, gpus(0.25)), want("whole", 1, gpus(1))], parse_nodes("1x2xL4-24G"))
    assert packing.missing == {}
    assert sorted(packing.left[0].gpus) == [0.0, 0.25]


def test_small_models_leave_whole_nodes_for_large_ones() -> None:
    """Two single-GPU replicas go to one node, so that the other keeps its four."""
    packing = pack([want("chat", 2, gpus(1)), want("tp4", 1, gpus(4))], parse_nodes("2x4xL4-24G"))
    assert packing.missing == {}
    assert len({node for spots in where(packing, "chat") for node, _ in spots}) == 1


def test_pipeline_parallel_prefers_one_node_and_may_take_several() -> None:
    """PACK: one node where it has room, else bundle by bundle; all of a replica or nothing of it."""
    replica = (gpus(0, cpus=1), *[gpus(1)] * 4)
    on_one = pack([want("pp", 1, *replica)], parse_nodes("2x4xL4-24G"))
    assert {node for node, _ in where(on_one, "pp")[0]} in ({0}, {1})
    over_two = pack([want("pp", 1, *replica)], parse_nodes("2x2xL4-24G"))
    assert {node for node, _ in where(over_two, "pp")[0]} == {0, 1}
    too_few = pack([want("pp", 1, *replica)], parse_nodes("1x3xL4-24G"))
    assert too_few.missing == {"pp": 1}
    assert too_few.left[0].gpus == (1.0, 1.0, 1.0)


def test_types_labels_and_custom_resources_bind() -> None:
    """Each is a reason to be on that node alone."""
    nodes = parse_nodes("1x1xH200-141G,1x1xL4-24G:rack=a,1x1xL4-24G:rack=b:1nvme")
    for need, node in (
        (Need({"GPU": 1, "accelerator_type:H200": 0.001}), 0),
        (gpus(1, rack="a"), 1),
        (gpus(1, rack="!in(a, b)"), 0),
        (Need({"GPU": 1, "nvme": 1}), 2),
    ):
        assert where(pack([want("m", 1, need)], nodes), "m")[0][0][0] == node
    assert pack([want("m", 1, Need({"GPU": 1, "accelerator_type:B200": 0.001}))], nodes).missing == {"m": 1}


def test_a_model_goes_where_its_memory_is_and_leaves_large_gpus_to_those_that_need_them() -> None:
    """The smallest GPU that holds it; a size that is not known keeps nobody away."""
    nodes = parse_nodes("1x1xH200-141G,1x1xL4-24G")
    packing = pack([want("big", 1, gpus(1), gib=80), want("small", 1, gpus(1), gib=10)], nodes)
    assert (where(packing, "big"), where(packing, "small")) == ([[(0, (0,))]], [[(1, (0,))]])
    assert pack([want("huge", 1, gpus(1), gib=200)], nodes).missing == {"huge": 1}
    assert pack([want("huge", 1, gpus(1), gib=200)], [Node("n", {"GPU": 1, "CPU": 1})]).missing == {}


def test_the_memory_of_the_machine_is_counted_for_cpu_engines() -> None:
    """Four times 20 GiB are more than 64."""
    amount = Want("amount", (Need({"CPU": 1}),), 4, ram_bytes=20 * GIB)
    assert pack([amount], parse_nodes("1x16cpu:64G")).missing == {"amount": 1}
    assert pack([amount], parse_nodes("1x16cpu")).missing == {}


def test_a_limit_of_replicas_per_node() -> None:
    """max_replicas_per_node of Serve."""
    nodes = parse_nodes("2x8xL4-24G")
    packing = pack([want("m", 7, gpus(1), per_node=3)], nodes)
    assert packing.missing == {"m": 1}
    assert Counter(spots[0][0] for spots in where(packing, "m")) == {0: 3, 1: 3}


def test_cpu_work_stays_off_gpu_nodes_while_others_have_room() -> None:
    """The gateway needs no GPU, and models need CPUs beside theirs."""
    nodes = parse_nodes("1x1xL4-24G:2cpu,1x1cpu")
    packing = pack([want("gateway", 1, Need({"CPU": 1})), want("m", 1, gpus(1, cpus=2))], nodes)
    assert packing.missing == {}
    assert where(packing, "gateway") == [[(1, ())]]


def test_a_later_turn_takes_nothing_from_an_earlier_one() -> None:
    """Replicas beyond the minimum never push a minimum out; they are numbered on."""
    small = want("small", 1, gpus(1))
    large = Want("large", (gpus(2),), 1, turn=1)
    packing = pack([small, large, Want("small", (gpus(1),), 1, turn=1)], parse_nodes("1x2xL4-24G"))
    assert packing.missing == {"large": 1}
    assert [(p.name, p.replica) for p in packing.placed] == [("small", 1), ("small", 2)]


def test_what_runs_already_stays_and_is_numbered_first() -> None:
    """Although the plan would have put it elsewhere; what cannot run where it is said to is placed like the rest."""
    nodes = parse_nodes("3x2xL4-24G")
    stays = replace(want("m", 3, gpus(1)), standing=((2,), (1,)))
    assert [node for ((node, _),) in where(pack([stays], nodes), "m")] == [2, 1, 1]
    cannot = replace(want("m", 1, gpus(2)), standing=((0,),))
    others = replace(want("other", 1, gpus(1)), standing=((0,),))
    assert where(pack([others, cannot], nodes), "m") != [[(0, (0, 1))]]
    assert pack([others, cannot], nodes).missing == {}


def test_what_serve_may_do_when_it_spreads() -> None:
    """Single GPUs first, over all nodes: then no node has four left."""
    wants = [want("chat", 2, gpus(1)), want("tp4", 1, gpus(4))]
    assert pack(wants, parse_nodes("2x4xL4-24G"), spread=True).missing == {"tp4": 1}


def test_the_exhaustive_search_finds_what_best_fit_misses() -> None:
    """Sizes that fill two GPUs exactly in one way only."""
    sizes = [0.5, 0.3, 0.2, 0.4, 0.4, 0.2]
    packing = pack([want(f"m{i}", 1, gpus(size)) for i, size in enumerate(sizes)], parse_nodes("1x2xL4-24G"))
    assert packing.missing == {}


def test_the_same_input_gives_the_same_answer() -> None:
    """A plan can be compared with yesterday's."""
    nodes = parse_nodes("3x4xL4-24G,2x8xH200-141G")
    wants = [want(f"m{i}", 2, gpus([0.5, 1, 2][i % 3]), gib=[10, 40][i % 2]) for i in range(9)]
    assert pack(wants, nodes) == pack(wants, nodes)


def test_a_large_fleet_is_packed_in_a_moment() -> None:
    """200 models, 1,000 replicas, 300 nodes. (The bound is generous: busy test machines.)"""
    nodes = parse_nodes("200x8xH200-141G:rack=a,80x4xL4-24G,20x64cpu")
    wants = [want(f"m{i}", 5, gpus([0.25, 1, 1, 2, 4][i % 5], cpus=1), gib=i % 7 * 20) for i in range(195)]
    wants += [want(f"pp{i}", 5, gpus(0, cpus=1), *[gpus(1)] * 8) for i in range(5)]
    start = time.monotonic()
    packing = pack(wants, nodes)
    assert time.monotonic() - start < 2
    assert packing.missing == {}


# --- Whatever goes in


LABELS = st.sampled_from([{}, {"rack": "a"}, {"rack": "b"}])
SELECTORS = st.sampled_from([{}, {}, {}, {"rack": "a"}, {"rack": "!a"}, {"rack": "in(a, b)"}])


@st.composite
def some_nodes(draw: st.DrawFn, most: int) -> list[Node]:
    nodes = []
    for i in range(draw(st.integers(1, most))):
        resources = {"CPU": float(draw(st.integers(0, 4))), "GPU": float(draw(st.integers(0, 3)))}
        size = draw(st.sampled_from([None, 24 * GIB, 80 * GIB]))
        nodes.append(Node(f"n{i}", resources, draw(LABELS), size))
    return nodes


@st.composite
def some_wants(draw: st.DrawFn, most: int) -> list[Want]:
    wants = []
    for i in range(draw(st.integers(1, most))):
        cpus = float(draw(st.sampled_from([0, 0.5, 1, 2])))
        labels = draw(SELECTORS)
        size = draw(st.sampled_from([0, 0, 40 * GIB]))
        amount = draw(st.sampled_from([0, 0.2, 0.3, 0.4, 0.5, 0.6, 1, 1, 2, 3]))
        needs: tuple[Need, ...] = (Need({"CPU": cpus, "GPU": amount}, labels),)
        if amount >= 2 and draw(st.booleans()):
            needs = (Need({"CPU": cpus}, labels), *[Need({"GPU": 1.0}, labels)] * int(amount))
        wants.append(Want(f"m{i}", needs, draw(st.integers(1, 3)), gpu_bytes=size))
    return wants


@given(wants=some_wants(6), nodes=some_nodes(4), spread=st.booleans(), data=st.data())
@settings(max_examples=300, deadline=None)
def test_nothing_is_ever_overfull(wants: list[Want], nodes: list[Node], spread: bool, data: st.DataObject) -> None:
    """No node's resources, no GPU's share, no memory, no label is ever violated; each replica is placed or missing.

    Whatever is said to run already, even where it cannot.
    """
    place = st.integers(0, len(nodes) - 1)
    wants = [
        replace(w, standing=tuple(data.draw(st.lists(st.tuples(*[place] * len(w.needs)), max_size=2)))) for w in wants
    ]
    packing = pack(wants, nodes, spread=spread)
    used: list[Counter[str]] = [Counter() for _ in nodes]
    shares: Counter[tuple[int, int]] = Counter()
    by_name = {want.name: want for want in wants}
    count = Counter(placed.name for placed in packing.placed)
    assert {w.name: w.count for w in wants} == {w.name: count[w.name] + packing.missing.get(w.name, 0) for w in wants}
    for placed in packing.placed:
        model = by_name[placed.name]
        assert len(placed.spots) == len(model.needs)
        for need, spot in zip(model.needs, placed.spots, strict=True):
            node = nodes[spot.node]
            wanted = need.resources.get("GPU", 0)
            runs_already = (*(other.node for other in placed.spots),) in model.standing
            assert runs_already or matches(need.labels, node.labels)
            assert len(spot.gpus) == math.ceil(wanted) == len(set(spot.gpus))
            assert all(0 <= i < node.gpus for i in spot.gpus)
            if wanted:
                assert spot.share == min(wanted, 1)
                assert runs_already or node.gpu_bytes is None or node.gpu_bytes >= model.gpu_bytes
            used[spot.node].update({name: amount for name, amount in need.resources.items() if name != "GPU"})
            shares.update({(spot.node, i): spot.share for i in spot.gpus})
    for node, amounts in zip(nodes, used, strict=True):
        assert all(amount <= node.resources.get(name, 0) + TINY for name, amount in amounts.items())
    assert all(share <= 1 + TINY for share in shares.values())
    for i, left in enumerate(packing.left):
        assert left.gpus == pytest.approx([1 - shares[i, gpu] for gpu in range(nodes[i].gpus)])


@given(wants=some_wants(4), nodes=some_nodes(3))
@settings(max_examples=200, deadline=None)
def test_it_agrees_with_brute_force(wants: list[Want], nodes: list[Node]) -> None:
    """On tiny fleets everything finds a place exactly where some assignment of needs to GPUs exists."""
    if sum(len(w.needs) * w.count for w in wants) > 6:
        return
    packing = pack(wants, nodes)
    assert packing.proven
    assert (not packing.missing) is _possible(wants, nodes)


def _possible(wants: Sequence[Want], nodes: Sequence[Node]) -> bool:
    """Every assignment of every need to a node and a set of its GPUs, without any cleverness."""
    items = [(w, need) for w in wants for _ in range(w.count) for need in w.needs]

    def places(w: Want, need: Need) -> list[tuple[int, tuple[int, ...]]]:
        wanted = need.resources.get("GPU", 0)
        return [
            (i, chosen)
            for i, node in enumerate(nodes)
            if matches(need.labels, node.labels)
            and (not wanted or node.gpu_bytes is None or node.gpu_bytes >= w.gpu_bytes)
            for chosen in itertools.combinations(range(node.gpus), math.ceil(wanted))
        ]

    def go(at: int, cpus: list[float], free: dict[tuple[int, int], float]) -> bool:
        if at == len(items):
            return True
        w, need = items[at]
        wanted = need.resources.get("GPU", 0)
        for i, chosen in places(w, need):
            share = min(wanted, 1)
            rest = cpus[i] - need.resources.get("CPU", 0)
            if rest < -TINY or any(free[i, g] < share - TINY for g in chosen):
                continue
            after = free | {(i, g): free[i, g] - share for g in chosen}
            if go(at + 1, [*cpus[:i], rest, *cpus[i + 1 :]], after):
                return True
        return False

    return go(
        0,
        [node.resources["CPU"] for node in nodes],
        {(i, g): 1.0 for i, node in enumerate(nodes) for g in range(node.gpus)},
    )
