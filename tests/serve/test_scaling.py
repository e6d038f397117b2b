"""Scaling on real Serve: the engine's queue goes up, replicas follow; nobody asks, the model sleeps."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.serve.cluster import Cluster, both_proxies, eventually, fake_app
from tests.sse import events

pytestmark = pytest.mark.serve

CHAT = "/v1/chat/completions"


def chat(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "a b"}], **more}


def wanted(cluster: Cluster, app: str) -> int:
    """Replicas that Serve was told to run."""
    return int(cluster.details()[app]["deployments"]["Model"]["target_num_replicas"])


async def eventually_wanted(cluster: Cluster, app: str, replicas: int, within_s: float = 60) -> None:
    await asyncio.to_thread(
        eventually, f"{app} has {replicas} replicas", lambda: wanted(cluster, app) == replicas, within_s
    )


@asynccontextmanager
async def load(cluster: Cluster, app: str, clients: int, **more: Any) -> AsyncIterator[list[int]]:
    """So many clients that ask again and again; the statuses that they got."""
    statuses: list[int] = []
    body = chat(app, max_tokens=20, **more)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60, trust_env=False, limits=limits) as client:

        async def ask() -> None:
            while True:
                statuses.append((await client.post(CHAT, json=body)).status_code)

        asking = [asyncio.create_task(ask()) for _ in range(clients)]
        try:
            yield statuses
        finally:
            for task in asking:
                task.cancel()
            ended = await asyncio.gather(*asking, return_exceptions=True)
            assert [e for e in ended if not isinstance(e, asyncio.CancelledError)] == []


async def test_replicas_follow_the_queue_up_and_down(yard_cluster: Cluster) -> None:
    """1 → 4 → 1: sixteen clients on engines that run four requests at once. Prints how long the first decision took.
    Every request is answered, also those on replicas that leave."""
    scaling = {"target_queue": 1, "down_after_s": 3}
    app = fake_app("bursty", bounds=(1, 4), scaling=scaling, engine={"max_num_seqs": 4}, token_interval_s=0.05)
    yard_cluster.deploy(app)
    async with load(yard_cluster, "bursty", 16) as statuses:
        began = time.monotonic()
        await asyncio.to_thread(eventually, "a decision", lambda: wanted(yard_cluster, "bursty") > 1)
        decided = time.monotonic() - began
        print(f"\nfrom the burst to the decision: {decided:.1f} s")
        await eventually_wanted(yard_cluster, "bursty", 4)
        # All four are needed, so none goes.
        await asyncio.to_thread(eventually, "four run", lambda: len(yard_cluster.pids("bursty")) == 4)
        await asyncio.sleep(2 * scaling["down_after_s"])
        assert wanted(yard_cluster, "bursty") == 4
    await eventually_wanted(yard_cluster, "bursty", 1)
    assert set(statuses) == {200}
    yard_cluster.remove("bursty")


async def test_to_zero_and_back_again_and_again(yard_cluster: Cluster) -> None:
    """The first request wakes the model, is held and answered; it sleeps after ``idle_s``, three times over; in between
    nothing wakes it. The estimate after three wakes is near the fourth."""
    yard_cluster.deploy(fake_app("sleeper", bounds=(0, 2), scaling={"idle_s": 2}, start_s=4))
    assert yard_cluster.wait_state("sleeper", "asleep")["usual_wake_s"] is None
    took: list[float] = []
    estimate = 0.0
    for _ in range(4):
        began = time.monotonic()
        answer = await asyncio.to_thread(yard_cluster.client.post, CHAT, json=chat("sleeper", max_tokens=1))
        took.append(time.monotonic() - began)
        assert answer.status_code == 200
        entry = await asyncio.to_thread(yard_cluster.wait_state, "sleeper", "asleep")
        if len(took) == 3:
            estimate = entry["ready_in_s"]
    print(f"\nestimate {estimate:.1f} s, fourth wake {took[3]:.1f} s; all: {[f'{t:.1f}' for t in took]}")
    assert min(took) >= 4, "it was asleep"
    assert estimate == pytest.approx(took[3], rel=0.25)
    for _ in range(30):  # three idle windows
        await asyncio.sleep(0.2)
        assert wanted(yard_cluster, "sleeper") == 0, "it woke by itself"
    yard_cluster.remove("sleeper")


@both_proxies
async def test_while_it_wakes(yard_cluster: Cluster) -> None:
    """Progress is on ``/ready``; a stream that asked gets signs of life and then its answer, whole; beyond the bound
    the answer is 503 and says when to come back."""
    limits = {"hold_requests": 2}
    app = fake_app("waking", bounds=(0, 1), scaling={"idle_s": 60}, limits=limits, start_s=5)
    yard_cluster.deploy(app)
    yard_cluster.wait_state("waking", "asleep")
    async with httpx.AsyncClient(base_url=yard_cluster.url, timeout=60, trust_env=False) as client:
        signs = {"x-modelyard-keep-alive": "1"}
        asked = [
            asyncio.create_task(client.post(CHAT, json=chat("waking", stream=True, max_tokens=3), headers=signs))
            for _ in range(2)
        ]

        def progress() -> Any:
            found = yard_cluster.ready()["models"]["waking"]
            return found if found["state"] == "starting" and found["reason"].startswith("waking for 2 req") else None

        await asyncio.to_thread(eventually, "the progress shows", progress, 10)
        refused = await client.post(CHAT, json=chat("waking"))
        assert (refused.status_code, int(refused.headers["retry-after"]) > 0) == (503, True)
        for answer in await asyncio.gather(*asked):
            assert answer.status_code == 200
            assert answer.text.startswith(": waking is starting")
            told = events("\n\n".join(part for part in answer.text.split("\n\n") if not part.startswith(":")))
            assert "".join(e["choices"][0]["delta"].get("content", "") for e in told) == "t0 t1 t2 "
    yard_cluster.remove("waking")


async def test_bounds_and_targets_change_live(yard_cluster: Cluster) -> None:
    """A bound, a target: no process is replaced. What is decided follows."""
    yard_cluster.deploy(fake_app("live", bounds=(1, 1), scaling={"down_after_s": 600}))
    [(replica, pid)] = yard_cluster.pids("live").items()
    yard_cluster.deploy(fake_app("live", bounds=(2, 3), scaling={"down_after_s": 600}))
    await eventually_wanted(yard_cluster, "live", 2)
    await asyncio.to_thread(eventually, "two run", lambda: len(yard_cluster.pids("live")) == 2)
    yard_cluster.deploy(fake_app("live", bounds=(1, 3), scaling={"down_after_s": 600}))
    await asyncio.sleep(3)
    assert wanted(yard_cluster, "live") == 2, "an update is no reason to shrink at once"
    yard_cluster.deploy(fake_app("live", bounds=(1, 3), scaling={"down_after_s": 1}))
    await eventually_wanted(yard_cluster, "live", 1)
    assert yard_cluster.pids("live").get(replica, pid) == pid
    yard_cluster.remove("live")


async def test_a_sleeping_model_that_cannot_start_keeps_nobody_waiting(yard_cluster: Cluster) -> None:
    """Its held requests get 503 as soon as Serve has given up, long before ``hold_s``; the status says why."""
    yard_cluster.deploy(fake_app("bad-sleeper", bounds=(0, 1), fail_start="no weights here"))
    yard_cluster.wait_state("bad-sleeper", "asleep")
    answer = await asyncio.to_thread(yard_cluster.client.post, CHAT, json=chat("bad-sleeper"))
    assert (answer.status_code, "failed to start" in answer.text) == (503, True)
    assert yard_cluster.wait_state("bad-sleeper", "failed")["reason"] == "no weights here"
    assert yard_cluster.client.post(CHAT, json=chat("bad-sleeper")).status_code == 503
    yard_cluster.remove("bad-sleeper")
