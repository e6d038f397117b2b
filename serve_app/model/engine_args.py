"""vLLM's argument vocabulary: which keys ``engine:`` and ``frontend:`` may hold, and which of them are ours to set.

Besides ``engine.py`` the only file that knows vLLM. Importing vLLM takes about ten seconds, so nothing here does it
before a table is asked for. Works with vLLM 0.26, 0.32 and 0.33.
"""

import dataclasses
import functools
import importlib
import importlib.util
import logging
import re
import warnings
from typing import Any

# BaseFrontendArgs moved in each of the releases that we support; newest first.
_FRONTEND_MODULES = (
    "vllm.entrypoints.common.cli_args",  # 0.33
    "vllm.entrypoints.launchers.cli_args",  # 0.32
    "vllm.entrypoints.openai.cli_args",  # 0.26
)

_FROM_SOURCE = "the model comes from args.source"
_FROM_PLACEMENT = "Modelyard sets it from the placement: use tensor_parallel_size, pipeline_parallel_size and resources"
_MORE_REPLICAS = "one engine per replica: set num_replicas under deployments: [{name: Model}]"
_NAMES = "the application's name is the model's id; further ids go to also_known_as of the Card"

# Engine arguments that Modelyard sets itself, with where to say it instead. The parallel sizes and `tokenizer` are
# missing here on purpose: they are fields of ModelArgs and Source, and `check` finds that out by itself.
OWNED_ENGINE_KEYS: dict[str, str] = {
    "model": _FROM_SOURCE,
    "model_weights": _FROM_SOURCE,
    "hf_config_path": _FROM_SOURCE,
    "served_model_name": _NAMES,
    "distributed_executor_backend": _FROM_PLACEMENT,
    "prefill_context_parallel_size": _FROM_PLACEMENT,
    "nnodes": _FROM_PLACEMENT,
    "node_rank": _FROM_PLACEMENT,
    "master_addr": _FROM_PLACEMENT,
    "master_port": _FROM_PLACEMENT,
    "data_parallel_size": _MORE_REPLICAS,
    "data_parallel_size_local": _MORE_REPLICAS,
    "data_parallel_rank": _MORE_REPLICAS,
    "data_parallel_start_rank": _MORE_REPLICAS,
    "data_parallel_address": _MORE_REPLICAS,
    "data_parallel_rpc_port": _MORE_REPLICAS,
    "data_parallel_hybrid_lb": _MORE_REPLICAS,
    "data_parallel_external_lb": _MORE_REPLICAS,
    "data_parallel_multi_port_external_lb": _MORE_REPLICAS,
    "data_parallel_backend": _MORE_REPLICAS,
    "hf_token": "Ray's dashboard would show it: set HF_TOKEN in the environment of the nodes",
    "disable_log_stats": "scaling and metrics read the engine's statistics",
}

# The arguments for which vLLM's command line reads "16k" (1,000) and "16K" (1,024).
_SUFFIXED = {
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_scheduled_tokens",
    "max_num_queued_tokens",
    "kv_cache_memory_bytes",
    "safetensors_prefetch_block_size",
}
_POWER = {"k": 1, "m": 2, "g": 3, "t": 4}


def engine_fields() -> dict[str, Any] | None:
    """Type hint of each ``AsyncEngineArgs`` field; None where vLLM is not installed."""
    if not _installed():
        return None
    return _table("vllm.engine.arg_utils", "AsyncEngineArgs")


def frontend_fields() -> dict[str, Any] | None:
    """Type hint of each ``BaseFrontendArgs`` field; None where vLLM is not installed.

    ImportError: this vLLM keeps the class in none of the places that we know.
    """
    if not _installed():
        return None
    for module in _FRONTEND_MODULES:
        try:
            return _table(module, "BaseFrontendArgs")
        except ModuleNotFoundError as e:
            if not (e.name or "").startswith("vllm.entrypoints"):
                raise
    raise ImportError(f"vLLM has BaseFrontendArgs in none of {', '.join(_FRONTEND_MODULES)}")


def read_numbers(engine: dict[str, Any]) -> dict[str, Any]:
    """``engine`` with "16k", "16K" and "auto" read as vLLM's command line reads them.

    ``AsyncEngineArgs`` itself takes numbers only. ValueError: a text that vLLM's command line would refuse as well.
    """
    return {k: _number(k, v) if k in _SUFFIXED and isinstance(v, str) else v for k, v in engine.items()}


def _number(key: str, text: str) -> int:
    text = text.strip()
    if key == "max_model_len" and text.lower() == "auto":
        return -1
    if match := re.fullmatch(r"(\d+)([KMGT])", text):
        return int(match[1]) << 10 * _POWER[match[2].lower()]
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt])", text):
        return int(float(match[1]) * 1000 ** _POWER[match[2]])
    return int(text)


def _installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


@functools.cache
def _table(module: str, name: str) -> dict[str, Any]:
    # vLLM and torch log what they find while they are imported; none of it matters to someone checking a file.
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cls = getattr(importlib.import_module(module), name)
    finally:
        logging.disable(before)
    table: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if field.name.startswith("_"):
            continue
        # vLLM writes `int = None` where None means "decide yourself". A hint may be text (a forward reference).
        optional = field.default is None and not isinstance(field.type, str)
        table[field.name] = field.type | None if optional else field.type  # type: ignore[operator]
    return table
