"""Where replicas land on a cluster of several nodes, and that a plan knows it before. No GPU is real: the nodes declare
theirs, and the scripted engine asks for them and uses none."""

import copy
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from serve_app import local_serve
from serve_app.config import MODEL_DEPLOYMENT
from serve_app.planning.changes import Action, changes
from serve_app.planning.live import Snapshot, snapshot
from tests.serve.cluster import PREFIX, Cluster, eventually, fake_app
from tests.serve.nodes import Node, node

# Placement has nothing to do with the proxy in front.
pytestmark = [pytest.mark.serve, pytest.mark.parametrize("yard_cluster", ["python-proxy"], indirect=True)]


@dataclass(frozen=True)
class Yard:
    """``large`` has two GPUs of type H100, ``small`` and ``other`` one each; the two are in rack b."""

    cluster: Cluster
    large: Node
    small: Node
    other: Node

    def names(self) -> dict[str, str]:
        """What each node is called in these tests, by Ray's id."""
        return {self.large.id: "large", self.small.id: "small", self.other.id: "other"}

    def seen(self) -> Snapshot:
        return snapshot(self.cluster.api)

    def where(self, app: str) -> list[set[str]]:
        """The nodes of each running replica of ``app``."""
        seen = self.seen()
        ids = [node.labels["ray.io/node-id"] for node in seen.nodes]
        replicas = seen.running.get((app, MODEL_DEPLOYMENT), ())
        return [{self.names().get(ids[i], "head") for i in nodes} for nodes in replicas]

    def groups(self, app: str) -> list[tuple[str, list[dict[str, float]], list[str]]]:
        """Of each placement group of ``app``: its strategy, its bundles and their nodes."""
        answer = self.cluster.client.get(f"{PREFIX}/{app}/groups").json()
        return [
            (
                group["strategy"],
                [group["bundles"][i] for i in sorted(group["bundles"], key=int)],
                [self.names()[group["bundles_to_node_id"][i]] for i in sorted(group["bundles"], key=int)],
            )
            for group in answer
            if group["state"] == "CREATED"
        ]

    @contextmanager
    def deployed(self, *apps: dict[str, Any], wait: bool = True) -> Iterator[None]:
        """The applications, running (``wait``); gone, with all that they held, after the block."""
        before = {node.name: node.resources for node in self.seen().free}
        try:
            self.cluster.deploy(*apps, wait=wait)
            yield
        finally:
            self.cluster.remove(*(app["name"] for app in apps))
            eventually("all is free again", lambda: {n.name: n.resources for n in self.seen().free} == before)


@pytest.fixture(scope="module")
def yard(yard_cluster: Cluster) -> Iterator[Yard]:
    with ExitStack() as stack:
        h100 = {"accelerator_type:H100": 1}
        large = stack.enter_context(node(yard_cluster, num_cpus=4, num_gpus=2, resources=h100, labels={"rack": "a"}))
        small = stack.enter_context(node(yard_cluster, num_cpus=4, num_gpus=1, labels={"rack": "b"}))
        other = stack.enter_context(
            node(yard_cluster, num_cpus=4, num_gpus=1, resources={"nvme": 1}, labels={"rack": "b"})
        )
        yield Yard(yard_cluster, large, small, other)


def wanting(name: str, *, tensor: int = 1, pipeline: int = 1, replicas: int = 1, **resources: Any) -> dict[str, Any]:
    app = fake_app(name, replicas=replicas)
    parallel = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    app["args"] |= parallel | {"resources": {"num_cpus": 0.5, **resources}}
    return app


