"""engine: what a config entry becomes in vLLM's words."""

from typing import Any

import pytest

from serve_app.config import ModelArgs
from serve_app.model.engine import engine_arguments


@pytest.mark.parametrize(
    ("num_gpus", "engine", "filled"),
    [(1, {}, None), (0.4, {}, 0.36), (0.4, {"gpu_memory_utilization": 0.3}, 0.3)],
)
def test_an_engine_on_a_part_of_a_gpu_fills_that_part(num_gpus: float, engine: dict[str, Any], filled: float) -> None:
    """vLLM's own default would take nine tenths of a GPU that it shares with others."""
    source = {"hub": "org/name"}
    args = ModelArgs.model_validate({"source": source, "engine": engine, "resources": {"num_gpus": num_gpus}})
    assert engine_arguments(args, "chat").get("gpu_memory_utilization") == filled


@pytest.mark.parametrize(
    ("tensor", "pipeline", "gpus", "backend"), [(1, 1, 1, None), (2, 1, 1, "mp"), (1, 2, 1, "ray"), (1, 2, 0, "mp")]
)
def test_whose_processes_the_workers_are(tensor: int, pipeline: int, gpus: int, backend: str | None) -> None:
    """Ray's where they may land on several nodes; vLLM's own where not. Its CPU engine does not start under Ray."""
    value = {
        "source": {"hub": "org/name"},
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": pipeline,
        "resources": {"num_gpus": gpus},
    }
    args = ModelArgs.model_validate(value)
    assert engine_arguments(args, "chat").get("distributed_executor_backend") == backend
