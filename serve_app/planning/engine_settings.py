"""What vLLM will make of an ``engine:`` section as far as memory goes: its own defaults filled in. Pure.

The defaults are those of vLLM 0.26, 0.32 and 0.33 for an engine that is built as ``serve_app/model/engine.py`` does it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serve_app.config import ModelArgs
from serve_app.model.engine_args import read_numbers
from serve_app.planning.architecture import Architecture, PlanError

GIB = 1 << 30
UTILIZATION = 0.92
# Tokens in one step at most, by the GPU's memory; vLLM takes the first also on an A100, whatever its memory.
_BATCH_TOKENS = ((0, 2048), (70 * GIB, 8192), (160 * GIB, 16384))
_BLOCK = 16
_CPU_BLOCK = 128
_DTYPES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}
_KV_DTYPES = {"bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
# Arguments that take or give memory in ways that are not counted here.
_NOT_COUNTED = {
    "speculative_config": "a draft model",
    "enable_lora": "LoRA adapters",
    "cpu_offload_gb": "weights kept outside of the GPU",
    "offload_backend": "weights kept outside of the GPU",
    "kv_cache_dtype_skip_layers": "a KV cache of two types",
    "enable_dbo": "dual batch overlap",
    "enable_eplb": "spare experts",
}


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """One replica's engine. ``tensor``, ``pipeline``: parallel sizes. ``element``, ``kv_element``: bytes of a number in
    the weights and activations (``dtype``) and in the KV cache (``kv_dtype``). ``block``, ``context``,
    ``batch_tokens`` (the most in one step): tokens. ``in_flight``: tokens of all steps that may be under way at once.

    ``kv_bytes``, ``kv_blocks``: a size of the KV cache that was asked for. ``shrinks``: vLLM shortens the context to
    what fits (max_model_len: auto). ``hybrid``: layers with a window keep only their window.
    """

    tensor: int
    pipeline: int
    cpu: bool
    eager: bool
    utilization: float
    dtype: str
    element: int
    kv_dtype: str
    kv_element: int
    block: int
    context: int
    shrinks: bool
    seqs: int
    batch_tokens: int
    in_flight: int
    windows: bool
    hybrid: bool
    kv_bytes: int | None
    kv_blocks: int | None


def engine_settings(
    args: ModelArgs, config: Mapping[str, Any], arch: Architecture, gpu_bytes: int | None = None
) -> EngineSettings:
    """The settings that decide about memory. ``config``: the checkpoint's ``config.json``. ``gpu_bytes``: memory of the
    GPU, by which vLLM chooses its largest step; None: a small one.

    PlanError: an argument whose effect is not counted here, or a value that vLLM would refuse.
    """
    engine = _numbers(args.engine)
    for key, what in _NOT_COUNTED.items():
        if engine.get(key):
            raise PlanError(f"engine.{key} ({what}) changes the memory in a way that plan does not count")
    if engine.get("decode_context_parallel_size", 1) != 1:
        raise PlanError("engine.decode_context_parallel_size divides the KV cache in a way that plan does not count")
    cpu = args.resources.num_gpus == 0
    dtype = _dtype(str(engine.get("dtype", "auto")), arch)
    kv_dtype = _kv_dtype(str(engine.get("kv_cache_dtype", "auto")), dtype, config)
    windows = not engine.get("disable_sliding_window")
    asked = engine.get("max_model_len")
    context = _context(asked, arch, windows, args.env)
    batch_tokens = engine.get("max_num_batched_tokens")
    if batch_tokens is None:
        batch_tokens = max(tokens for least, tokens in _BATCH_TOKENS if (0 if cpu else gpu_bytes or 0) >= least)
        batch_tokens *= args.workers if cpu else 1
        batch_tokens *= 2 if engine.get("performance_mode") == "throughput" else 1
        if engine.get("enable_chunked_prefill") is False:
            batch_tokens = max(batch_tokens, context)
        batch_tokens = min(batch_tokens, args.max_num_seqs * context)
    # Steps overlap: one more is prepared while one runs, or while each stage of a pipeline runs one.
    steps = args.pipeline_parallel_size + (0 if cpu or engine.get("async_scheduling") is False else 1)
    kv_bytes = engine.get("kv_cache_memory_bytes")
    if cpu and args.env.get("VLLM_CPU_KVCACHE_SPACE", "").isdigit():
        kv_bytes = int(args.env["VLLM_CPU_KVCACHE_SPACE"]) * GIB
    default_block = _BLOCK if not cpu or arch.latent is not None else _CPU_BLOCK
    return EngineSettings(
        tensor=args.tensor_parallel_size,
        pipeline=args.pipeline_parallel_size,
        cpu=cpu,
        eager=bool(engine.get("enforce_eager")),
        utilization=args.gpu_memory_utilization or UTILIZATION,
        dtype=dtype,
        element=_DTYPES[dtype],
        kv_dtype=kv_dtype,
        kv_element=_KV_DTYPES.get(kv_dtype) or _DTYPES[kv_dtype],
        block=int(engine.get("block_size") or default_block),
        context=context,
        shrinks=asked == -1,
        seqs=args.max_num_seqs,
        batch_tokens=int(batch_tokens),
        in_flight=steps * int(batch_tokens),
        windows=windows,
        hybrid=not engine.get("disable_hybrid_kv_cache_manager"),
        kv_bytes=kv_bytes,
        kv_blocks=engine.get("num_gpu_blocks_override"),
    )


def _numbers(engine: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return read_numbers(dict(engine))
    except ValueError as e:
        raise PlanError(f"engine has a number that vLLM cannot read: {e}") from e


def _dtype(asked: str, arch: Architecture) -> str:
    """The engine's own. A checkpoint in float32, or one that does not say, runs in 16 bits."""
    if asked == "auto":
        return arch.dtype if arch.dtype in ("bfloat16", "float16") else "bfloat16"
    if asked not in _DTYPES:
        raise PlanError(f"engine.dtype is {asked}; plan knows {', '.join(_DTYPES)}")
    return asked


def _kv_dtype(asked: str, dtype: str, config: Mapping[str, Any]) -> str:
    if asked == "auto":
        stored = config.get("quantization_config") or {}
        scheme = stored.get("kv_cache_scheme") or stored.get("kv_cache_quant_algo")
        inner = stored.get("quantization")
        if isinstance(inner, Mapping):  # ModelOpt
            scheme = scheme or inner.get("kv_cache_quant_algo")
        if isinstance(scheme, str) and not scheme.upper().startswith("FP8"):
            raise PlanError(f"the checkpoint asks for a KV cache in {scheme}, which plan cannot count")
        return "fp8" if scheme else dtype
    if asked not in _KV_DTYPES:
        raise PlanError(f"engine.kv_cache_dtype is {asked}; plan can count auto, {', '.join(_KV_DTYPES)}")
    return asked


def _context(asked: int | None, arch: Architecture, windows: bool, env: Mapping[str, str]) -> int:
    # Without windows, no sequence may be longer than what a layer would have looked back.
    bounds = [] if windows else [w for w in arch.windows if w]
    if asked is None or asked == -1:
        return min([arch.context, *bounds])
    longest = min([arch.longest, *bounds])
    if asked < 1:
        raise PlanError(f"engine.max_model_len is {asked}: it must be at least 1, or auto")
    if asked > longest and env.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0") in ("", "0"):
        raise PlanError(f"engine.max_model_len is {asked:,}, but the model's longest context is {longest:,} tokens")
    return asked
