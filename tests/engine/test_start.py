"""How real engines start that are not the plain one, and what is told of one that cannot."""

from typing import Any

import pytest

from tests.engine.conftest import START_S, chat_app
from tests.serve.cluster import Cluster, children, eventually

pytestmark = pytest.mark.engine


def test_what_kept_an_engine_from_starting_is_told(engines: Cluster) -> None:
    """vLLM's engine process says it in its log alone, and the status has it before Serve has given up."""
    app = chat_app() | {"name": "tight"}
    app["args"]["engine"] |= {"kv_cache_memory_bytes": 2**20}
    engines.deploy(app, wait=False)

    def reason() -> str | None:
        entry: dict[str, Any] = engines.ready()["models"].get("tight", {})
        return entry["reason"] if "failed" in entry.get("reason", "") else None

    told = eventually("the cause", reason, START_S)
    engines.remove("tight")
    assert "vLLM failed to start: ValueError: " in told


def test_pipeline_stages_answer(engines: Cluster) -> None:
    """Two stages in two worker processes give the answer that one process gives."""
    app = chat_app() | {"name": "staged"}
    app["args"] |= {"pipeline_parallel_size": 2}
    # As vLLM prepares stages where it compiles, but quickly.
    app["args"]["engine"] |= {"enforce_eager": False, "compilation_config": {"mode": 1, "backend": "eager"}}
    engines.deploy(app, wait=False)
    engines.wait_state("staged", "ready", START_S)
    (replica,) = engines.pids("staged").values()
    assert len([process for process in children(replica) if "Worker_PP" in process.name()]) == 2
    question = {"role": "user", "content": "What is the capital of France?"}
    asked = {"messages": [question], "max_tokens": 24, "temperature": 0}
    answers = [
        engines.client.post("/v1/chat/completions", json=asked | {"model": model}).json()["choices"][0]["message"]
        for model in ("chat", "staged")
    ]
    engines.remove("staged")
    assert answers[0]["content"] == answers[1]["content"]
    assert "Paris" in answers[0]["content"]
