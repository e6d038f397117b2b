"""The product on real Ray Serve with the scripted engine, behind HAProxy and behind Serve's own proxy."""

import asyncio
import contextlib
import os
import signal
import time
from typing import Any

import httpx
import pytest

from serve_app import local_cluster
from serve_app.config import CARD_DEPLOYMENT
from serve_app.gateway.leases import OPEN_TIMEOUT_S
from tests.serve.cluster import GATEWAY, Cluster, both_proxies, eventually, fake_app
from tests.sse import events

pytestmark = pytest.mark.serve
CHAT = "/v1/chat/completions"
# Of one replica, for every test that needs no model of its own.
ALPHA = fake_app("alpha", also_known_as=("org/alpha",))


def chat(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "two words"}], **more}


@both_proxies
def test_answers_and_streams(yard_cluster: Cluster) -> None:
    """Through the whole path: an answer, the same as a stream, under the model's name and a further id."""
    yard_cluster.deploy(ALPHA)
    eventually("its card is known", lambda: yard_cluster.client.get("/v1/models/org/alpha").is_success, 20)
    whole = yard_cluster.client.post(CHAT, json=chat("org/alpha", max_tokens=3)).json()
    assert (whole["model"], whole["choices"][0]["message"]["content"]) == ("org/alpha", "t0 t1 t2 ")
    text = yard_cluster.client.post(CHAT, json=chat("alpha", max_tokens=3, stream=True)).text
    assert "".join(e["choices"][0]["delta"]["content"] for e in events(text)) == "t0 t1 t2 "


@both_proxies
def test_tokens_arrive_as_they_are_made(yard_cluster: Cluster) -> None:
    """Nothing on the way keeps a stream back: the first event is there long before the last."""
    yard_cluster.deploy(ALPHA)
    body = chat("alpha", max_tokens=5, stream=True, fake={"interval_s": 0.3})
    with yard_cluster.client.stream("POST", CHAT, json=body) as answer:
        at = [time.monotonic() for _ in answer.iter_raw()]
    assert at[-1] - at[0] > 0.9


@both_proxies
def test_the_proxy_is_the_one_that_the_environment_asks_for(yard_cluster: Cluster) -> None:
    """HAProxy mode runs HAProxy; without it the gateway names what is missing and the command that sets it."""
    names = {process.name() for process in local_cluster.processes(yard_cluster.session)}
    assert ("haproxy" in names) == yard_cluster.haproxy
    told = "Not set when Ray started" in yard_cluster.log(GATEWAY, "Gateway")
    assert told != yard_cluster.haproxy


@both_proxies
def test_a_huge_head_is_refused(yard_cluster: Cluster) -> None:
    """By the proxy or by the gateway behind it: a 4xx or a closed connection, and the next request is answered."""
    yard_cluster.deploy(ALPHA)
    eventually("its card is known", lambda: yard_cluster.client.get("/v1/models/alpha").is_success, 20)
    huge: list[dict[str, str]] = [{"traceparent": "a" * 2**20}, {f"x-{i}": "1" for i in range(10_000)}]
    for headers in huge:
        with contextlib.suppress(httpx.NetworkError, httpx.RemoteProtocolError):
            refused = yard_cluster.client.post(CHAT, json=chat("alpha", max_tokens=1), headers=headers)
            assert refused.status_code in (400, 431)
        assert yard_cluster.client.post(CHAT, json=chat("alpha", max_tokens=1)).status_code == 200


def test_a_new_model_answers_without_a_restart(yard_cluster: Cluster) -> None:
    """`serve deploy` with one more model: the gateway answers for it within 5 s of its start, and neither the gateway
    nor another model is restarted."""
    yard_cluster.deploy(ALPHA)
    before = (yard_cluster.gateway_pids(), yard_cluster.pids("alpha"))
    yard_cluster.deploy(fake_app("beta"), wait=False)
    eventually("beta runs", lambda: (a := yard_cluster.api.state().application("beta")) and a.status == "RUNNING")
    eventually("beta answers", lambda: yard_cluster.client.post(CHAT, json=chat("beta")).status_code == 200, 5)
    assert (yard_cluster.gateway_pids(), yard_cluster.pids("alpha")) == before


