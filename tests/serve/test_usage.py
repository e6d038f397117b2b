"""Usage on real Ray Serve: over several gateways, and after some of them are gone."""

import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.usage import FIELDS
from tests.serve.cluster import Cluster, eventually, fake_app, two_gateways

pytestmark = pytest.mark.serve

CHAT = "/v1/chat/completions"
BODY = {"model": "used", "messages": [{"role": "user", "content": "two words"}], "max_tokens": 3}


def test_sums_outlive_gateways(yard_cluster: Cluster, tmp_path: Path) -> None:
    """Two gateways answer and have files of their own. One is killed once its sums are written, its successor answers
    too; then both are stopped in order, and successors come: after each, the sums are what was sent, and complete."""
    yard_cluster.deploy(fake_app("used"))
    sent = 0

    def ask(**more: Any) -> None:
        nonlocal sent
        # A connection of its own: the proxy hands it to either gateway.
        answer = httpx.post(yard_cluster.url + CHAT, json=BODY | more, timeout=60, trust_env=False)
        assert answer.status_code == 200, answer.text
        sent += 1

    def told() -> dict[str, Any]:
        answer = httpx.get(f"{yard_cluster.url}/usage", timeout=60, trust_env=False)
        return dict(answer.json()) if answer.is_success else {"complete": False, "usage": []}

    def all_is_told() -> bool:
        now = told()
        return now["complete"] and sum(row["requests"] for row in now["usage"]) >= sent

    def have_counted() -> int:
        return sum("used" in path.read_text() for path in tmp_path.glob("*.jsonl"))

    def use(gateways: int) -> None:
        """Ask until so many gateways, of now and before, have counted something."""

        def have() -> bool:
            ask()
            ask(stream=True)
            return have_counted() >= gateways

        eventually(f"{gateways} gateways have counted", have)
        eventually("all is told", all_is_told)

    def others_run(than: set[int]) -> bool:
        now = set(yard_cluster.gateway_pids().values())
        return len(now) == 2 and not now & than

    settings = {"usage_dir": str(tmp_path)}
    with two_gateways(yard_cluster, user_config=settings):
        use(gateways=2)
        killed = next(iter(yard_cluster.gateway_pids().values()))
        os.kill(killed, signal.SIGKILL)
        eventually("two gateways again", lambda: others_run(than={killed}))
        use(gateways=3)
        before = set(yard_cluster.gateway_pids().values())
        for _ in range(5):  # just before both are stopped, for they get other options
            ask()
        other = {"num_cpus": 0.11, "runtime_env": {"env_vars": {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}}}
        with two_gateways(yard_cluster, user_config=settings, ray_actor_options=other):
            eventually("two other gateways", lambda: others_run(than=before))
            eventually("all is told", all_is_told)
            rows = told()["usage"]
    assert {(row["key"], row["model"]) for row in rows} == {(None, "used")}
    sums = [sum(row[field] for row in rows) for field in FIELDS]
    assert sums == [sent, 0, 2 * sent, 3 * sent, 0]
    yard_cluster.remove("used")
