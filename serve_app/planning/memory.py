"""What one replica's engine takes of a GPU's memory. Pure: a checkpoint's ``config.json`` goes in, bytes come out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serve_app.config import ModelArgs
from serve_app.planning.architecture import Architecture, PlanError, architecture
from serve_app.planning.engine_settings import EngineSettings, engine_settings
from serve_app.planning.kv_cache import KvCache, kv_cache
from serve_app.planning.quantization import Quantization, quantization
from serve_app.planning.weights import Matrix, bytes_of, pipeline_layers, stages

__all__ = ["PlanError", "ReplicaMemory", "Sizes", "replica_memory", "sizes"]

_MIB = 1 << 20
# Kernels that CUDA loads while vLLM measures itself, and buffers of its libraries.
_LIBRARIES = 256 * _MIB
# Python and torch in a worker of the CPU engine.
_CPU_PROCESS = 1024 * _MIB
# What vLLM 0.26 sets aside for CUDA graphs where it does.
_GRAPHS = 640 * _MIB
# Bytes per logit while vLLM measures itself: float32, sorted, with positions and sums.
_LOGIT = 24
# Mixtures of experts that vLLM 0.26 runs on its newer model runner, by their class.
_NEW_RUNNER = ("deepseek_v2", "granitemoe", "longcat_flash_ngram", "qwen2_moe")
# Rows into which latent attention decompresses what it reads of the cache, at most.
_MLA_ROWS = 64 * 1024


@dataclass(frozen=True, slots=True)
class ReplicaMemory:
    """Memory of one engine worker (one GPU) of a replica; of the fullest worker where they differ.

    ``utilization``: the engine's ``gpu_memory_utilization``, a share of the whole GPU, weights and KV cache together.
    ``weights``, ``working``: bytes of the weights and of everything else that is no KV cache (peak activations, CUDA
    graphs, the CUDA context). ``kv_per_token``: bytes of KV cache per token, this worker's share of it.
    ``context``: the longest sequence in tokens. ``max_num_seqs``: sequences that the engine runs at once.

    ``kv_bytes``: the KV cache's size where the engine's arguments name it; ``utilization`` then bounds nothing, but
    vLLM still wants that share of the GPU to be free when it starts. ``shrinks``: vLLM shortens the context to what
    fits (``max_model_len: auto``). For the CPU engine the GPU's memory stands for that of a NUMA node.
    """

    utilization: float
    weights: int
    working: int
    kv_per_token: float
    context: int
    max_num_seqs: int
    kv_bytes: int | None = None
    shrinks: bool = False

    def kv_tokens(self, gpu_bytes: int) -> int:
        """Tokens that the KV cache holds on a GPU of so many bytes; 0 where not even the weights fit."""
        if self.kv_bytes is not None:
            room = float(self.kv_bytes if self.weights + self.working + self.kv_bytes <= gpu_bytes else 0)
        else:
            room = gpu_bytes * self.utilization - self.weights - self.working
        return max(0, int(room / self.kv_per_token))

    def full_sequences(self, gpu_bytes: int) -> float:
        """How many sequences of full context fit at once: vLLM's "maximum concurrency". Below 1 it refuses to start."""
        tokens = self.kv_tokens(gpu_bytes)
        return 1.0 if self.shrinks and 0 < tokens < self.context else tokens / self.context


@dataclass(frozen=True, slots=True)
class Sizes:
    """A replica's memory and what it is made of, for those who want to see it.

    ``stages``: the weights of each pipeline stage. ``scale``: the checkpoint's true size over the counted one, 1.0
    where only the count is known (``weighed`` False). ``working``: bytes by what they are for.
    """

    arch: Architecture
    engine: EngineSettings
    quantization: Quantization | None
    stages: tuple[tuple[Matrix, ...], ...]
    weighed: bool
    scale: float
    kv: KvCache
    working: Mapping[str, int]
    memory: ReplicaMemory

    def weight_bytes(self, matrix: Matrix) -> float:
        """Bytes of ``matrix`` on one worker."""
        return bytes_of(matrix, self.engine.element, self.quantization) * (self.scale if matrix.stored else 1)


def replica_memory(args: ModelArgs, config: Mapping[str, Any], stored_bytes: int | None = None) -> ReplicaMemory:
    """What a replica of the entry ``args`` takes. ``config``: its checkpoint's ``config.json``.

    ``stored_bytes``: the size of the checkpoint's weights where it is known; it beats the count.
    PlanError: this model or these arguments cannot be counted, or vLLM would refuse them.
    """
    return sizes(args, config, stored_bytes).memory


