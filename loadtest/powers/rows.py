"""What is compared. A row is one power: variants of a model's entry, the loads that each gets, the figures shown.

Rows are data: a new one is one entry here. GPU rows come first, the most telling first, since time on such a host is
short; CPU rows have the real demo model and figures that mean something on a CPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from loadtest.overhead.client import Level

GIB = 1 << 30
# In an entry's args a text "made:KIND" stands for a file or folder that is made for the run: a kind of `checkpoints`,
# or "made:SHAPE:KIND" for a shape with that kind's quantisation.
MADE = "made:"


@dataclass(frozen=True)
class Load:
    """``streams`` at once. Prompts are ``prompt`` random ids, the first ``shared`` the same in all, or with ``texts``
    real ones of that kind (``texts.KINDS``). ``beside``: prompts of so many tokens that arrive meanwhile, one every
    ``beside_s`` seconds, and are not counted. ``seconds``: measured once and for so long, after half of that, where
    requests take too long for the usual time."""

    streams: int
    prompt: int = 64
    tokens: int = 64
    shared: int = 0
    texts: Literal["", "copying", "new"] = ""
    beside: int = 0
    beside_s: float = 2.0
    seconds: float = 0.0

    @property
    def level(self) -> Level:
        return Level(streams=self.streams)

    def __str__(self) -> str:
        what = f", {self.texts}" if self.texts else f", beside prompts of {self.beside}" if self.beside else ""
        return f"{self.streams}{what}"


@dataclass(frozen=True)
class Variant:
    """``models``: the ``args`` of each model's entry, as a user writes them; the load goes to all of them at once."""

    name: str
    models: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Row:
    """``gpus``: that it needs; 0: the CPU engine. ``says``: with perplexity and greedy answers. ``figures``: columns of
    its table, by their names in ``report.FIGURES``."""

    name: str
    what: str
    gpus: int
    variants: tuple[Variant, ...]
    loads: tuple[Load, ...]
    figures: tuple[str, ...]
    says: bool = False


def _variants(base: Mapping[str, Any], changes: Mapping[str, Mapping[str, Any]]) -> tuple[Variant, ...]:
    """One variant per change: ``engine`` is merged, what else a change has replaces it."""
    return tuple(Variant(name, (changed(base, change),)) for name, change in changes.items())


