"""How many bytes a model's weights take on each worker. Pure; counted from the architecture, matrix by matrix."""

from collections.abc import Iterator
from dataclasses import dataclass

from serve_app.planning.architecture import Architecture, PlanError
from serve_app.planning.quantization import Quantization

# vLLM pads the vocabulary to a multiple of this.
_VOCAB_PADDING = 64


@dataclass(frozen=True, slots=True)
class Matrix:
    """One weight matrix, or several of a kind, in one layer or outside of them.

    ``part``: what it belongs to, in words. ``module``: its name in the checkpoint, from which quantisation settings
    tell it. ``count``: its elements in the whole model; ``share``: those on one tensor-parallel worker. ``linear``: a
    quantisation may apply to it. ``stored``: the checkpoint holds it; else the engine makes it while it loads.
    """

    part: str
    module: str
    count: int
    share: int
    linear: bool = True
    stored: bool = True


def parameters(arch: Architecture) -> int:
    """Parameters of the whole model. Biases are left out: they are below a thousandth."""
    return sum(m.count for stage in stages(arch, tensor=1, pipeline=1) for m in stage if m.stored)


def stages(arch: Architecture, *, tensor: int, pipeline: int) -> list[list[Matrix]]:
    """The matrices of each pipeline stage. PlanError: vLLM cannot divide this model so."""
    if arch.heads % tensor:
        raise PlanError(
            f"its {arch.heads} attention heads cannot be divided by tensor_parallel_size {tensor}: use "
            f"{_or([n for n in range(1, arch.heads + 1) if arch.heads % n == 0 and n <= 16])}"
        )
    if max(arch.kv_heads, tensor) % min(arch.kv_heads, tensor) and arch.latent is None:
        raise PlanError(
            f"its {arch.kv_heads} key-value heads can be neither divided by nor repeated over tensor_parallel_size "
            f"{tensor}"
        )
    found = []
    for stage, layers in enumerate(pipeline_layers(arch.layers, pipeline)):
        matrices = [m for layer in layers for m in _layer(arch, layer, tensor)]
        first, last = stage == 0, stage == pipeline - 1
        padded = -(-arch.vocab // _VOCAB_PADDING) * _VOCAB_PADDING
        table = (arch.vocab * arch.hidden, -(-padded // tensor) * arch.hidden)
        if first or (last and arch.tied):
            # With tied embeddings the last stage needs a copy of its own, which is no parameter more.
            matrices.append(Matrix("embedding", "model.embed_tokens", table[0] if first else 0, table[1], linear=False))
        if last and not arch.tied:
            matrices.append(Matrix("output layer (lm_head)", "lm_head", *table, linear=False))
        if last:
            matrices.append(Matrix("norms", "model.norm", arch.hidden, arch.hidden, linear=False))
        found.append(matrices)
    return found


def pipeline_layers(layers: int, stages: int) -> list[range]:
    """The layers of each stage. What does not divide evenly goes to stages before the last one, as in vLLM."""
    if stages > layers:
        raise PlanError(f"its {layers} layers cannot be spread over pipeline_parallel_size {stages}")
    sizes = [layers // stages] * stages
    for i in range(layers % stages):
        sizes[-2 - i] += 1
    starts = [sum(sizes[:i]) for i in range(stages)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def bytes_of(matrix: Matrix, count: int, element: int, quantization: Quantization | None) -> float:
    """Bytes of ``count`` elements of ``matrix``. ``element``: bytes of one that is not quantised."""
    quantised = quantization is not None and quantization.applies(matrix.module)
    if not matrix.stored:
        # Made from a quantised matrix; from another one it would be that matrix itself, seen in another order.
        return float(count * element if quantised else 0)
    if matrix.linear and quantization is not None and quantised:
        return count * quantization.bits / 8
    return float(count * element)


def scale(arch: Architecture, element: int, quantization: Quantization | None, stored: int) -> float:
    """The true size of the weights over the counted one. ``stored``: bytes of the checkpoint's weights.

    PlanError: they differ so much that the architecture cannot be the one that was counted.
    """
    [whole] = stages(arch, tensor=1, pipeline=1)
    counted = sum(bytes_of(m, m.count, element, quantization) for m in whole if m.stored)
    # Quantised files hold scales, padding and unquantised layers that nobody told of; plain ones do not.
    least, most = (0.6, 1.6) if quantization else (0.95, 1.05)
    if least < stored / counted < most:
        return stored / counted
    # Some files hold a tied embedding twice, which an engine does not.
    if arch.tied and least < (once := stored - arch.vocab * arch.hidden * element) / counted < most:
        return once / counted
    raise PlanError(
        f"its weights are {stored / 1e9:.2f} GB, but config.json describes {counted / 1e9:.2f} GB: this "
        f"{arch.model_type} model has parts that plan does not know"
    )


def _layer(arch: Architecture, layer: int, tensor: int) -> Iterator[Matrix]:
    path = f"model.layers.{layer}"
    attention = _attention if arch.latent is None else _latent_attention
    yield from attention(arch, f"{path}.self_attn", tensor)
    experts = arch.experts
    if experts is None or not experts.layers[layer]:
        yield from _mlp("MLP", f"{path}.mlp", arch, arch.width, tensor)
    else:
        count = experts.count * arch.matrices * arch.hidden * experts.width
        yield Matrix(f"{experts.count} experts", f"{path}.mlp.experts", count, -(-count // tensor))
        router = experts.count * arch.hidden
        yield Matrix("routers", f"{path}.mlp.gate", router, router, linear=False)
        if experts.shared:
            yield from _mlp("shared experts", f"{path}.mlp.shared_experts", arch, experts.shared, tensor)
    yield Matrix("norms", f"{path}.input_layernorm", 2 * arch.hidden, 2 * arch.hidden, linear=False)


def _mlp(part: str, path: str, arch: Architecture, width: int, tensor: int) -> Iterator[Matrix]:
    for name in ("gate_proj", "up_proj", "down_proj")[-arch.matrices :]:
        count = arch.hidden * width
        yield Matrix(part, f"{path}.{name}", count, -(-count // tensor))


def _attention(arch: Architecture, path: str, tensor: int) -> Iterator[Matrix]:
    queries = arch.hidden * arch.heads * arch.head_dim
    yield Matrix("attention", f"{path}.q_proj", queries, queries // tensor)
    head = arch.hidden * arch.head_dim
    for name in ("k_proj", "v_proj"):
        # Fewer heads than workers: each worker has a whole one.
        yield Matrix("attention", f"{path}.{name}", arch.kv_heads * head, max(1, arch.kv_heads // tensor) * head)
    yield Matrix("attention", f"{path}.o_proj", queries, queries // tensor)


def _latent_attention(arch: Architecture, path: str, tensor: int) -> Iterator[Matrix]:
    mla = arch.latent
    assert mla is not None
    queries = arch.heads * (mla.nope + mla.rope)
    if mla.q_rank is None:
        yield Matrix("attention", f"{path}.q_proj", arch.hidden * queries, arch.hidden * queries // tensor)
    else:
        compress = arch.hidden * mla.q_rank
        yield Matrix("attention", f"{path}.q_a_proj", compress, compress)
        yield Matrix("attention", f"{path}.q_b_proj", mla.q_rank * queries, mla.q_rank * queries // tensor)
    compress = arch.hidden * (mla.kv_rank + mla.rope)
    yield Matrix("attention", f"{path}.kv_a_proj_with_mqa", compress, compress)
    norms = mla.kv_rank + (mla.q_rank or 0)
    yield Matrix("norms", f"{path}.kv_a_layernorm", norms, norms, linear=False)
    decompress = mla.kv_rank * arch.heads * (mla.nope + mla.value)
    yield Matrix("attention", f"{path}.kv_b_proj", decompress, decompress // tensor)
    output = arch.heads * mla.value * arch.hidden
    yield Matrix("attention", f"{path}.o_proj", output, output // tensor)
    # So that decoding works on the compressed cache, vLLM keeps an unquantised copy of a quantised kv_b_proj.
    yield Matrix(
        "copies for decoding (MLA)", f"{path}.kv_b_proj", decompress, decompress // tensor, linear=False, stored=False
    )


def _or(numbers: list[int]) -> str:
    return " or ".join(str(n) for n in numbers)