def sizes(args: ModelArgs, config: Mapping[str, Any], stored_bytes: int | None = None) -> Sizes:
    """As ``replica_memory``, with the parts."""
    overrides = args.engine.get("hf_overrides") or {}
    if not isinstance(overrides, Mapping):
        raise PlanError("engine.hf_overrides is no mapping; plan cannot apply it")
    config = {**config, **overrides}
    arch = architecture(config)
    engine = engine_settings(args, config, arch)
    quant = quantization(config, args.engine)
    divided = tuple(tuple(stage) for stage in stages(arch, tensor=engine.tensor, pipeline=engine.pipeline))
    scale = _scale(arch, engine, quant, stored_bytes)
    weights = max(
        sum(bytes_of(m, engine.element, quant) * ((scale or 1) if m.stored else 1) for m in stage) for stage in divided
    )
    layout = kv_cache(arch, engine, pipeline_layers(arch.layers, engine.pipeline))
    working = _working(arch, engine)
    memory = ReplicaMemory(
        utilization=engine.utilization,
        weights=int(weights),
        working=sum(working.values()),
        kv_per_token=layout.sequence_bytes / engine.context,
        context=engine.context,
        max_num_seqs=engine.seqs,
        kv_bytes=engine.kv_bytes if engine.kv_blocks is None else engine.kv_blocks * layout.block_bytes,
        shrinks=engine.shrinks,
    )
    return Sizes(arch, engine, quant, divided, scale is not None, scale or 1.0, layout, working, memory)


def _scale(arch: Architecture, engine: EngineSettings, quant: Quantization | None, stored: int | None) -> float | None:
    """The stored size over the counted one; None where the stored one does not say what the engine will load."""
    converted = quant.while_loading if quant else arch.dtype != engine.dtype
    if stored is None or converted or arch.extra_layers:
        return None
    whole = stages(arch, tensor=1, pipeline=1)[0]
    counted = sum(
        bytes_of(Matrix(m.part, m.module, m.count, m.count, m.linear), engine.element, quant) for m in whole if m.stored
    )
    scale = stored / counted
    # Quantised files hold scales, padding and unquantised layers that nobody told of; plain ones do not.
    if not (0.6 if quant else 0.95) < scale < (1.6 if quant else 1.05):
        raise PlanError(
            f"its weights are {stored / 1e9:.2f} GB, but config.json describes {counted / 1e9:.2f} GB: this "
            f"{arch.model_type} model has parts that plan does not know"
        )
    return scale


def _working(arch: Architecture, engine: EngineSettings) -> dict[str, int]:
    """Bytes by purpose, as vLLM finds them when it runs the largest step once before it sizes the cache."""
    if engine.cpu:
        return {"Python and libraries": _CPU_PROCESS}
    tokens, element, tensor = engine.batch_tokens, engine.element, engine.tensor
    old_runner = arch.experts is not None and arch.model_type not in _NEW_RUNNER
    hidden = tokens * arch.hidden * element
    widths = [(arch.matrices * arch.width) // tensor]
    if arch.experts is not None:
        width = arch.experts.width // tensor
        widths.append(arch.experts.per_token * (max(width, arch.hidden) + max(2 * width, arch.hidden)))
    layer = tokens * max(widths) * element
    if arch.latent is not None:
        rows = min(max(8 * engine.context, 4 * engine.seqs * engine.block), _MLA_ROWS)
        rows = max(rows, engine.seqs * engine.block)
        layer = max(layer, rows * arch.heads // tensor * (arch.latent.nope + arch.latent.value) * element)
    logits = min(engine.seqs, tokens) * arch.vocab * (_LOGIT if old_runner else element * (1 if tensor == 1 else 2))
    working = {
        f"activations of {tokens:,} tokens": 2 * hidden + layer,
        "kernels and libraries": _LIBRARIES,
    }
    # The two never live at the same time.
    if logits > hidden + layer:
        del working[f"activations of {tokens:,} tokens"]
        working[f"logits of {min(engine.seqs, tokens):,} sequences"] = hidden + logits
    if old_runner and not engine.eager:
        working["CUDA graphs"] = _GRAPHS
    return working
