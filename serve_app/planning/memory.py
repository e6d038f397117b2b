"""What one replica's engine takes of a GPU's memory. Pure: a checkpoint's ``config.json`` goes in, bytes come out."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from serve_app.config import ModelArgs
from serve_app.planning.architecture import Architecture, PlanError, architecture
from serve_app.planning.engine_settings import EngineSettings, engine_settings
from serve_app.planning.kv_cache import KvCache, kv_cache
from serve_app.planning.quantization import Quantization, quantization
from serve_app.planning.weights import Matrix, bytes_of, pipeline_layers, scale, stages
from serve_app.planning.working import working_memory

__all__ = ["PlanError", "ReplicaMemory", "Sizes", "replica_memory", "sizes"]


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

    ``stages``: the weights of each pipeline stage. ``scale``: the checkpoint's true size over the counted one, None
    where only the count is known. ``working``: bytes by what they are for.
    """

    arch: Architecture
    engine: EngineSettings
    quantization: Quantization | None
    stages: tuple[tuple[Matrix, ...], ...]
    scale: float | None
    kv: KvCache
    working: Mapping[str, int]

    @property
    def memory(self) -> ReplicaMemory:
        blocks = self.engine.kv_blocks
        return ReplicaMemory(
            utilization=self.engine.utilization,
            weights=int(self.stage_bytes(self.fullest)),
            working=sum(self.working.values()),
            kv_per_token=self.kv.sequence_bytes / self.engine.context,
            context=self.engine.context,
            max_num_seqs=self.engine.seqs,
            kv_bytes=self.engine.kv_bytes if blocks is None else blocks * self.kv.block_bytes,
            shrinks=self.engine.shrinks,
        )

    @property
    def layers(self) -> list[range]:
        """Those of each pipeline stage."""
        return pipeline_layers(self.arch.layers, self.engine.pipeline)

    @property
    def fullest(self) -> tuple[Matrix, ...]:
        """The weights of the stage that has most."""
        return max(self.stages, key=self.stage_bytes)

    def stage_bytes(self, stage: Iterable[Matrix]) -> float:
        """Bytes of a stage's weights on one worker."""
        return sum(self.weight_bytes(matrix) for matrix in stage)

    def weight_bytes(self, matrix: Matrix) -> float:
        """Bytes of ``matrix`` on one worker."""
        scale = self.scale if self.scale is not None and matrix.stored else 1.0
        return bytes_of(matrix, matrix.share, self.engine.element, self.quantization) * scale


def replica_memory(
    args: ModelArgs, config: Mapping[str, Any], stored_bytes: int | None = None, gpu_bytes: int | None = None
) -> ReplicaMemory:
    """What a replica of the entry ``args`` takes. ``config``: its checkpoint's ``config.json``.

    ``stored_bytes``: the size of the checkpoint's weights where it is known; it beats the count. ``gpu_bytes``: memory
    of the GPU, by which vLLM chooses its largest step.
    PlanError: this model or these arguments cannot be counted, or vLLM would refuse them.
    """
    return sizes(args, config, stored_bytes, gpu_bytes).memory


def sizes(
    args: ModelArgs, config: Mapping[str, Any], stored_bytes: int | None = None, gpu_bytes: int | None = None
) -> Sizes:
    """As ``replica_memory``, with the parts."""
    try:
        return _sizes(args, config, stored_bytes, gpu_bytes)
    except PlanError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as e:
        # Whoever wrote the file may have written anything, anywhere in it.
        raise PlanError(f"config.json or engine holds a value that plan cannot read ({e})") from e


def _sizes(args: ModelArgs, config: Mapping[str, Any], stored_bytes: int | None, gpu_bytes: int | None) -> Sizes:
    overrides = args.engine.get("hf_overrides") or {}
    if not isinstance(overrides, Mapping):
        raise PlanError("engine.hf_overrides is no mapping; plan cannot apply it")
    config = {**config, **overrides}
    arch = architecture(config)
    engine = engine_settings(args, config, arch, gpu_bytes)
    quant = quantization(config, args.engine)
    # Layers for speculative decoding are in the checkpoint but not in the engine.
    as_stored = not (quant.while_loading if quant else arch.dtype != engine.dtype) and not arch.extra_layers
    return Sizes(
        arch=arch,
        engine=engine,
        quantization=quant,
        stages=tuple(tuple(stage) for stage in stages(arch, tensor=engine.tensor, pipeline=engine.pipeline)),
        scale=None if stored_bytes is None or not as_stored else scale(arch, engine.element, quant, stored_bytes),
        kv=kv_cache(arch, engine, pipeline_layers(arch.layers, engine.pipeline)),
        working=working_memory(arch, engine),
    )
