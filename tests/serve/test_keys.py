"""API keys on real Serve: they change live, and no key is found anywhere in Ray."""

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from serve_app import keys
from serve_app.config import GATEWAY_DEPLOYMENT
from tests.serve.cluster import GATEWAY, Cluster, eventually, fake_app, two_gateways

pytestmark = pytest.mark.serve

CHAT = "/v1/chat/completions"
BODY = {"model": "guarded", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def gateway(**settings: Any) -> dict[str, Any]:
    app = {"name": GATEWAY, "import_path": "serve_app.gateway:app", "route_prefix": "/"}
    return app | {"deployments": [{"name": "Gateway", "user_config": settings}]}


@pytest.fixture
def guarded(yard_cluster: Cluster, tmp_path: Path) -> Iterator[tuple[Cluster, str, Path]]:
    """The cluster with a model and one key for it, and the keys file."""
    yard_cluster.deploy(fake_app("guarded"))
    key, entry = keys.make("team")
    file = tmp_path / "keys.yaml"
    file.write_text(yaml.safe_dump({"keys": [entry]}))
    yield yard_cluster, key, file
    yard_cluster.deploy(gateway())
    eventually("everybody may again", lambda: yard_cluster.client.get("/v1/models").status_code == 200)
    yard_cluster.remove("guarded")


def test_keys_come_go_and_are_found_nowhere(guarded: tuple[Cluster, str, Path]) -> None:
    """Turned on and off, and a key taken away, without a restart; afterwards no log of Ray, Serve and HAProxy, no state
    of Ray and no configuration of Serve holds a key that was sent, right or wrong."""
    running, key, file = guarded
    wrong = "my-wrong-and-secret"
    before = running.gateway_pids()

    def asked(given: str) -> int:
        return running.client.post(CHAT, json=BODY, headers={"authorization": f"Bearer {given}"}).status_code

    running.deploy(gateway(keys_file=str(file)))
    eventually("no key, no answer", lambda: running.client.post(CHAT, json=BODY).status_code == 401, 10)
    assert (asked(key), asked(wrong)) == (200, 401)
    assert running.client.get("/ready").json() == {"status": "ready"}
    broken = running.client.post(CHAT, content=b"{", headers={"x-api-key": key, "content-type": "application/json"})
    assert broken.status_code == 400
    file.write_text(yaml.safe_dump({"keys": [{"name": "another", "hash": keys.hash_of("other")}]}))
    eventually("the key is void", lambda: asked(key) == 401, 10)
    assert running.gateway_pids() == before

    told = [str(running.details())]
    for what in ("actors", "tasks", "nodes", "workers", "jobs", "runtime_envs"):
        told.append(running.api._checked("GET", f"/api/v0/{what}?detail=1").text)
    files = [path for path in Path(running.session.session_dir).rglob("*") if path.is_file()]
    assert "keys read from" in running.log(GATEWAY, "Gateway")  # these are the logs
    for secret in (key, wrong):
        assert [str(path) for path in files if secret.encode() in path.read_bytes()] == []
        assert all(secret not in text for text in told)


def test_a_quota_is_settled_by_what_the_replica_counted(guarded: tuple[Cluster, str, Path]) -> None:
    """Over real leases and the real card: an answer costs its tokens, an aborted one those that were generated, and
    what is left over all gateways is told in the headers of the next answer."""
    running, key, file = guarded
    entry = {"name": "team", "hash": keys.hash_of(key), "requests_per_minute": 100, "tokens_per_minute": 100_000}
    file.write_text(yaml.safe_dump({"keys": [entry]}))
    headers = {"authorization": f"Bearer {key}"}
    running.deploy(gateway(keys_file=str(file)))
    eventually("no key, no answer", lambda: running.client.post(CHAT, json=BODY).status_code == 401, 10)

    def left() -> int:
        answer = running.client.post(CHAT, json=BODY, headers=headers)
        assert answer.status_code == 200
        return int(answer.headers["x-ratelimit-remaining-tokens"])

    left()
    long = BODY | {"max_tokens": 3000, "stream": True, "fake": {"interval_s": 0.05}}
    with running.client.stream("POST", CHAT, json=long, headers=headers) as answer:
        assert 96_000 < int(answer.headers["x-ratelimit-remaining-tokens"]) < 97_100
        next(answer.iter_lines())
    # Both estimates have been given back but for a few tokens, in much less than the two minutes that a refill takes.
    eventually("settled", lambda: left() > 99_000, 10)


def test_a_quota_holds_over_two_gateways(guarded: tuple[Cluster, str, Path]) -> None:
    """Requests at once on connections of their own, to two gateway replicas: as many are answered as the key may, and
    what its bucket gained meanwhile; within a tenth."""
    running, key, file = guarded
    per_minute = 60
    entry = {"name": "team", "hash": keys.hash_of(key), "requests_per_minute": per_minute}
    file.write_text(yaml.safe_dump({"keys": [entry]}))
    headers = {"authorization": f"Bearer {key}"}

    def ask(_number: int) -> int:
        with httpx.Client(base_url=running.url, timeout=60, trust_env=False) as client:
            return client.post(CHAT, json=BODY, headers=headers).status_code

    with two_gateways(running, user_config={"keys_file": str(file)}):
        eventually(
            "both know the keys",
            lambda: {httpx.get(running.url + "/v1/models", trust_env=False).status_code for _ in range(8)} == {401},
        )
        begun = time.monotonic()
        with ThreadPoolExecutor(16) as clients:
            answers = Counter(clients.map(ask, range(3 * per_minute)))
        seconds = time.monotonic() - begun
        assert all("guarded" in report["models"] for report in running.reports(GATEWAY, GATEWAY_DEPLOYMENT))
    assert answers.keys() == {200, 429}
    assert per_minute <= answers[200] <= 1.1 * per_minute + per_minute * seconds / 60 + 1
