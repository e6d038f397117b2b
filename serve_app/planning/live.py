"""What a running cluster has, what is free in it and what waits for room, from its dashboard's REST API. An adapter."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from serve_app.planning.nodes import NODE_GROUP, Need, Node
from serve_app.planning.packing import Want
from serve_app.ray_api import RayApi

# Serve names the actor and the placement group of a replica so.
_REPLICA = "SERVE_REPLICA::"
# Each node has these of its own.
_OWN = ("node:", "object_store_memory", "memory")
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A cluster at one moment. ``address``: its dashboard's.

    ``nodes``: totals, less what others than Serve hold. ``free``: what nobody uses. ``deployed``: the config entry of
    each running application. ``running``: by application and deployment, for each replica the numbers of the nodes
    where its needs lie. ``waiting``: replicas for which there is no room yet, by application. ``http``: Serve's host
    and port, None before it runs. ``grows``: nodes may be added by themselves, so what fits nowhere now may fit later.
    """

    address: str
    nodes: tuple[Node, ...]
    free: tuple[Node, ...]
    deployed: Mapping[str, Mapping[str, Any]]
    running: Mapping[tuple[str, str], Sequence[tuple[int, ...]]]
    waiting: Mapping[str, Want]
    http: tuple[str, int] | None
    grows: bool


def snapshot(api: RayApi) -> Snapshot:
    """RayApiError: the cluster does not answer, or refuses our token."""
    nodes = parse_nodes(api.listed("nodes"), api.get("/nodes", view="summary").get("summary") or ())
    actors = api.listed("actors")
    groups = api.listed("placement_groups")
    others = _used(actors, groups, lambda name: not name.startswith(_REPLICA))
    everybody = _used(actors, groups, lambda name: True)
    serve = api.serve()
    http = serve.get("http_options") or {}
    return Snapshot(
        address=api.address,
        nodes=tuple(_less(node, others.get(key, {}), whole_gpus=True) for key, node in nodes.items()),
        free=tuple(_less(node, everybody.get(key, {})) for key, node in nodes.items()),
        deployed={
            name: details["deployed_app_config"]
            for name, details in (serve.get("applications") or {}).items()
            if details.get("deployed_app_config") and details.get("status") != "DELETING"
        },
        running=parse_running(actors, groups, {key: i for i, key in enumerate(nodes)}),
        waiting=parse_waiting(actors, groups),
        http=(http["host"], http["port"]) if http.get("port") else None,
        grows=any(NODE_GROUP in node.labels for node in nodes.values()),
    )


def parse_nodes(listed: Iterable[Mapping[str, Any]], summary: Iterable[Mapping[str, Any]]) -> dict[str, Node]:
    """The living nodes by id. ``listed``: Ray's state API; ``summary``: the dashboard's own view, with its hardware."""
    hardware = {(each.get("raylet") or {}).get("nodeId"): each for each in summary}
    alive = sorted(
        (n for n in listed if n["state"] == "ALIVE"), key=lambda n: (not n.get("is_head_node"), n["node_id"])
    )
    count = Counter(n["node_ip"] for n in alive)
    nodes = {}
    for each in alive:
        key = str(each["node_id"])
        seen = hardware.get(key) or {}
        sizes = [gpu["memoryTotal"] * _MIB for gpu in seen.get("gpus") or () if gpu.get("memoryTotal")]
        memory = seen.get("mem") or (None,)
        nodes[key] = Node(
            name=each["node_ip"] if count[each["node_ip"]] == 1 else f"{each['node_ip']} ({key[:6]})",
            resources={k: v for k, v in (each.get("resources_total") or {}).items() if not k.startswith(_OWN)},
            labels=each.get("labels") or {},
            # Of different GPUs in one node the smallest counts: Ray does not choose between them.
            gpu_bytes=min(sizes) if sizes else None,
            ram_bytes=memory[0],
        )
    return nodes


def parse_running(
    actors: Iterable[Mapping[str, Any]], groups: Iterable[Mapping[str, Any]], numbers: Mapping[str, int]
) -> dict[tuple[str, str], list[tuple[int, ...]]]:
    """By application and deployment, where the replicas lie that Ray has placed. ``numbers``: of the nodes, by id."""
    bundles = {group["placement_group_id"]: [b.get("node_id") for b in group["bundles"] or ()] for group in groups}
    running: dict[tuple[str, str], list[tuple[int, ...]]] = {}
    for actor in sorted(actors, key=lambda actor: str(actor.get("name"))):
        name = str(actor.get("name") or "")
        if actor["state"] != "ALIVE" or not name.startswith(_REPLICA):
            continue
        application, deployment = name.removeprefix(_REPLICA).split("#")[:2]
        where = bundles.get(actor.get("placement_group_id")) or [actor.get("node_id")]
        if all(node in numbers for node in where):
            running.setdefault((application, deployment), []).append(tuple(numbers[node] for node in where))
    return running


def parse_waiting(actors: Iterable[Mapping[str, Any]], groups: Iterable[Mapping[str, Any]]) -> dict[str, Want]:
    """The replicas that Ray has not placed, one of each application with how many there are like it."""
    waiting: dict[str, Want] = {}

    def add(name: str, needs: tuple[Need, ...]) -> None:
        application = name.removeprefix(_REPLICA).partition("#")[0]
        known = waiting.get(application) or Want(application, needs, 0)
        waiting[application] = replace(known, count=known.count + 1)

    for group in groups:
        if group["state"] in ("PENDING", "RESCHEDULING") and str(group["name"]).startswith(_REPLICA):
            bundles = (b for b in group["bundles"] or () if not b.get("node_id"))
            add(group["name"], tuple(Need(b["unit_resources"], b.get("label_selector") or {}) for b in bundles))
    for actor in actors:
        placed = actor.get("node_id") or actor.get("placement_group_id")
        if actor["state"] == "PENDING_CREATION" and not placed and str(actor["name"]).startswith(_REPLICA):
            add(actor["name"], (Need(actor["required_resources"] or {}, _selector(actor)),))
    return waiting


def _selector(actor: Mapping[str, Any]) -> Mapping[str, str]:
    selector = actor.get("label_selector")
    return selector if isinstance(selector, Mapping) else {}


def _used(
    actors: Iterable[Mapping[str, Any]], groups: Iterable[Mapping[str, Any]], whose: Any
) -> dict[str, Counter[str]]:
    """Resources by node id, of the actors and placement groups whose name ``whose`` accepts."""
    used: dict[str, Counter[str]] = {}
    for actor in actors:
        inside = actor.get("placement_group_id")
        if actor["state"] == "ALIVE" and not inside and whose(str(actor.get("name") or "")):
            used.setdefault(actor["node_id"], Counter()).update(actor.get("required_resources") or {})
    for group in groups:
        for bundle in (group["bundles"] or ()) if group["state"] != "REMOVED" else ():
            if bundle.get("node_id") and whose(str(group.get("name") or "")):
                used.setdefault(bundle["node_id"], Counter()).update(bundle["unit_resources"])
    return used


def _less(node: Node, used: Mapping[str, float], *, whole_gpus: bool = False) -> Node:
    """``node`` without what is used. ``whole_gpus``: which part of a GPU is taken is not known, so all of it is."""
    left = {name: amount - used.get(name, 0.0) for name, amount in node.resources.items()}
    if whole_gpus and "GPU" in left:
        left["GPU"] = float(int(left["GPU"] + 1e-6))
    return replace(node, resources=left)
