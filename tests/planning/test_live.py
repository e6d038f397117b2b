"""live: Ray's answers, reduced. The answers are shortened ones of ray 2.60."""

from typing import Any

import pytest

from serve_app.planning.live import Snapshot, snapshot
from serve_app.planning.nodes import GIB
from serve_app.ray_api import RayApi, RayApiError

HEAD, LARGE, SMALL = "aaaaaa0", "bbbbbb0", "cccccc0"


def node(key: str, ip: str, resources: dict[str, float], **more: Any) -> dict[str, Any]:
    own = {"memory": 1e10, "object_store_memory": 1e9, f"node:{ip}": 1.0}
    return {"node_id": key, "node_ip": ip, "state": "ALIVE", "resources_total": own | resources, "labels": {}, **more}


def actor(name: str | None, node_id: str | None, resources: dict[str, float], **more: Any) -> dict[str, Any]:
    state = "ALIVE" if node_id else "PENDING_CREATION"
    return {"name": name, "node_id": node_id, "state": state, "required_resources": resources, **more}


def group(name: str, key: str, *bundles: tuple[dict[str, float], str], state: str = "CREATED") -> dict[str, Any]:
    made = [{"unit_resources": resources, "node_id": on, "label_selector": {"rack": "a"}} for resources, on in bundles]
    return {"name": name, "placement_group_id": key, "state": state, "bundles": made}


NODES = [
    node(LARGE, "10.0.0.2", {"CPU": 8.0, "GPU": 2.0, "accelerator_type:H100": 1.0}, labels={"rack": "a"}),
    node(HEAD, "10.0.0.1", {"CPU": 2.0, "node:__internal_head__": 1.0}, is_head_node=True),
    node(SMALL, "10.0.0.2", {"CPU": 8.0, "GPU": 1.0}),
    node("dead", "10.0.0.9", {"GPU": 8.0}, state="DEAD"),
]
SUMMARY = [
    {"raylet": {"nodeId": LARGE}, "gpus": [{"memoryTotal": 81559}, {"memoryTotal": 81000}], "mem": [64 * GIB, 1, 2.0]},
    {"raylet": {"nodeId": SMALL}, "gpus": []},
    {"agent": {}},
]
INSIDE = {"placement_group_id": "g1"}
ACTORS = [
    actor("SERVE_REPLICA::gateway#Gateway#x", HEAD, {"CPU": 1.0}),
    actor("SERVE_REPLICA::tp2#Model#y", LARGE, {"GPU_group_g1": 2.0}, **INSIDE),
    actor("SERVE_REPLICA::half#Model#z", SMALL, {"CPU": 1.0, "GPU": 0.5}),
    actor("SERVE_REPLICA::late#Model#w", None, {"GPU": 1.0}, label_selector={"rack": "b"}),
    actor("SERVE_REPLICA::tp8#Model#v", None, {"GPU_group_g2": 8.0}, placement_group_id="g2"),
    actor("trainer", SMALL, {"CPU": 2.0, "GPU": 0.25}),
    actor(None, None, {"GPU": 1.0}),
]
GROUPS = [
    group("SERVE_REPLICA::tp2#Model#y", "g1", ({"CPU": 1.0, "GPU": 2.0}, LARGE)),
    group("SERVE_REPLICA::tp8#Model#v", "g2", ({"CPU": 1.0, "GPU": 8.0}, ""), state="PENDING"),
    group("somebody's", "g3", ({"CPU": 4.0}, LARGE)),
    group("gone", "g4", ({"GPU": 2.0}, LARGE), state="REMOVED"),
]
SERVE = {
    "http_options": {"host": "127.0.0.1", "port": 8000},
    "applications": {
        "tp2": {"deployed_app_config": {"name": "tp2"}, "status": "RUNNING"},
        "going": {"deployed_app_config": {"name": "going"}, "status": "DELETING"},
        "by-hand": {"deployed_app_config": None, "status": "RUNNING"},
    },
}


class RecordedApi(RayApi):
    def __init__(self, nodes: list[dict[str, Any]]) -> None:
        super().__init__("http://127.0.0.1:9")
        self._answers = {"nodes": nodes, "actors": ACTORS, "placement_groups": GROUPS}

    def listed(self, what: str, **query: str) -> list[Any]:
        return self._answers[what]

    def get(self, path: str, **query: str) -> Any:
        return {"summary": SUMMARY}

    def serve(self) -> Any:
        return SERVE


@pytest.fixture
def seen() -> Snapshot:
    return snapshot(RecordedApi(NODES))


def test_nodes_have_what_others_than_serve_leave(seen: Snapshot) -> None:
    """The head first; a GPU of which somebody else has a part is not counted at all, for it is not known which."""
    assert [node.name for node in seen.nodes] == ["10.0.0.1", "10.0.0.2 (bbbbbb)", "10.0.0.2 (cccccc)"]
    head, large, small = seen.nodes
    assert head.resources == {"CPU": 2.0}
    assert large.resources == {"CPU": 4.0, "GPU": 2.0, "accelerator_type:H100": 1.0}
    assert small.resources == {"CPU": 6.0, "GPU": 0.0}
    assert large.labels == {"rack": "a"}


def test_hardware_that_the_dashboard_knows(seen: Snapshot) -> None:
    """The smaller of two GPUs counts, in MiB; where there is nothing to read it is not known."""
    head, large, small = seen.nodes
    assert (large.gpu_bytes, large.ram_bytes) == (81000 << 20, 64 * GIB)
    assert (head.gpu_bytes, small.gpu_bytes, small.ram_bytes) == (None, None, None)


def test_what_is_free_now(seen: Snapshot) -> None:
    """Less what anybody holds: an actor of a placement group is counted once, with its group."""
    head, large, small = seen.free
    assert head.resources == {"CPU": 1.0}
    assert large.resources == {"CPU": 3.0, "GPU": 0.0, "accelerator_type:H100": 1.0}
    assert small.resources == {"CPU": 5.0, "GPU": 0.25}


def test_what_runs_and_what_waits(seen: Snapshot) -> None:
    """Replicas by the numbers of their nodes; those without one with what they need."""
    assert seen.running == {("gateway", "Gateway"): [(0,)], ("half", "Model"): [(2,)], ("tp2", "Model"): [(1,)]}
    assert {name: (w.count, [n.resources for n in w.needs]) for name, w in seen.waiting.items()} == {
        "tp8": (1, [{"CPU": 1.0, "GPU": 8.0}]),
        "late": (1, [{"GPU": 1.0}]),
    }
    assert [seen.waiting[name].needs[0].labels for name in ("tp8", "late")] == [{"rack": "a"}, {"rack": "b"}]


def test_what_was_deployed(seen: Snapshot) -> None:
    """From files: not what somebody ran by hand, nor what is going."""
    assert seen.deployed == {"tp2": {"name": "tp2"}}
    assert seen.http == ("127.0.0.1", 8000)


def test_nodes_that_belong_to_a_group_are_added_as_needed(seen: Snapshot) -> None:
    """KubeRay and the cluster launcher label theirs."""
    assert not seen.grows
    worker = node("w", "10.0.0.3", {"CPU": 1.0}, labels={"ray.io/node-group": "workers"})
    assert snapshot(RecordedApi([*NODES, worker])).grows


def test_a_cluster_that_is_not_there() -> None:
    """Nobody listens: the error names the address."""
    with pytest.raises(RayApiError, match=r"http://127\.0\.0\.1:9 did not answer"):
        snapshot(RayApi("http://127.0.0.1:9"))
