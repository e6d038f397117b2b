"""From a replica's memory to what packing needs: GPUs or a machine of what size. Pure."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from serve_app.config import ModelArgs
from serve_app.planning.fleet import Unit
from serve_app.planning.memory import ReplicaMemory
from serve_app.planning.nodes import gib
from serve_app.planning.packing import Want

# One model's memory with any arguments, on GPUs of so many bytes (None: not known).
# PlanError: these arguments cannot be counted, or vLLM would refuse them.
Sizer = Callable[[ModelArgs, int | None], ReplicaMemory]

_MIB = 1 << 20
# 16 TiB: no GPU and no machine is larger.
_LARGEST = 1 << 44


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """A model's memory by the size of the GPU in bytes, for vLLM's largest step depends on it. None: any other size."""

    by_size: Mapping[int | None, ReplicaMemory]

    @classmethod
    def of(cls, sizer: Sizer, args: ModelArgs, sizes: Collection[int]) -> "ModelMemory":
        """On GPUs of each of ``sizes``. PlanError: see ``Sizer``."""
        return cls({size: sizer(args, size) for size in (None, *sorted(sizes))})

    def on(self, size: int | None) -> ReplicaMemory:
        return self.by_size.get(size) or self.by_size[None]

    def least_gpu(self) -> tuple[int, ReplicaMemory]:
        """The smallest GPU in bytes on which one sequence of full context fits, and the memory there.

        Of sizes that are known, those below it are too small and those above it are not.
        """
        too_small = 0
        found = (least_bytes(self.by_size[None]), self.by_size[None])
        for size in sorted(size for size in self.by_size if size is not None):
            memory = self.by_size[size]
            found = (max(least_bytes(memory), too_small + _MIB), memory)
            if found[0] <= size:
                break
            too_small = size
        return found


def want(unit: Unit, memory: ModelMemory | None) -> Want:
    """One replica of ``unit`` for packing. ``memory``: None where it is not known, and then not looked at."""
    plain = Want(unit.name, unit.needs, 1, per_node=unit.per_node)
    if memory is None or unit.args is None:
        return plain
    share = unit.args.resources.num_gpus
    if not share:
        # The CPU engine. Without a size for its cache it takes as much as there is; this is the least.
        return replace(plain, ram_bytes=unit.args.workers * _taken(memory.on(None)))
    size, own = memory.least_gpu()
    if own.kv_bytes is not None:
        # vLLM bounds a cache whose size was asked for by the whole GPU; the others on it have a share too.
        size = max(size, math.ceil(_taken(own) / share))
    return replace(plain, gpu_bytes=size, of_what=_of_what(own))


def least_bytes(memory: ReplicaMemory) -> int:
    """The smallest device, in whole MiB, on which one sequence of full context fits; 16 TiB where it fits on none."""
    low, high = 0, _LARGEST // _MIB
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if memory.full_sequences(middle * _MIB) >= 1 else (middle, high)
    return high * _MIB


def too_small_cache(memory: ReplicaMemory) -> str:
    """What a model does wrong that asks for a KV cache of so many bytes; empty: nothing."""
    if memory.kv_bytes is None or memory.full_sequences(_LARGEST) >= 1:
        return ""
    return (
        f"sets its KV cache to {gib(memory.kv_bytes)}, which holds {memory.kv_tokens(_LARGEST):,} tokens: fewer than "
        f"one sequence of {memory.context:,}; raise engine.kv_cache_memory_bytes or lower engine.max_model_len"
    )


def _taken(memory: ReplicaMemory) -> int:
    cache = memory.kv_per_token * memory.context if memory.kv_bytes is None else memory.kv_bytes
    return memory.weights + memory.working + int(cache)


def _of_what(memory: ReplicaMemory) -> str:
    parts = [f"weights {gib(memory.weights)}", f"working {gib(memory.working)}"]
    if memory.kv_bytes is not None:
        return ", ".join([*parts, f"KV cache {gib(memory.kv_bytes)}"])
    parts.append(f"one sequence of {memory.context:,} tokens {gib(memory.kv_per_token * memory.context)}")
    return f"{', '.join(parts)}; the engine fills {memory.utilization:g} of it"
