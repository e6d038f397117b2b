"""How much KV cache a sequence takes on one worker, by the rules of vLLM's block manager. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from serve_app.planning.architecture import Architecture
from serve_app.planning.engine_settings import EngineSettings


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share a table of blocks. ``window``: how far they look back, None for all. ``blocks``: those that one
    sequence of full context holds."""

    layers: tuple[int, ...]
    window: int | None
    blocks: int


@dataclass(frozen=True, slots=True)
class KvCache:
    """The cache of one worker; of a pipeline, the stage that needs most.

    ``per_layer``: bytes of one token in one layer. ``block_bytes``: one block of the pool, which holds ``block`` tokens
    of as many layers as the largest group has here. ``sequence_bytes``: one sequence of full context.
    """

    per_layer: int
    groups: tuple[Group, ...]
    block_bytes: int
    sequence_bytes: int


def kv_cache(arch: Architecture, engine: EngineSettings, stages: Sequence[range]) -> KvCache:
    """The cache's layout. ``stages``: the layers of each pipeline stage."""
    if arch.latent is not None:
        # One vector for all heads, so that tensor parallelism cannot divide it.
        per_layer = (arch.latent.kv_rank + arch.latent.rope) * engine.kv_element
    else:
        heads = max(1, arch.kv_heads // engine.tensor)
        per_layer = 2 * heads * arch.head_dim * engine.kv_element
    groups = _groups(arch, engine)
    # Every block of the pool has one size, so a group with fewer layers leaves a part of each unused.
    most = max(len(set(group.layers) & set(stage)) for stage in stages for group in groups)
    block_bytes = most * per_layer * engine.block
    return KvCache(per_layer, groups, block_bytes, sum(group.blocks for group in groups) * block_bytes)


def _groups(arch: Architecture, engine: EngineSettings) -> tuple[Group, ...]:
    windows = arch.windows if engine.windows else (None,) * arch.layers
    if not engine.hybrid and None in windows:
        windows = (None,) * arch.layers
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    sizes = [len(layers) for layers in kinds.values()]
    # Groups of equal size: that of the rarer kind, unless the kinds are nearly equally frequent.
    size = max(sizes) if max(sizes) < 1.5 * min(sizes) else min(sizes)
    groups = []
    for window, layers in kinds.items():
        number = -(-len(layers) // size)
        groups += [Group(tuple(layers[i::number]), window, _blocks(window, engine)) for i in range(number)]
    return tuple(groups)


def _blocks(window: int | None, engine: EngineSettings) -> int:
    """Blocks that one sequence of full context holds in a group."""
    if window is None:
        return -(-engine.context // engine.block)
    # What is under way is freed only once its step has ended; a window may begin inside a block.
    held = min(window - 1 + engine.in_flight, engine.context)
    return -(-held // engine.block) + 1
