"""Two real replicas: what each engine found in its own cache, by vLLM's counters."""

from typing import Any

import pytest

from serve_app.config import CARD_DEPLOYMENT, MODEL_DEPLOYMENT
from tests.engine.ask import CHAT
from tests.engine.conftest import START_S, chat_app
from tests.serve.cluster import Cluster, eventually

pytestmark = pytest.mark.engine

# An odd number: going round two replicas, each turn comes to another one than the turn before.
TALKS, TURNS = 5, 4


def shared_by(replicas: int, routing: str) -> dict[str, Any]:
    app = chat_app()
    card = next(d for d in app["deployments"] if d["name"] == CARD_DEPLOYMENT)
    card["user_config"] = card["user_config"] | {"routing": routing}
    app["deployments"] = [card, {"name": MODEL_DEPLOYMENT, "num_replicas": replicas}]
    return app


def counted(cluster: Cluster) -> dict[str, int]:
    caches = [report["engine"]["prefix_cache"] for report in cluster.wait_quiet("chat")]
    return {key: sum(cache[key] for cache in caches) for key in ("queries", "hits")}


def talk(cluster: Cluster, about: str) -> float:
    """Conversations, their turns interleaved; the share of prompt tokens that were in a cache."""
    before = counted(cluster)
    talks: list[list[dict[str, str]]] = [[] for _ in range(TALKS)]
    for turn in range(TURNS):
        for number, messages in enumerate(talks):
            said = f"{about} {number}, turn {turn}: " + "the sea is deep and the sky is high. " * 12
            messages.append({"role": "user", "content": said})
            body = {"model": "chat", "messages": messages, "max_tokens": 1, "temperature": 0}
            answer = cluster.client.post(CHAT, json=body)
            assert answer.status_code == 200, answer.text
            messages.append({"role": "assistant", "content": "Yes."})
    after = counted(cluster)
    return (after["hits"] - before["hits"]) / (after["queries"] - before["queries"])


def test_two_caches_are_worth_one(engines: Cluster) -> None:
    """Conversations find in two replicas' caches what they would find in one replica's that has them all, within a
    tenth; taken round in turn they find much less."""

    def running(replicas: int, routing: str) -> None:
        engines.deploy(shared_by(replicas, routing), wait=False)

        def applied() -> bool:
            model = engines.ready()["models"]["chat"]
            return (model["replicas"], model["routing"]) == (replicas, routing)

        eventually(f"{replicas} replicas by {routing}", applied, START_S)

    one = talk(engines, "river")
    running(2, "prefix")
    two = talk(engines, "hill")
    running(2, "round_robin")
    in_turn = talk(engines, "wood")
    running(1, "prefix")
    print(f"of prompt tokens in a cache: one replica {one:.3f}, two by prefix {two:.3f}, two in turn {in_turn:.3f}")
    assert one > 0.4
    assert two >= 0.9 * one
    assert in_turn < 0.75 * one
