"""Tensor parallelism on the real engine: SmolLM2 has three KV heads, so it splits over three workers."""

import pytest

from tests.engine.conftest import START_S, chat_app
from tests.serve.cluster import Cluster, children, eventually

pytestmark = pytest.mark.engine


def test_tensor_parallel_workers_answer_and_end(engines: Cluster) -> None:
    """One replica, three worker processes, one answer; removing the application ends all of them."""
    split = chat_app() | {"name": "split", "deployments": []}
    split["args"] |= {"tensor_parallel_size": 3}
    engines.deploy(split, wait=False)
    engines.wait_state("split", "ready", START_S)
    (replica,) = engines.pids("split").values()
    processes = children(replica)
    workers = [process for process in processes if "Worker_TP" in process.name()]
    assert len(workers) == 3
    question = {"role": "user", "content": "What is the capital of France?"}
    body = {"model": "split", "messages": [question], "max_tokens": 8, "temperature": 0}
    answer = engines.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 8
    engines.remove("split")
    eventually("every process of the engine ended", lambda: not any(p.is_running() for p in processes), 60)
