"""The request router on Serve's own base class, without a cluster: replicas are played. On real Serve:
``tests/serve/test_router.py``."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, ReplicaID

from serve_app import replica_watch
from serve_app.config import MODEL_DEPLOYMENT
from serve_app.replica_watch import ReplicaWatch


class PlayedDeployment(NamedTuple):
    name: str = MODEL_DEPLOYMENT
    app_name: str = "chat"


DEPLOYMENT = PlayedDeployment()


class PlayedReplica:
    """As much of ``RunningReplica`` as routing reads."""

    def __init__(self, name: str, leases: int = 0) -> None:
        self.replica_id = ReplicaID(name, DEPLOYMENT)
        self.node_id = self.availability_zone = "here"
        self.max_ongoing_requests = 10
        self.leases = leases

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.leases


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> ReplicaWatch:
    monkeypatch.setattr(replica_watch, "WATCH", ReplicaWatch())
    return replica_watch.WATCH


@pytest.fixture
async def router(watch: ReplicaWatch) -> AsyncIterator[Any]:
    # As Serve does it: pickled by value with the deployment, unpickled where a handle is used.
    kind = RequestRouterConfig(request_router_class="serve_app.router:ModelRouter").get_request_router_class()
    made = kind(deployment_id=DEPLOYMENT, handle_source=SimpleNamespace(value="REPLICA"), self_node_id="here")
    yield made
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


def pending(number: int = 0, preferred: str = "") -> PendingRequest:
    names = {"request_id": str(number), "internal_request_id": str(number), "multiplexed_model_id": ""}
    return PendingRequest(args=[preferred], kwargs={}, metadata=SimpleNamespace(**names))


async def chosen(router: Any, times: int) -> Counter[str]:
    async with asyncio.timeout(20):
        picks = [await router._choose_replica_for_request(pending(i)) for i in range(times)]
    return Counter(pick.replica_id.unique_id for pick in picks)


async def test_it_tells_who_runs(router: Any, watch: ReplicaWatch) -> None:
    """What Serve's controller says, and what a call found dead in between."""
    heard: list[frozenset[str]] = []
    watch.subscribe("chat", heard.append)
    a, b = PlayedReplica("a"), PlayedReplica("b")
    router.update_replicas([a, b])
    router.on_replica_actor_died(a.replica_id)
    router.update_replicas([])
    assert heard == [{"a", "b"}, {"b"}, set()]


async def test_it_prefers_the_replica_with_fewer_leases(router: Any) -> None:
    """Of two, the emptier; never one that is full."""
    router.update_replicas([PlayedReplica("busy", 5), PlayedReplica("idle", 1)])
    assert await chosen(router, 30) == {"idle": 30}
    router.update_replicas([PlayedReplica("full", 10), PlayedReplica("busy", 9)])
    assert await chosen(router, 30) == {"busy": 30}


async def test_every_replica_gets_its_share(router: Any) -> None:
    """Equal replicas are equally likely."""
    router.update_replicas([PlayedReplica(name) for name in "abc"])
    shares = await chosen(router, 600)
    assert all(120 < shares[name] < 280 for name in "abc"), shares


async def test_a_shunned_replica_is_not_chosen(router: Any, watch: ReplicaWatch) -> None:
    """Not even where the other one holds more leases."""
    router.update_replicas([PlayedReplica("frozen", 0), PlayedReplica("busy", 9)])
    watch.shun("chat", "frozen", until=time.monotonic() + 60)
    assert await chosen(router, 30) == {"busy": 30}
    watch.shun("chat", "frozen", until=0.0)
    assert await chosen(router, 30) == {"frozen": 30}


async def test_all_shunned_waits_until_the_marks_end(router: Any, watch: ReplicaWatch) -> None:
    """Nobody is sent to a frozen replica, and nobody waits for ever. Waiting does not spin."""
    router.update_replicas([PlayedReplica("a"), PlayedReplica("b")])
    until = time.monotonic() + 0.5
    for name in "ab":
        watch.shun("chat", name, until)
    asked = 0
    choose = router.choose_replicas

    async def counted(**arguments: Any) -> Any:
        nonlocal asked
        asked += 1
        return await choose(**arguments)

    router.choose_replicas = counted
    await chosen(router, 1)
    assert time.monotonic() >= until
    assert asked < 20


async def test_who_asks_for_a_replica_gets_it_while_it_has_room(router: Any, watch: ReplicaWatch) -> None:
    """Also where others carry less, and each the one it asked for though many ask at once; else whoever has room."""
    replicas = [PlayedReplica("a", 5), PlayedReplica("b", 0), PlayedReplica("c", 3)]
    router.update_replicas(replicas)
    wanted = [name for _ in range(20) for name in ("a", "b", "c")]
    async with asyncio.timeout(20):
        calls = (router._choose_replica_for_request(pending(i, name)) for i, name in enumerate(wanted))
        got = await asyncio.gather(*calls)
    assert [replica.replica_id.unique_id for replica in got] == wanted
    watch.shun("chat", "b", until=time.monotonic() + 60)
    replicas[0].leases = 10
    for gone in ("a", "b", "no such replica"):
        picked = await router._choose_replica_for_request(pending(99, gone))
        assert picked.replica_id.unique_id == "c"