def test_further_ids_change_live(yard_cluster: Cluster) -> None:
    """Editing also_known_as applies within 5 s and restarts nothing."""
    yard_cluster.deploy(fake_app("renamed", also_known_as=("old/name",)))
    before = (yard_cluster.gateway_pids(), yard_cluster.pids("renamed"), yard_cluster.pids("renamed", "Card"))
    yard_cluster.deploy(fake_app("renamed", also_known_as=("new/name",)))
    post = yard_cluster.client.post
    eventually("the new id answers", lambda: post(CHAT, json=chat("new/name")).status_code == 200, 5)
    assert post(CHAT, json=chat("old/name")).status_code == 404
    assert (yard_cluster.gateway_pids(), yard_cluster.pids("renamed"), yard_cluster.pids("renamed", "Card")) == before


def test_gateway_settings_change_live(yard_cluster: Cluster) -> None:
    """Editing the gateway's user_config restarts nothing and applies."""
    before = yard_cluster.gateway_pids()
    gateway = {"name": GATEWAY, "import_path": "serve_app.gateway:app", "route_prefix": "/"}
    small = gateway | {"deployments": [{"name": "Gateway", "user_config": {"max_body_mb": 0.001}}]}
    big = {"model": "none", "x": "y" * 5000}
    yard_cluster.deploy(small)
    eventually("413", lambda: yard_cluster.client.post(CHAT, json=big).status_code == 413, 10)
    yard_cluster.deploy(gateway | {"deployments": [{"name": "Gateway", "user_config": {}}]})
    eventually("404", lambda: yard_cluster.client.post(CHAT, json=big).status_code == 404, 10)
    assert yard_cluster.gateway_pids() == before


def test_one_id_two_models(yard_cluster: Cluster) -> None:
    """The first holder of an id keeps it, and /ready says who was refused."""
    yard_cluster.deploy(fake_app("first", also_known_as=("contested",)))
    yard_cluster.deploy(fake_app("another", also_known_as=("contested",)))
    conflicts = eventually("the conflict shows", lambda: yard_cluster.ready().get("conflicts"), 10)
    assert conflicts == ["another claims the id 'contested', which first keeps"]
    assert yard_cluster.client.get("/v1/models/contested").json()["root"] == "first"
    yard_cluster.remove("first", "another")
    eventually("removed", lambda: yard_cluster.client.post(CHAT, json=chat("first")).status_code == 404, 20)


