"""The memory of an engine that is neither weights nor KV cache. Pure; an estimate, with constants that were measured.

vLLM runs its largest step once, on made-up input, before it sizes the KV cache. What that step takes at its peak is
what stays free for steps afterwards. The constants below are those of vLLM 0.26 on an H200: docs/planning.md.
"""

from serve_app.planning.architecture import Architecture
from serve_app.planning.engine_settings import EngineSettings

_MIB = 1 << 20
# Kernels that CUDA loads during that step, and buffers of its libraries.
_LIBRARIES = 256 * _MIB
# Python and torch in a worker of the CPU engine.
_CPU_PROCESS = 1024 * _MIB
# What vLLM sets aside for CUDA graphs. The newer of its two model runners sets nothing aside in 0.26.
_GRAPHS = 640 * _MIB
# The older runner samples in that step too: bytes per logit, for float32 copies, sorted ones and their positions.
_SAMPLED_LOGIT = 24
# The mixtures of experts that vLLM 0.26 runs on its newer runner, where it runs all models without experts.
_NEWER_RUNNER = ("deepseek_v2", "granitemoe", "longcat_flash_ngram", "qwen2_moe")
# Latent attention decompresses at most so many tokens of the cache at once.
_DECOMPRESSED = 64 * 1024


def working_memory(arch: Architecture, engine: EngineSettings) -> dict[str, int]:
    """Bytes on one worker, by what they are for."""
    if engine.cpu:
        return {"Python and libraries": _CPU_PROCESS}
    older = arch.experts is not None and arch.model_type not in _NEWER_RUNNER
    tokens, rows = engine.batch_tokens, min(engine.seqs, engine.batch_tokens)
    hidden = tokens * arch.hidden * engine.element
    # Into a layer and out of it, and the widest of what lies between. What latent attention decompresses stays.
    between = sum if arch.latent is not None else max
    layers = 2 * hidden + between((_mlp(arch, engine), _attention(arch, engine)))
    per_logit = engine.element * (1 if engine.tensor == 1 else 2) + (_SAMPLED_LOGIT if older else 0)
    logits = hidden + rows * arch.vocab * per_logit
    # The logits are made after the layers, in the memory that those have left.
    if layers > logits:
        found = {f"activations of {tokens:,} tokens": layers}
    else:
        found = {f"logits of {rows:,} sequences": logits}
    found["kernels and libraries"] = _LIBRARIES
    if older and not engine.eager:
        found["CUDA graphs"] = _GRAPHS
    return found


def _mlp(arch: Architecture, engine: EngineSettings) -> int:
    """Bytes between the matrices of an MLP, or of the experts that each token goes to."""
    widest = arch.matrices * arch.width // engine.tensor
    if arch.experts is not None:
        width = arch.experts.width // engine.tensor
        routed = max(width, arch.hidden) + max((arch.matrices - 1) * width, arch.hidden)
        widest = max(widest, arch.experts.per_token * routed)
    return engine.batch_tokens * widest * engine.element


def _attention(arch: Architecture, engine: EngineSettings) -> int:
    """Bytes of queries, keys and values; of latent attention, of what is decompressed from the cache."""
    heads = arch.heads // engine.tensor
    if arch.latent is None:
        width = (2 * heads + 2 * max(1, arch.kv_heads // engine.tensor)) * arch.head_dim
        return engine.batch_tokens * width * engine.element
    tokens = min(max(8 * engine.context, 4 * engine.seqs * engine.block), _DECOMPRESSED)
    tokens = max(tokens, engine.seqs * engine.block)
    return tokens * heads * (arch.latent.nope + arch.latent.value) * engine.element