def changed(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``change``: engine arguments one by one, other keys whole."""
    engine = {**base.get("engine", {}), **change.get("engine", {})}
    return {**base, **change, "engine": engine}


def _engine(**arguments: Any) -> dict[str, Any]:
    return {"engine": arguments}


_DEMO: dict[str, Any] = {"source": {"demo": "smollm2-135m-instruct"}}
# 256 MiB of KV cache; one thread, since the load's clients need a core too.
_ON_CPU = changed(
    _DEMO,
    {
        "engine": {
            "dtype": "bfloat16",
            "max_model_len": 2048,
            "max_num_seqs": 16,
            "enforce_eager": True,
            "kv_cache_memory_bytes": GIB // 4,
        },
        "resources": {"num_cpus": 0.5, "num_gpus": 0},
        "env": {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
    },
)
# On CPUs vLLM prepares pipeline stages only where it compiles: this does, quickly.
_STAGED = _engine(enforce_eager=False, compilation_config={"mode": 1, "backend": "eager"})
# So small that several stand side by side.
_ON_GPU = changed(
    _DEMO,
    _engine(max_model_len=8192, max_num_seqs=256, gpu_memory_utilization=0.2, kv_cache_memory_bytes=8 * GIB),
)
_LLAMA: dict[str, Any] = {
    "source": {"shape": "shapes/Llama-3.1-8B-Instruct.json"},
    "engine": {"max_model_len": 16384, "max_num_seqs": 256},
}
# Where only speed counts: 98,304 tokens of KV cache, and four of them fit an H200.
_PART = changed(_LLAMA, _engine(max_num_seqs=128, gpu_memory_utilization=0.24, kv_cache_memory_bytes=12 * GIB))
_CODE = changed(_LLAMA, {"source": {"shape": "shapes/CodeLlama-7b-Instruct-hf.json"}})
_MOE = changed(_LLAMA, {"source": {"shape": "shapes/Qwen3-30B-A3B.json"}})
# vLLM's own all-reduce kernel does not run where GPUs cannot reach each other's memory.
_TENSOR_2 = {"tensor_parallel_size": 2, "engine": {"disable_custom_all_reduce": True}}
_HALF = {"resources": {"num_gpus": 0.5}}

_NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
_KV_FP8 = {"16 bits": {}, "fp8": _engine(kv_cache_dtype="fp8")}
_WEIGHTS = {
    "bf16": {},
    "fp8": {"source": {"path": "made:fp8"}},
    "int8": {"source": {"path": "made:int8"}},
    "int4": {"source": {"path": "made:int4"}},
}
_DRAFTS = {
    "alone": {},
    "6 of 30 layers": _engine(speculative_config={"model": "made:draft-6", "num_speculative_tokens": 3}),
    "24 of 30 layers": _engine(speculative_config={"model": "made:draft-24", "num_speculative_tokens": 3}),
}
# The draft must know the large model's tokens.
_SYNTHETIC = {
    "alone": {},
    "draft": _engine(
        speculative_config={
            "model": "made:draft-shape",
            "num_speculative_tokens": 3,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": 3.0,
        }
    ),
}
# On is vLLM's default.
_PREFIX_CACHE = {"off": _engine(enable_prefix_caching=False), "on": {}}
_ONE_BY_ONE = {"one at a time": _engine(max_num_seqs=1), "continuous": {}}


def _budgets(context: int, *chunks: int) -> dict[str, Mapping[str, Any]]:
    """Whole prompts in one step, and chunks of so many tokens."""
    whole = _engine(enable_chunked_prefill=False, max_num_batched_tokens=context)
    return {"whole prompts": whole} | {
        f"chunks of {size:,}": _engine(enable_chunked_prefill=True, max_num_batched_tokens=size) for size in chunks
    }


_SPEED = ("tok_s", "ttft_p50", "ttft_p99", "tpot_p50")
_SPECULATION = ("tok_s", "tpot_p50", "acceptance", "tokens_per_step")
# On a shared machine CPU time says more than time.
_ON_SHARED_CPU = (*_SPECULATION, "engine_cpu")
_BOTH_LOADS = (Load(1, 512, 128), Load(64, 512, 128))

GPU_ROWS = (
    Row(
        "tensor-parallel",
        "one GPU against two, each layer split over both; Llama-3.1-8B's shape",
        2,
        _variants(_LLAMA, {"1 GPU": {}, "2 GPUs": _TENSOR_2}),
        _BOTH_LOADS,
        (*_SPEED, "kv_tokens", "placement"),
    ),
    Row(
        "tensor-parallel-30b",
        "the same with Qwen3-30B-A3B's shape",
        2,
        _variants(_MOE, {"1 GPU": {}, "2 GPUs": _TENSOR_2}),
        _BOTH_LOADS,
        (*_SPEED, "kv_tokens", "placement"),
    ),
    Row(
        "fp8-kv",
        "a KV cache of 40 GiB in 16 bits against FP8, prompts of 8,000 tokens; Llama-3.1-8B's shape",
        1,
        _variants(changed(_LLAMA, _engine(gpu_memory_utilization=0.45, kv_cache_memory_bytes=40 * GIB)), _KV_FP8),
        (Load(16, 8000, 256, seconds=16), Load(64, 8000, 256, seconds=24)),
        ("kv_tokens", "full", *_SPEED),
    ),
    Row(
        "fp8-kv-answers",
        "the same on the real demo model: what it answers",
        1,
        _variants(_ON_GPU, _KV_FP8),
        (),
        ("kv_tokens", "perplexity", "same_answers", "same_tokens"),
        says=True,
    ),
    Row(
        "two-models",
        "one model on a whole GPU against two that share it by halves; Llama-3.1-8B's and CodeLlama-7B's shapes",
        1,
        (
            Variant("Llama alone", (_LLAMA,)),
            Variant("both", (changed(_LLAMA, _HALF), changed(_CODE, _HALF))),
        ),
        (Load(32, 512, 128),),
        (*_SPEED, "kv_tokens", "gpu_memory", "errors"),
    ),
    Row(
        "weights",
        "weights in 16, 8 and 4 bits; Llama-3.1-8B's shape",
        1,
        _variants(
            _PART,
            {
                "bf16": {},
                **{
                    kind: {"source": {"shape": f"made:shapes/Llama-3.1-8B-Instruct.json:{kind}"}}
                    for kind in ("fp8", "int8", "int4")
                },
            },
        ),
        _BOTH_LOADS,
        ("weights", *_SPEED),
    ),
    Row(
        "weights-quality",
        "the same on the real demo model: what it answers",
        1,
        _variants(_ON_GPU, _WEIGHTS),
        (),
        ("weights", "perplexity", "same_answers", "same_tokens"),
        says=True,
    ),
    Row(
        "ngram",
        "n-gram speculation on texts that repeat their prompt, and on new ones; the real demo model",
        1,
        _variants(_ON_GPU, {"alone": {}, "n-gram": _engine(speculative_config=_NGRAM)}),
        tuple(Load(streams, texts=kind) for kind in ("copying", "new") for streams in (1, 32)),
        (*_SPECULATION, "same_answers"),
        says=True,
    ),
    Row(
        "draft",
        "a draft model of the demo model's own first layers; the real demo model",
        1,
        _variants(_ON_GPU, _DRAFTS),
        (Load(1, texts="new"),),
        (*_SPECULATION, "same_answers", "same_tokens"),
        says=True,
    ),
    Row(
        "draft-speed",
        "a draft of SmolLM2's shape before Llama-3.1-8B's, dummy weights; acceptance is synthetic, 3 tokens a step",
        1,
        _variants(_PART, _SYNTHETIC),
        (Load(1, 512, 128), Load(32, 512, 128)),
        _SPECULATION,
    ),
    Row(
        "pipeline-parallel",
        "one GPU against two, the layers in two groups; Llama-3.1-8B's shape",
        2,
        _variants(_LLAMA, {"1 GPU": {}, "2 GPUs": {"pipeline_parallel_size": 2}}),
        _BOTH_LOADS,
        (*_SPEED, "kv_tokens", "placement"),
    ),
    Row(
        "attention",
        "attention backends, prompts of 4,000 tokens; Llama-3.1-8B's shape",
        1,
        _variants(
            _PART, {name: _engine(attention_backend=name) for name in ("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER")}
        ),
        (Load(1, 4000, 128), Load(16, 4000, 128)),
        _SPEED,
    ),
    Row(
        "batching",
        "one request at a time against continuous batching; Llama-3.1-8B's shape",
        1,
        _variants(_PART, _ONE_BY_ONE),
        (Load(64, 512, 128),),
        (*_SPEED, "running"),
    ),
    Row(
        "paged-kv",
        "KV cache in pages against room for a full context each, in 8 GiB; Llama-3.1-8B's shape",
        1,
        # 65,536 tokens, which is four full contexts.
        _variants(
            changed(_PART, _engine(kv_cache_memory_bytes=8 * GIB)),
            {"reserved": _engine(max_num_seqs=4), "pages": {}},
        ),
        (Load(128, 512, 128),),
        ("kv_tokens", "full", "running", "kv_usage", *_SPEED),
    ),
    Row(
        "prefix-caching",
        "prompts of 4,096 tokens of which 4,000 are the same; Llama-3.1-8B's shape",
        1,
        _variants(_PART, _PREFIX_CACHE),
        (Load(1, 4096, 32, shared=4000), Load(16, 4096, 32, shared=4000)),
        ("hits", *_SPEED),
    ),
    Row(
        "chunked-prefill",
        "16 streams while a prompt of 16,000 tokens arrives every two seconds; Llama-3.1-8B's shape",
        1,
        _variants(_PART, _budgets(16384, 8192, 2048, 512)),
        (Load(16, 64, 256, beside=16000),),
        ("tok_s", "tpot_p50", "gap_p50", "gap_p99", "gap_max"),
    ),
)

CPU_ROWS = (
    Row(
        "cpu-paged-kv",
        "KV cache in pages against room for a full context each",
        0,
        _variants(
            changed(_ON_CPU, _engine(max_num_seqs=64)),
            # 11,648 tokens, which is five full contexts.
            {"reserved": _engine(max_num_seqs=5), "pages": {}},
        ),
        (Load(16, 128, 32),),
        ("kv_tokens", "full", "running", "kv_usage", *_SPEED),
    ),
    Row(
        "cpu-ngram",
        "n-gram speculation on texts that repeat their prompt, and on new ones",
        0,
        _variants(_ON_CPU, {"alone": {}, "n-gram": _engine(speculative_config=_NGRAM)}),
        tuple(Load(streams, tokens=32, texts=kind) for kind in ("copying", "new") for streams in (1, 8)),
        (*_ON_SHARED_CPU, "same_answers"),
        says=True,
    ),
    Row(
        "cpu-draft",
        "a draft model of the demo model's own first layers",
        0,
        _variants(_ON_CPU, _DRAFTS),
        (Load(1, tokens=32, texts="new"),),
        (*_ON_SHARED_CPU, "same_answers", "same_tokens"),
        says=True,
    ),
    Row(
        "cpu-weights",
        "weights in 16, 8 and 4 bits, rounded to nearest",
        0,
        # Without AMX vLLM has no kernel for FP8 weights on a CPU, and is too slow to wait for.
        _variants(_ON_CPU, {name: change for name, change in _WEIGHTS.items() if name != "fp8"}),
        (Load(1, tokens=32), Load(8, tokens=32)),
        ("weights", "perplexity", "same_answers", "same_tokens", "engine_cpu"),
        says=True,
    ),
    Row(
        "cpu-batching",
        "one request at a time against continuous batching",
        0,
        _variants(_ON_CPU, _ONE_BY_ONE),
        (Load(8, 64, 32),),
        (*_SPEED, "running"),
    ),
    Row(
        "cpu-prefix-caching",
        "prompts of 1,088 tokens of which 1,024 are the same",
        0,
        _variants(_ON_CPU, _PREFIX_CACHE),
        (Load(2, 1088, 8, shared=1024),),
        ("hits", "ttft_p50", "ttft_p99", "tpot_p50"),
    ),
    Row(
        "cpu-chunked-prefill",
        "4 streams while a prompt of 1,800 tokens arrives every 15 seconds",
        0,
        _variants(_ON_CPU, _budgets(2048, 512, 128)),
        (Load(4, 64, 32, beside=1800, beside_s=15.0, seconds=30),),
        ("tok_s", "tpot_p50", "gap_p50", "gap_p99", "gap_max"),
    ),
    Row(
        "cpu-fp8-kv",
        "the KV cache in 16 bits against FP8",
        0,
        _variants(_ON_CPU, _KV_FP8),
        (Load(8, 512, 32),),
        ("kv_tokens", "full", "tok_s", "tpot_p50", "perplexity", "same_answers", "same_tokens"),
        says=True,
    ),
    # Two CPUs cannot show what splitting does to speed. What it does to memory and answers they can.
    Row(
        "cpu-tensor-parallel",
        "one worker against three, each layer split over all; 256 MiB of KV cache each",
        0,
        _variants(_ON_CPU, {"1 worker": {}, "3 workers": {"tensor_parallel_size": 3}}),
        (),
        ("kv_tokens", "perplexity", "same_answers", "same_tokens"),
        says=True,
    ),
    Row(
        "cpu-pipeline-parallel",
        "one worker against two, the layers in two groups; 256 MiB of KV cache each",
        0,
        _variants(changed(_ON_CPU, _STAGED), {"1 worker": {}, "2 workers": {"pipeline_parallel_size": 2}}),
        (),
        ("kv_tokens", "perplexity", "same_answers", "same_tokens"),
        says=True,
    ),
    Row(
        "cpu-two-models",
        "one model against two on the same CPUs, both under load",
        0,
        (Variant("alone", (_ON_CPU,)), Variant("both", (_ON_CPU, _ON_CPU))),
        (Load(4, 64, 32),),
        (*_SPEED, "kv_tokens", "errors"),
    ),
)

ROWS = {row.name: row for row in (*GPU_ROWS, *CPU_ROWS)}