def planned(yard: Yard, folder: Path, *apps: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Exit status and JSON of ``modelyard plan`` for what runs there and ``apps``."""
    entries = [copy.deepcopy(dict(entry)) for entry in yard.seen().deployed.values()]
    file = folder / "fleet.yaml"
    file.write_text(json.dumps({"applications": [*entries, *apps]}))
    command = [sys.executable, "-m", "serve_app.cli", "plan", str(file), "--json", "--cluster", "live"]
    command += ["--address", yard.cluster.api.address]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


def predicted(yard: Yard, plan: dict[str, Any], app: str) -> list[set[str]]:
    """Where ``plan`` puts the replicas of ``app``."""
    called = {n.name: yard.names().get(n.labels["ray.io/node-id"], "head") for n in yard.seen().nodes}
    placed = [p for p in plan["max"]["placed"] if p["name"] == app]
    return [{called[spot["node"]] for spot in p["on"]} for p in placed]


def test_tensor_parallel_lands_on_the_one_node_that_has_enough(yard: Yard) -> None:
    """STRICT_PACK, one bundle with both GPUs; the two nodes with one GPU each are no place for it."""
    with yard.deployed(wanting("tp2", tensor=2)):
        assert yard.groups("tp2") == [("STRICT_PACK", [{"CPU": 0.5, "GPU": 2.0}], ["large"])]
        assert yard.where("tp2") == [{"large"}]


def test_pipeline_parallel_spreads_over_nodes_where_one_is_too_small(yard: Yard) -> None:
    """PACK, one bundle per worker beside the replica's own; its labels bind every bundle."""
    with yard.deployed(wanting("pp2", pipeline=2, labels={"rack": "b"})):
        ((strategy, bundles, nodes),) = yard.groups("pp2")
        assert (strategy, bundles) == ("PACK", [{"CPU": 0.5}, {"GPU": 1.0}, {"GPU": 1.0}])
        assert set(nodes[1:]) == {"small", "other"}
        assert yard.where("pp2") == [{"small", "other"}]


def test_two_models_share_one_gpu(yard: Yard) -> None:
    """Two halves on a node that has one GPU; what is left of it is nothing."""
    halves = [wanting(name, num_gpus=0.5, custom={"nvme": 0.5}) for name in ("half-a", "half-b")]
    with yard.deployed(*halves):
        assert yard.where("half-a") == yard.where("half-b") == [{"other"}]
        free = {
            node.labels["ray.io/node-id"]: node.resources["GPU"] for node in yard.seen().free if "GPU" in node.resources
        }
        assert free[yard.other.id] == pytest.approx(0)


@pytest.mark.parametrize(
    ("resources", "where"),
    [
        ({"accelerator_type": "H100"}, "large"),
        ({"labels": {"rack": "!b"}}, "large"),
        ({"labels": {"rack": "in(b, c)"}, "custom": {"nvme": 1}}, "other"),
        ({"custom": {"nvme": 1}}, "other"),
    ],
)
def test_types_labels_and_custom_resources_choose_the_node(yard: Yard, resources: dict[str, Any], where: str) -> None:
    """On the actor of a model of one GPU."""
    with yard.deployed(wanting("one", **resources)):
        assert yard.where("one") == [{where}]


def test_types_and_labels_choose_the_node_of_a_group(yard: Yard) -> None:
    """On the bundles of a model of several."""
    with yard.deployed(wanting("tp2", tensor=2, accelerator_type="H100", labels={"rack": "a"})):
        pinned = {"CPU": 0.5, "GPU": 2.0, "accelerator_type:H100": 0.001}
        assert yard.groups("tp2") == [("STRICT_PACK", [pinned], ["large"])]


def test_a_plan_says_where_they_will_land(yard: Yard, tmp_path: Path) -> None:
    """The fleet fills the cluster, so there is one way; the plan names it before, and calls it unchanged after."""
    fleet = [
        wanting("tp2", tensor=2),
        wanting("half-a", num_gpus=0.5, labels={"rack": "b"}, custom={"nvme": 0.5}),
        wanting("half-b", num_gpus=0.5, labels={"rack": "b"}, custom={"nvme": 0.5}),
        wanting("one", labels={"rack": "b"}),
    ]
    status, plan = planned(yard, tmp_path, *fleet)
    assert (status, plan["fits"], plan["problems"]) == (0, True, [])
    names = [app["name"] for app in fleet]
    assert {d["application"]: d["action"] for d in plan["deploy"] if d["application"] in names} == dict.fromkeys(
        names, "add"
    )
    with yard.deployed(*fleet):
        assert {name: yard.where(name) for name in names} == {name: predicted(yard, plan, name) for name in names}
        status, again = planned(yard, tmp_path)
        assert status == 0
        assert {d["action"] for d in again["deploy"]} == {"unchanged"}
        assert {name: predicted(yard, again, name) for name in names} == {name: yard.where(name) for name in names}


def test_a_plan_refuses_what_no_node_has(yard: Yard, tmp_path: Path) -> None:
    """TP 8, and an accelerator type that nobody has: exit 1, with what is needed and what there is."""
    status, plan = planned(yard, tmp_path, wanting("tp8", tensor=8), wanting("b200", accelerator_type="B200"))
    assert status == 1
    assert {p["name"]: p["why"] for p in plan["problems"]} == {
        "tp8": "needs 8 GPUs of one node; the cluster has 4 GPUs",
        "b200": "needs accelerator type B200; the cluster has H100",
    }
    assert all(problem["never"] for problem in plan["problems"])


def test_a_replica_that_waits_for_room_says_what_is_missing(yard: Yard) -> None:
    """While the deploy is followed, and on /ready, where Serve's own message has nothing to say."""
    late, tp8 = wanting("late", tensor=2), wanting("tp8", tensor=8)
    with yard.deployed(wanting("tp2", tensor=2)), yard.deployed(late, tp8, wait=False):
        room = local_serve.Room(yard.cluster.api, after_s=0)

        def messages() -> dict[str, str] | None:
            said = {a.name: a.message for a in room.explain(list(yard.cluster.api.state().applications))}
            return said if all(said.get(name, "").startswith("no room") for name in ("late", "tp8")) else None

        said = eventually("both wait", messages)
        assert "needs 2 GPUs of one node; the cluster has 2 GPUs free, but at most 1 on one node" in said["late"]
        assert "(free: " in said["late"]
        assert "0 of 2 GPUs" in said["late"]
        never = "needs 8 GPUs of one node; the cluster has 4 GPUs"
        assert never in said["tp8"]

        def reason() -> str:
            return str(yard.cluster.ready()["models"].get("tp8", {}).get("reason"))

        eventually("a reason", lambda: f"no node has room for a replica: it {never}" in reason())


def test_what_restarts_a_model_is_what_the_plan_says(yard: Yard) -> None:
    """Serve's rules, read from its source, against what it does: each edit deployed, process ids compared."""
    app = fake_app("edited", replicas=1)

    def edited(edit: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        new = copy.deepcopy(app)
        edit(new)
        return new

    edits = {
        "args": edited(lambda a: a["args"].update(overcommit=3)),
        "user_config": edited(lambda a: a["deployments"][1]["user_config"].update(also_known_as=["too"])),
        "option": edited(lambda a: a["deployments"][0].update(graceful_shutdown_timeout_s=3)),
        "replicas": edited(lambda a: a["deployments"][0].update(num_replicas=2)),
    }
    with yard.deployed(app):
        for new in edits.values():
            yard.cluster.deploy(app)
            (pid,) = eventually("one replica", lambda: _pids(yard.cluster, 1))
            (change,) = changes({"applications": [new]}, {"edited": app}, None)
            yard.cluster.deploy(new)
            pids = _settled(
                yard.cluster, 2 if new is edits["replicas"] else 1, restarted=change.action is Action.RESTART, pid=pid
            )
            assert (pid in pids) is (change.action is Action.LIVE), change


def _pids(cluster: Cluster, count: int) -> set[int] | None:
    try:
        found = set(cluster.pids("edited").values())
    except KeyError:
        return None
    return found if len(found) == count else None


def _settled(cluster: Cluster, count: int, *, restarted: bool, pid: int) -> set[int]:
    """The replicas once an update is over. One that the plan calls live gets a while to prove it wrong."""
    if not restarted:
        time.sleep(3)
    found: set[int] = eventually(
        "the update is over", lambda: (p := _pids(cluster, count)) and (not restarted or pid not in p) and p
    )
    return found
