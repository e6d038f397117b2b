"""Our request router on real Serve: a caller of a model learns at once which replicas may get new requests."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from serve_app.config import MODEL_DEPLOYMENT
from tests.serve.cluster import PREFIX, Cluster, eventually, fake_app

pytestmark = pytest.mark.serve
CHAT = "/v1/chat/completions"


def history(cluster: Cluster, app: str) -> list[tuple[float, list[str]]]:
    """(Unix time, running replicas) as another process than the gateway was told, oldest first."""
    answer = cluster.client.get(f"{PREFIX}/{app}/running")
    assert answer.status_code == 200, answer.text
    return [(at, ids) for at, ids in answer.json()]


def two_slots(name: str, replicas: int, **script: Any) -> dict[str, Any]:
    """Each replica takes one request, and may finish it for a minute after it was told to stop."""
    app = fake_app(name, replicas=replicas, engine={"max_num_seqs": 1}, overcommit=0, **script)
    model = next(d for d in app["deployments"] if d["name"] == MODEL_DEPLOYMENT)
    model["graceful_shutdown_timeout_s"] = 60
    return app


@asynccontextmanager
async def streams(cluster: Cluster, model: str, count: int) -> AsyncIterator[list[AsyncIterator[bytes]]]:
    """``count`` open streams, each of which has begun."""
    body = {"model": model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 100_000, "stream": True}
    async with httpx.AsyncClient(base_url=cluster.url, timeout=30, trust_env=False) as client:
        answers = []
        for _ in range(count):
            answers.append(await client.send(client.build_request("POST", CHAT, json=body), stream=True))
        opened = [answer.aiter_raw() for answer in answers]
        for stream in opened:
            await anext(stream)
        try:
            yield opened
        finally:
            for answer in answers:
                await answer.aclose()


@pytest.mark.parametrize("change", ["fewer replicas", "other args"])
async def test_a_stopping_replica_is_out_at_once(yard_cluster: Cluster, change: str) -> None:
    """Scaled down or replaced by an update: callers hear of it while the replica still answers what it has."""
    name = change.replace(" ", "-")
    yard_cluster.deploy(two_slots(name, 2, token_interval_s=0.05))
    eventually("both run", lambda: len(history(yard_cluster, name)[-1][1]) == 2)
    before = history(yard_cluster, name)[-1][1]
    assert before == sorted(yard_cluster.pids(name))
    async with streams(yard_cluster, name, 2) as opened:
        script = {"token_interval_s": 0.04} if change == "other args" else {"token_interval_s": 0.05}
        replicas = 2 if change == "other args" else 1
        deployed = time.time()
        await asyncio.to_thread(yard_cluster.deploy, two_slots(name, replicas, **script), wait=False)

        def fewer() -> Any:
            return next((at for at, ids in history(yard_cluster, name) if set(before) - set(ids)), None)

        at = await asyncio.to_thread(eventually, "a replica is out", fewer)
        print(f"{change}: out {1000 * (at - deployed):.0f} ms after the deployment was sent")
        # Both streams go on, one of them from the replica that is out.
        for stream in opened:
            await anext(stream)
            await anext(stream)
    yard_cluster.wait_running(name)
    yard_cluster.remove(name)
    eventually("none runs", lambda: history(yard_cluster, name)[-1][1] == [])


def test_a_dead_replica_is_out_and_its_successor_is_in(yard_cluster: Cluster) -> None:
    """kill -9: the set follows, without a call that had to find out."""
    yard_cluster.deploy(fake_app("mortal", replicas=2))
    eventually("both run", lambda: len(history(yard_cluster, "mortal")[-1][1]) == 2)
    victim, pid = next(iter(yard_cluster.pids("mortal").items()))
    killed = time.time()
    os.kill(pid, signal.SIGKILL)
    at = eventually(
        "it is out",
        lambda: next((at for at, ids in history(yard_cluster, "mortal") if at > killed and victim not in ids), None),
    )
    print(f"out {1000 * (at - killed):.0f} ms after kill -9")
    eventually("two run again", lambda: len(history(yard_cluster, "mortal")[-1][1]) == 2)
    assert victim not in history(yard_cluster, "mortal")[-1][1]
    yard_cluster.remove("mortal")
