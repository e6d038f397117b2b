"""``modelyard plan --explain``: where a model's memory goes, with the formulas, for a person who learns them."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from serve_app.config import ModelArgs
from serve_app.planning.checkpoint import Checkpoint
from serve_app.planning.memory import Sizes, sizes
from serve_app.planning.weights import Matrix, parameters

GIB = 1 << 30
MIB = 1 << 20


def explain(name: str, args: ModelArgs, checkpoint: Checkpoint, gpu_bytes: int) -> RenderableType:
    """What one worker of the model ``name`` holds, and what a GPU of ``gpu_bytes`` then has room for.

    For the CPU engine, ``gpu_bytes`` is the memory of its node. PlanError: see ``memory.sizes``.
    """
    found = sizes(args, checkpoint.config, checkpoint.stored_bytes, gpu_bytes)
    sections: list[tuple[str, list[RenderableType]]] = [
        ("Weights", [_weights(found), *_lines(weights_from(found))]),
        ("KV cache", _lines(*kv_cache(found))),
        ("Working memory", [_working(found), *_lines(working_from(found))]),
        (_device(found, gpu_bytes), _lines(*room(found, gpu_bytes))),
    ]
    parts: list[RenderableType] = [Text(f"{name}: {_headline(found)}"), Text(f"config.json from {checkpoint.origin}")]
    for title, body in sections:
        parts += [Text(f"\n{title}", "bold"), *(Padding(each, (0, 0, 0, 2)) for each in body)]
    return Group(*parts)


def weights_from(found: Sizes) -> str:
    """Whether the checkpoint or the count has the last word."""
    if found.scale is not None:
        return f"The checkpoint says how large its weights are; the count from config.json × {found.scale:.3f} is that."
    return "Counted from config.json: nothing beside it says how large the weights are, or the engine converts them."


def kv_cache(found: Sizes) -> Iterator[str]:
    """The formula of the KV cache with this model's numbers, a line each."""
    arch, engine = found.arch, found.engine
    layers = max(len(stage) for stage in found.layers)
    stage = "" if engine.pipeline == 1 else f" of {arch.layers} (one of {engine.pipeline} stages)"
    kind = f"{engine.kv_element} byte{'s' if engine.kv_element > 1 else ''} ({engine.kv_dtype})"
    if arch.latent is not None:
        width = f"({arch.latent.kv_rank} + {arch.latent.rope}) (compressed keys and values, kept whole by every worker)"
        yield f"per token = {layers} layers{stage} × {width} × {kind} = {found.kv.per_layer * layers:,} bytes"
    else:
        heads = f"{max(1, arch.kv_heads // engine.tensor)} KV head{'s' if arch.kv_heads > engine.tensor else ''}"
        if engine.tensor > 1:
            heads += f" of {arch.kv_heads} (tensor parallel {engine.tensor})"
        formula = f"2 (keys and values) × {layers} layers{stage} × {heads} × {arch.head_dim} (head size) × {kind}"
        yield f"per token = {formula} = {found.kv.per_layer * layers:,} bytes"
        if engine.tensor > arch.kv_heads:
            yield f"More workers than KV heads: {engine.tensor // arch.kv_heads} workers each keep a copy of one head."
        elif arch.kv_heads < arch.heads:
            yield f"Each KV head serves {arch.heads // arch.kv_heads} of the {arch.heads} query heads (GQA)."
    windows = {group.window for group in found.kv.groups}
    blocks = sum(group.blocks for group in found.kv.groups)
    if windows != {None}:
        full = -(-engine.context // engine.block)
        for window in sorted(w for w in windows if w is not None):
            alike = [group for group in found.kv.groups if group.window == window]
            yield (
                f"{sum(len(g.layers) for g in alike)} layers look back {window:,} tokens: they hold at most "
                f"{alike[0].blocks:,} blocks of a sequence, where others hold {full:,}."
            )
    groups = f", the layers of one of {len(found.kv.groups)} groups" if len(found.kv.groups) > 1 else ""
    block = f"{found.kv.block_bytes:,} bytes ({engine.block} tokens{groups})"
    sequence = f"{blocks:,} blocks of {block} = {_gib(found.kv.sequence_bytes)}"
    yield f"one sequence of {engine.context:,} tokens (its longest) = {sequence}"
    if windows != {None}:
        yield f"so a token of such a sequence takes {found.memory.kv_per_token:,.0f} bytes on average"


def working_from(found: Sizes) -> str:
    """Where the working memory's numbers come from."""
    if found.engine.cpu:
        return "An estimate."
    return "An estimate of what vLLM measures when it runs its largest step once, before it sizes the KV cache."


def room(found: Sizes, gpu_bytes: int) -> Iterator[str]:
    """The division of one device, a line each."""
    memory = found.memory
    if memory.kv_bytes is not None:
        yield f"KV cache = {_gib(memory.kv_bytes)}, as the engine's arguments say"
        left = float(gpu_bytes - memory.weights - memory.working)
    else:
        usable = gpu_bytes * memory.utilization
        yield f"for the engine = {_gib(gpu_bytes)} × {memory.utilization:g} (gpu_memory_utilization) = {_gib(usable)}"
        left = usable - memory.weights - memory.working
        parts = f"{_gib(usable)} − {_gib(memory.weights)} weights − {_gib(memory.working)} working memory"
        yield f"KV cache = {parts} = {_gib(left)}"
    tokens = memory.kv_tokens(gpu_bytes)
    if not tokens:
        yield (
            f"The model does not fit: it is {_gib((memory.kv_bytes or 0) - left)} over. Use a larger GPU, a larger "
            "tensor_parallel_size or pipeline_parallel_size, or a quantised checkpoint."
        )
        return
    share = memory.kv_bytes if memory.kv_bytes is not None else left
    yield f"KV tokens = {_gib(share)} / {memory.kv_per_token:,.0f} bytes = {tokens:,}"
    sequences = memory.full_sequences(gpu_bytes)
    if memory.shrinks and tokens < memory.context:
        yield f"vLLM shortens the context to about {tokens:,} tokens, so that one sequence fits."
    elif sequences < 1:
        yield (
            f"vLLM refuses to start: not one sequence of {memory.context:,} tokens fits. Set max_model_len to at most "
            f"{tokens:,}, or kv_cache_dtype: fp8, or use more workers."
        )
    else:
        yield f"{sequences:,.1f} sequences of {memory.context:,} tokens at once"
        each = min(tokens // memory.max_num_seqs, memory.context)
        yield f"{memory.max_num_seqs:,} sequences (max_num_seqs) at once while they have at most {each:,} tokens each"


def _headline(found: Sizes) -> str:
    arch, engine = found.arch, found.engine
    parts = [f"{parameters(found.arch) / 1e9:,.2f}e9 parameters", f"{arch.layers} layers", engine.dtype]
    if found.quantization is not None:
        parts.append(f"{found.quantization.method}, {found.quantization.bits:.3g} bits per quantised weight")
    workers = engine.tensor * engine.pipeline
    if workers > 1:
        parts.append(f"one of {workers} workers (tensor parallel {engine.tensor}, pipeline {engine.pipeline})")
    return ", ".join(parts)


def _weights(found: Sizes) -> Table:
    table = Table(box=None)
    for column in ("part", "parameters", "bytes each", "on one worker"):
        table.add_column(column, justify="left" if column == "part" else "right")
    stage = found.fullest
    parts: dict[str, list[Matrix]] = {}
    for matrix in stage:
        parts.setdefault(matrix.part, []).append(matrix)
    for part, matrices in parts.items():
        share, size = sum(m.share for m in matrices), found.stage_bytes(matrices)
        if size:
            table.add_row(part, f"{share:,}", f"{size / share:.3g}", _gib(size))
    table.add_section()
    table.add_row("together", f"{sum(m.share for m in stage if m.stored):,}", "", _gib(found.memory.weights))
    return table


def _working(found: Sizes) -> Table:
    table = Table(box=None, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for what, size in found.working.items():
        table.add_row(what, _gib(size))
    return table


def _device(found: Sizes, gpu_bytes: int) -> str:
    return f"On {'a node' if found.engine.cpu else 'one GPU'} of {_gib(gpu_bytes)}"


def _lines(*lines: str) -> list[RenderableType]:
    return [Text(line) for line in lines]


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f} GiB" if abs(size) >= GIB / 10 else f"{size / MIB:,.1f} MiB"
