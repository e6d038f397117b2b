"""Tensor parallelism on the real engine: SmolLM2 has three KV heads, so it splits over three workers."""

import os
import signal

import pytest

from tests.engine.test_survival import living
from tests.serve.cluster import Cluster, children, eventually

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("engines", ["python-proxy"], indirect=True)
def test_tensor_parallel_workers_answer_and_end(engines: Cluster) -> None:
    """One replica, three worker processes, one answer. kill -9 of the replica where Ray's process-group cleanup is off
    and the orphan guard is alone: every process of the engine is gone before the successor is up."""
    (replica,) = engines.pids("split").values()
    processes = children(replica)
    workers = [process for process in processes if "Worker_TP" in process.name()]
    assert len(workers) == 3
    question = {"role": "user", "content": "What is the capital of France?"}
    body = {"model": "split", "messages": [question], "max_tokens": 8, "temperature": 0}
    answer = engines.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 8
    os.kill(replica, signal.SIGKILL)

    def gone() -> bool:
        up = [pid for pid in engines.pids("split").values() if pid != replica]
        assert not up or not living(processes), "the successor is up while the old engine lives"
        return not living(processes)

    eventually("every process of the engine is gone", gone)