def test_a_model_that_cannot_start_says_why(yard_cluster: Cluster) -> None:
    """The cause is in /ready and requests get 503 with Retry-After at once; other models do not notice."""
    yard_cluster.deploy(ALPHA)
    yard_cluster.deploy(fake_app("broken", fail_start="no weights in /models/broken"), wait=False)
    state = yard_cluster.wait_state("broken", "failed")
    assert state["reason"] == "no weights in /models/broken"
    refused = yard_cluster.client.post(CHAT, json=chat("broken"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_unavailable")
    assert refused.headers["retry-after"]
    assert yard_cluster.client.get("/ready", params={"model": "broken"}).status_code == 503
    assert yard_cluster.client.post(CHAT, json=chat("alpha")).status_code == 200
    yard_cluster.remove("broken")


def test_a_removed_model_is_unknown(yard_cluster: Cluster) -> None:
    """Removing an application: 404 soon after, its own drain is short, and requests that wait for it are bounded."""
    yard_cluster.deploy(fake_app("brief", engine={"max_num_seqs": 1}, overcommit=0, limits={"wait_s": 20}))

    async def waits() -> list[int]:
        long = chat("brief", fake={"first_token_s": 60})
        async with httpx.AsyncClient(base_url=yard_cluster.url, timeout=60, trust_env=False) as client:
            both = [asyncio.create_task(client.post(CHAT, json=long)) for _ in range(2)]
            await asyncio.sleep(1)
            await asyncio.to_thread(yard_cluster.remove, "brief")
            return [answer.status_code for answer in await asyncio.gather(*both)]

    started = time.monotonic()
    assert set(asyncio.run(waits())) <= {404, 502, 503}
    eventually("404", lambda: yard_cluster.client.post(CHAT, json=chat("brief")).status_code == 404, 20)
    assert time.monotonic() - started < 28, "an inner deployment must not sit out direct ingress' 30 s drain"


@both_proxies
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("fake", [{"first_token_s": 30}, {"interval_s": 0.05}])
def test_a_client_that_leaves_aborts_its_request(yard_cluster: Cluster, stream: bool, fake: dict[str, Any]) -> None:
    """Streaming or not, before the first token or after: the engine's request is aborted and the lease given back."""
    yard_cluster.deploy(ALPHA)
    aborted = yard_cluster.wait_quiet("alpha")[0]["engine"]["aborted"]
    asyncio.run(yard_cluster.leave_after(1, chat("alpha", stream=stream, max_tokens=1000, fake=fake)))
    eventually("aborted", lambda: yard_cluster.reports("alpha")[0]["engine"]["aborted"] == aborted + 1, 2)
    yard_cluster.wait_quiet("alpha")


@both_proxies
def test_a_client_that_leaves_generate_aborts_its_request(yard_cluster: Cluster) -> None:
    """The plain endpoint, which FastAPI serves, aborts too."""
    yard_cluster.deploy(fake_app("thinking", first_token_s=30))
    asyncio.run(yard_cluster.leave_after(1, {"model_name": "thinking", "prompt": "x"}, "/generate"))
    assert yard_cluster.wait_quiet("thinking", 5)[0]["engine"]["aborted"] == 1
    yard_cluster.remove("thinking")


@both_proxies
def test_a_storm_of_cancels_leaks_nothing(yard_cluster: Cluster) -> None:
    """200 clients that leave at different moments: no lease stays, and the model answers at once."""
    yard_cluster.deploy(fake_app("stormy", replicas=2, engine={"max_num_seqs": 8}, token_interval_s=0.01))

    async def storm() -> None:
        body = chat("stormy", stream=True, max_tokens=100_000)
        for _ in range(4):
            await asyncio.gather(*(yard_cluster.leave_after(0.05 + 0.01 * i, body) for i in range(50)))

    asyncio.run(storm())
    yard_cluster.wait_quiet("stormy")
    assert yard_cluster.client.post(CHAT, json=chat("stormy", max_tokens=1)).status_code == 200


def test_a_killed_replica_costs_no_later_request(yard_cluster: Cluster) -> None:
    """kill -9 of one of two replicas: every request sent afterwards succeeds, and the replica comes back."""
    yard_cluster.deploy(fake_app("pair", replicas=2))
    for _ in range(10):
        assert yard_cluster.client.post(CHAT, json=chat("pair", max_tokens=1)).status_code == 200
    before = yard_cluster.pids("pair")
    os.kill(next(iter(before.values())), signal.SIGKILL)
    codes = [yard_cluster.client.post(CHAT, json=chat("pair", max_tokens=1)).status_code for _ in range(50)]
    assert set(codes) == {200}
    eventually("two replicas again", lambda: len(set(yard_cluster.pids("pair").values()) - {*before.values()}) == 1)


def test_a_full_model_is_queued_in_the_gateway(yard_cluster: Cluster) -> None:
    """One slot: the second request waits and is served; beyond the bound 429 at once; beyond the wait 503."""
    one = fake_app("narrow", engine={"max_num_seqs": 1}, overcommit=0, limits={"max_waiting": 1, "wait_s": 3})
    yard_cluster.deploy(one)

    async def ask() -> list[tuple[int, bool]]:
        async with httpx.AsyncClient(base_url=yard_cluster.url, timeout=60, trust_env=False) as client:
            tasks = []
            for _ in range(3):
                tasks.append(asyncio.create_task(client.post(CHAT, json=chat("narrow", fake={"first_token_s": 2}))))
                await asyncio.sleep(0.3)
            return [(a.status_code, "retry-after" in a.headers) for a in await asyncio.gather(*tasks)]

    assert asyncio.run(ask()) == [(200, False), (200, False), (429, True)]
    yard_cluster.wait_quiet("narrow")


def test_who_waits_for_a_wake_is_served_together(yard_cluster: Cluster) -> None:
    """Eight streams that woke a model with room for all: no call for a lease is lost. A lost one would be made anew
    only after ``OPEN_TIMEOUT_S``."""
    yard_cluster.deploy(fake_app("dawn", bounds=(0, 1), engine={"max_num_seqs": 8}))

    async def ask(client: httpx.AsyncClient, begun: asyncio.Barrier) -> float:
        async with client.stream("POST", CHAT, json=chat("dawn", stream=True, fake={"hang": 1})) as answer:
            assert answer.status_code == 200
            await anext(answer.aiter_lines())
            at = time.monotonic()
            await begun.wait()  # nobody's lease is handed on before all have one
            return at

    async def wake() -> list[float]:
        begun = asyncio.Barrier(8)
        async with httpx.AsyncClient(base_url=yard_cluster.url, timeout=60, trust_env=False) as client:
            return await asyncio.gather(*(ask(client, begun) for _ in range(8)))

    first, *_, last = sorted(asyncio.run(wake()))
    assert last - first < OPEN_TIMEOUT_S
    yard_cluster.wait_quiet("dawn")


def test_from_zero_and_back(yard_cluster: Cluster) -> None:
    """A sleeping model is woken by its first request, which is held and answered; a live stream keeps it awake; it
    goes back to sleep. Its names are known while it sleeps."""
    scaling = {"idle_s": 1}
    yard_cluster.deploy(
        fake_app("sleepy", bounds=(0, 1), scaling=scaling, also_known_as=("org/sleepy",), token_interval_s=0.5)
    )
    yard_cluster.wait_state("sleepy", "asleep")
    with yard_cluster.client.stream("POST", CHAT, json=chat("org/sleepy", stream=True, max_tokens=10)) as answer:
        text = "".join(answer.iter_text())
    assert answer.status_code == 200
    assert text.endswith("data: [DONE]\n\n"), "scaling to zero cut a live stream"
    yard_cluster.wait_state("sleepy", "asleep")
    yard_cluster.remove("sleepy")


def test_names_change_live(yard_cluster: Cluster) -> None:
    """Each key of a name edited in the gateway's user_config applies and restarts nothing: neither gateways nor
    models."""
    yard_cluster.deploy(fake_app("one"), fake_app("two"))
    before = (yard_cluster.gateway_pids(), yard_cluster.pids("one"), yard_cluster.pids("two"))
    one, two = ({report["replica"] for report in yard_cluster.reports(name)} for name in ("one", "two"))
    assert not one & two

    def named(**name: Any) -> None:
        settings = {"names": {"alias": name}} if name else {}
        yard_cluster.deploy(
            {
                "name": GATEWAY,
                "import_path": "serve_app.gateway:app",
                "route_prefix": "/",
                "deployments": [{"name": "Gateway", "user_config": settings}],
            }
        )

    def finished(name: str) -> int:
        return sum(report["engine"]["finished"] for report in yard_cluster.reports(name))

    def answered_by(model: str) -> bool:
        seen = finished(model)
        answer = yard_cluster.client.post(CHAT, json=chat("alias"))
        return answer.status_code == 200 and answer.json()["model"] == "alias" and finished(model) == seen + 1

    def tokens(**body: Any) -> int:
        answer = yard_cluster.client.post(CHAT, json=chat("alias") | body)
        return int(answer.json()["usage"]["completion_tokens"]) if answer.status_code == 200 else -1

    named(to="one")
    eventually("to", lambda: answered_by("one"), 10)
    named(to={"two": 1})
    eventually("another one", lambda: answered_by("two"), 10)
    named(to="one", defaults={"max_tokens": 5})
    eventually("defaults", lambda: tokens() == 5, 10)
    named(to="one", max_tokens=3)
    eventually("the cap", lambda: tokens(max_tokens=9) == 3, 10)
    named(to="missing", fallback=["two"])
    eventually("the fallback", lambda: answered_by("two"), 10)
    named()
    eventually("gone", lambda: yard_cluster.client.post(CHAT, json=chat("alias")).status_code == 404, 10)
    assert (yard_cluster.gateway_pids(), yard_cluster.pids("one"), yard_cluster.pids("two")) == before
    yard_cluster.remove("one", "two")


def test_a_card_changes_live(yard_cluster: Cluster) -> None:
    """An adapter that is added is an id at once, and one that is taken away none any more; engines hear how long tokens
    may wait to share an event; nothing restarts."""
    name = "base"

    def adapters(**folders: str) -> None:
        app = fake_app(name)
        card = next(d for d in app["deployments"] if d["name"] == CARD_DEPLOYMENT)
        card["user_config"] |= {"adapters": folders, "limits": {"chunk_s": len(folders) / 10}}
        yard_cluster.deploy(app)

    def status(asked: str) -> int:
        return yard_cluster.client.post(CHAT, json=chat(asked)).status_code

    adapters(sql="/adapters/sql")
    eventually("the adapter answers", lambda: status("sql") == 200)
    before = (yard_cluster.gateway_pids(), yard_cluster.pids(name), yard_cluster.pids(name, CARD_DEPLOYMENT))
    adapters(poet="/adapters/poet", bad="/adapters/broken")
    eventually("another one does", lambda: status("poet") == 200)
    eventually("the first one is gone", lambda: status("sql") == 404)
    eventually("the engine hears it", lambda: yard_cluster.reports(name)[0]["engine"]["chunk_s"] == 0.2, 20)
    assert (status("bad"), status(name)) == (400, 200)
    answer = yard_cluster.client.post(CHAT, json=chat("poet", max_tokens=2)).json()
    assert answer["choices"][0]["message"]["content"] == "poet:t0 poet:t1 "
    assert before == (yard_cluster.gateway_pids(), yard_cluster.pids(name), yard_cluster.pids(name, CARD_DEPLOYMENT))
    yard_cluster.remove(name)
