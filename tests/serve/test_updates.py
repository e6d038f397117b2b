"""A changed model on real Ray Serve: what clients notice of an update, of one that fails, and of none."""

import asyncio
import os
import signal
import time
from typing import Any

import httpx
import pytest

from serve_app.config import MODEL_DEPLOYMENT
from serve_app.model.rollout import NEW_FIRST
from tests.serve.cluster import Cluster, eventually, fake_app

pytestmark = pytest.mark.serve
CHAT = "/v1/chat/completions"
# What a start takes here at the least: old and new replicas are told apart by it.
START_S = 1.0
CHECK_S = 1.0


def chat(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "two words"}], **more}


def tokens(cluster: Cluster, model: str) -> int:
    """How many tokens the running version gives unasked."""
    answer = cluster.client.post(CHAT, json=chat(model))
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["completion_tokens"])


def with_option(app: dict[str, Any], **options: Any) -> dict[str, Any]:
    """``app`` with more of Serve's options on its ``Model``."""
    deployments = [d | options if d["name"] == MODEL_DEPLOYMENT else d for d in app["deployments"]]
    return app | {"deployments": deployments}


def often_checked(app: dict[str, Any]) -> dict[str, Any]:
    """``app`` with health checks, and so reports of its replicas to their card, every second."""
    return with_option(app, health_check_period_s=CHECK_S)


def running(cluster: Cluster, app: str) -> set[int] | None:
    """Process ids of the running replicas; None while Serve builds the application anew and lists nothing of it."""
    deployments = cluster.details()[app]["deployments"]
    if not deployments:
        return None
    return {r["pid"] for r in deployments[MODEL_DEPLOYMENT]["replicas"] if r["state"] == "RUNNING"}


def listed(cluster: Cluster, app: str) -> dict[str, Any]:
    """What /ready says of ``app``; empty where it says nothing, or where no gateway answers."""
    try:
        return dict(cluster.ready()["models"].get(app, {}))
    except (httpx.TransportError, ValueError):
        return {}


def surge(cluster: Cluster, app: str) -> int:
    config = cluster.details()[app]["deployments"][MODEL_DEPLOYMENT]["deployment_config"]
    return int(config["max_surge_percent"])


def test_an_update_fails_no_request(yard_cluster: Cluster) -> None:
    """A changed model under continuous requests and with a stream that ends within the grace: every request is
    answered, the stream is whole, and the new replica was up before the old one left."""
    old = with_option(fake_app("rolled", tokens=3, start_s=START_S), graceful_shutdown_timeout_s=20)
    new = with_option(fake_app("rolled", tokens=5, start_s=START_S), graceful_shutdown_timeout_s=20)
    yard_cluster.deploy(old)
    assert surge(yard_cluster, "rolled") == NEW_FIRST
    before = set(yard_cluster.pids("rolled").values())
    seen: list[set[int]] = []
    answers: list[tuple[int, Any]] = []

    async def asks(client: httpx.AsyncClient, done: asyncio.Event) -> None:
        while not done.is_set():
            answer = await client.post(CHAT, json=chat("rolled"))
            told = answer.json()["usage"]["completion_tokens"] if answer.status_code == 200 else answer.text
            answers.append((answer.status_code, told))
            await asyncio.sleep(0.01)

    async def watches(done: asyncio.Event) -> None:
        """Until only the new version runs, and a moment longer."""
        await asyncio.to_thread(yard_cluster.deploy, new, wait=False)
        deadline = time.monotonic() + 60
        while not seen or seen[-1] & before:
            assert time.monotonic() < deadline, seen
            pids = await asyncio.to_thread(running, yard_cluster, "rolled")
            if pids is not None:
                seen.append(pids)
            await asyncio.sleep(0.1)
        while answers[-1][1] != 5:
            assert time.monotonic() < deadline, answers[-1]
            await asyncio.sleep(0.1)
        done.set()

    async def update() -> str:
        done = asyncio.Event()
        async with httpx.AsyncClient(base_url=yard_cluster.url, timeout=60, trust_env=False) as client:
            long = chat("rolled", stream=True, max_tokens=60, fake={"interval_s": 0.2})
            stream = asyncio.create_task(client.post(CHAT, json=long))
            await asyncio.sleep(0.5)
            await asyncio.gather(*(asks(client, done) for _ in range(4)), watches(done))
            return (await stream).text

    text = asyncio.run(update())
    events = [part.removeprefix("data: ") for part in text.strip().split("\n\n")]
    assert len(events) == 62, events[-2:]  # the role, 60 tokens, the end
    assert events[-1] == "[DONE]"
    assert {code for code, _ in answers} == {200}, [a for a in answers if a[0] != 200][:3]
    assert {told for _, told in answers} == {3, 5}
    assert all(seen), "the old replica left before the new one was up"
    yard_cluster.wait_running("rolled")
    yard_cluster.remove("rolled")


def test_a_version_that_cannot_start_leaves_the_old_one_serving(yard_cluster: Cluster) -> None:
    """The old replica goes on answering, /ready says why the new version does not, and a good version heals it."""
    yard_cluster.deploy(often_checked(fake_app("stuck", tokens=3)))
    yard_cluster.wait_state("stuck", "ready")
    before = yard_cluster.pids("stuck")
    yard_cluster.deploy(often_checked(fake_app("stuck", tokens=4, fail_start="no weights in /models/v2")), wait=False)
    why = "the new version cannot start: no weights in /models/v2"
    states = []

    def says_why() -> bool:
        states.append(yard_cluster.ready()["models"].get("stuck", {"state": "unknown"}))
        assert tokens(yard_cluster, "stuck") == 3
        return states[-1].get("reason") == why

    eventually("the reason shows", says_why)
    eventually("Serve gives up", lambda: yard_cluster.api.state().application("stuck").status == "DEPLOY_FAILED")  # type: ignore[union-attr]
    # The old replica has reported its own start again since, at each health check.
    until = time.monotonic() + 3 * CHECK_S
    while time.monotonic() < until:
        assert says_why(), states[-1]
        time.sleep(0.2)
    assert {s["state"] for s in states} == {"ready"}
    assert {tuple(s["tasks"]) for s in states} == {("generate",)}
    assert yard_cluster.pids("stuck") == before
    yard_cluster.deploy(often_checked(fake_app("stuck", tokens=5)))
    eventually("it is healed", lambda: tokens(yard_cluster, "stuck") == 5)
    eventually("the reason is gone", lambda: yard_cluster.ready()["models"]["stuck"]["reason"] == "", 20)
    yard_cluster.remove("stuck")


def test_a_version_that_cannot_be_built_leaves_the_old_one_serving(yard_cluster: Cluster) -> None:
    """As above, where Serve cannot even make the application of the file: it then lists no deployment of it."""
    yard_cluster.deploy(fake_app("unbuilt", tokens=3))
    broken = fake_app("unbuilt", tokens=3)
    yard_cluster.deploy(broken | {"args": broken["args"] | {"no_such_key": 1}}, wait=False)

    def says_why() -> bool:
        assert tokens(yard_cluster, "unbuilt") == 3
        return "cannot start: 1 validation error" in yard_cluster.ready()["models"]["unbuilt"]["reason"]

    eventually("the reason shows", says_why)
    # A gateway that has never seen the model otherwise finds it answering too.
    (gateway,) = yard_cluster.gateway_pids().values()
    os.kill(gateway, signal.SIGKILL)
    eventually("another gateway", lambda: set(yard_cluster.gateway_pids().values()) - {gateway})
    eventually("it routes", lambda: listed(yard_cluster, "unbuilt"))
    assert says_why()
    assert listed(yard_cluster, "unbuilt")["state"] == "ready"
    yard_cluster.deploy(fake_app("unbuilt", tokens=5))
    eventually("it is healed", lambda: tokens(yard_cluster, "unbuilt") == 5)
    eventually("the reason is gone", lambda: yard_cluster.ready()["models"]["unbuilt"]["reason"] == "", 20)
    yard_cluster.remove("unbuilt")


def test_an_unchanged_file_restarts_nothing(yard_cluster: Cluster) -> None:
    """Deployed again as it is, or with another max_surge_percent alone: the same processes. The file's wish wins."""
    app = fake_app("same")
    yard_cluster.deploy(app)
    before = (yard_cluster.pids("same"), yard_cluster.pids("same", "Card"))
    assert surge(yard_cluster, "same") == NEW_FIRST
    yard_cluster.deploy(app)
    yard_cluster.deploy(with_option(app, max_surge_percent=0))
    eventually("the file wins", lambda: surge(yard_cluster, "same") == 0, 10)
    yard_cluster.wait_running("same")
    time.sleep(3)  # a restart would have begun by now
    assert (yard_cluster.pids("same"), yard_cluster.pids("same", "Card")) == before
    yard_cluster.remove("same")


def filling(name: str, **script: Any) -> dict[str, Any]:
    """A model of which there is room for one replica only."""
    app = fake_app(name, **script)
    app["args"]["resources"]["custom"] = {"node:__internal_head__": 0.6}
    return app


def test_no_room_for_one_more_stops_the_old_replica_first(yard_cluster: Cluster) -> None:
    """A model that fills the cluster is still updated, at the price of a gap."""
    yard_cluster.deploy(filling("large", tokens=3))
    yard_cluster.deploy(filling("large", tokens=5))
    assert surge(yard_cluster, "large") == 0
    eventually("the new version answers", lambda: tokens(yard_cluster, "large") == 5)
    yard_cluster.remove("large")


def test_a_frozen_replica_is_replaced(yard_cluster: Cluster) -> None:
    """SIGSTOP: nothing of it answers and nothing of it breaks. Serve notices well within a minute, and with our
    settings ends it without a grace, so that the next one has room."""
    yard_cluster.deploy(with_option(filling("frozen"), graceful_shutdown_timeout_s=120))
    (pid,) = yard_cluster.pids("frozen").values()
    os.kill(pid, signal.SIGSTOP)
    eventually("Serve notices", lambda: pid not in yard_cluster.pids("frozen").values(), 50)
    eventually("another one runs", lambda: yard_cluster.pids("frozen"))
    yard_cluster.remove("frozen")
