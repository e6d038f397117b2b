"""What a language model consists of, read from its ``config.json``. Pure.

The keys are those of transformers' configurations, older and newer spellings. There is no table of models: a model is
known by what its file says. Whatever the file says that is not understood here is refused with ``PlanError``, because
a wrong size is worse than none.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class PlanError(ValueError):
    """A plan that cannot be made, in one line for the person who asked for it."""


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (MLA): the cache holds one compressed vector per token, the same for every head.

    ``kv_rank`` and ``rope``: its two parts. ``q_rank``: None where queries are not compressed. ``nope`` and ``rope``:
    the two parts of a head's query and key; ``value``: a head's value. All are numbers of elements.
    """

    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts. ``width``: intermediate size of one expert; ``shared``: of the experts that every token
    passes, together. ``layers``: which layers have experts instead of one MLP."""

    count: int
    per_token: int
    width: int
    shared: int
    layers: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder-only transformer. Sizes are numbers of elements, lengths are tokens.

    ``matrices``: weight matrices of one MLP or expert, 3 where its activation is gated, else 2. ``windows``: for each
    layer the tokens that its attention looks back, None for all. ``context``: the longest sequence unless more is asked
    for; ``longest``: what may be asked for. ``dtype``: that of the checkpoint, None where the file does not say.
    ``extra_layers``: the checkpoint holds layers that only speculative decoding loads.
    """

    model_type: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    matrices: int
    vocab: int
    tied: bool
    latent: LatentAttention | None
    experts: Experts | None
    windows: tuple[int | None, ...]
    context: int
    longest: int
    dtype: str | None
    extra_layers: bool

    @property
    def layers(self) -> int:
        return len(self.windows)


# What memory depends on and is not counted here; each pattern is looked for in the names of the file's keys.
_NOT_COUNTED = {
    "layers with a state (Mamba, linear attention, convolution)": (
        *("mamba", "ssm", "linear_attn", "linear_num", "state_size", "conv_", "rwkv", "lru_", "hybrid_", "time_mix"),
        *("layers_block_type", "attn_layer_", "full_attn_", "recurrent"),
    ),
    "sparse or compressed attention": ("index_topk", "compress_ratio", "block_sparse", "sparse_attention"),
    "layers that differ in size or share caches": (
        *("block_configs", "altup", "laurel", "per_layer_input", "kv_shared_layers", "cross_attention", "_per_layer"),
        *("zero_expert", "layer_enum", "_cycles", "num_loops", "total_ut_steps", "global_head_dim", "kv_channels"),
    ),
}
# Gated although their activation is no SiLU, and not gated at all.
_GATED_GELU = ("gemma", "gemma2", "gemma3_text")
_NOT_GATED = ("gpt_neox", "phi", "starcoder2", "nemotron", "arcee", "apertus", "persimmon")
# Files of these families may leave tie_word_embeddings out where it is true.
_TIED = ("gemma", "gemma2", "gemma3_text", "cohere", "cohere2", "starcoder2", "smollm3")
# Those of the families with kv_lora_rank whose cache vLLM keeps compressed.
_LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "pangu_ultra_moe", "axk1")
_CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)


def architecture(config: Mapping[str, Any]) -> Architecture:
    """The architecture that ``config``, a checkpoint's ``config.json``, describes.

    PlanError: it is not a decoder-only language model whose layers are all understood here, or a size is missing.
    """
    model_type = str(config.get("model_type") or "")
    _refuse(config, model_type)
    layers, heads = _size(config, "num_hidden_layers"), _size(config, "num_attention_heads")
    hidden = _size(config, "hidden_size")
    latent, experts = _latent(config, model_type), _experts(config, layers)
    only_experts = experts is not None and all(experts.layers)
    dtype = config.get("dtype") or config.get("torch_dtype")
    context, longest = _context(config, model_type)
    head_dim = _size_if_given(config, "head_dim") or hidden // heads
    kv_heads = _size_if_given(config, "num_key_value_heads", "num_kv_heads") or heads
    if head_dim < 1 or heads % kv_heads:
        raise PlanError(f"{heads} heads of {head_dim} for {kv_heads} heads of keys and values make no attention")
    return Architecture(
        model_type=model_type,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        width=0 if only_experts else _size(config, "intermediate_size"),
        matrices=_matrices(config, model_type),
        vocab=_size(config, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", model_type in _TIED)),
        latent=latent,
        experts=experts,
        windows=_windows(config, model_type, layers),
        context=context,
        longest=longest,
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        extra_layers=bool(config.get("num_nextn_predict_layers")),
    )


def _refuse(config: Mapping[str, Any], model_type: str) -> None:
    """PlanError: ``config`` has parts that are not counted here."""
    if not model_type:
        raise PlanError("its config.json has no model_type")
    names = config.get("architectures") or []
    name = str(names[0]) if names else model_type
    parts = [key for key, part in config.items() if key.endswith("_config") and isinstance(part, Mapping)]
    if nested := [key for key in parts if key not in ("quantization_config", "compression_config")]:
        raise PlanError(f"{name} has parts of their own ({', '.join(nested)}); plan counts language models only")
    if not name.endswith(("ForCausalLM", "LMHeadModel")) or config.get("is_encoder_decoder"):
        raise PlanError(f"{name} is not a decoder-only language model; plan cannot count it")
    for what, patterns in _NOT_COUNTED.items():
        for key, value in config.items():
            if value not in (None, False, 0, [], {}) and any(pattern in key for pattern in patterns):
                raise PlanError(f"{name} has {what} ({key}); plan cannot count it")


def _size(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise PlanError(f"config.json gives no usable {key} (found {value!r}); plan cannot count this model")
    return value


def _size_if_given(config: Mapping[str, Any], *keys: str) -> int | None:
    """The size that the first of ``keys`` with a value gives: null and 0 say that there is none."""
    key = _first(config, *keys)
    return None if key is None else _size(config, key)


def _matrices(config: Mapping[str, Any], model_type: str) -> int:
    act = str(config.get("hidden_act") or config.get("hidden_activation") or config.get("activation_function") or "")
    if model_type in _NOT_GATED:
        return 2
    if act.lower() in ("silu", "swish", "swiglu", "swigluoai") or model_type in _GATED_GELU:
        return 3
    raise PlanError(f"whether the MLP of a {model_type} model with activation {act or 'unknown'} is gated is not known")


def _latent(config: Mapping[str, Any], model_type: str) -> LatentAttention | None:
    if config.get("kv_lora_rank") is None:
        if config.get("v_head_dim"):
            raise PlanError(f"the keys and values of a {model_type} model differ in size (v_head_dim)")
        return None
    if model_type not in _LATENT:
        raise PlanError(f"how a {model_type} model caches its latent attention (kv_lora_rank) is not known")
    return LatentAttention(
        q_rank=_size_if_given(config, "q_lora_rank"),
        kv_rank=_size(config, "kv_lora_rank"),
        nope=_size(config, "qk_nope_head_dim"),
        rope=_size(config, "qk_rope_head_dim"),
        value=_size(config, "v_head_dim"),
    )


def _experts(config: Mapping[str, Any], layers: int) -> Experts | None:
    key = _first(config, "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    if key is None or config.get("is_moe") is False:
        return None
    per_token = _first(config, "num_experts_per_tok", "moe_k", "moe_topk")
    if per_token is None:
        raise PlanError(f"config.json gives {key} but no num_experts_per_tok; plan cannot count this model")
    width = _size(config, _first(config, "moe_intermediate_size", "intermediate_size") or "moe_intermediate_size")
    shared = _size_if_given(config, "shared_expert_intermediate_size", "shared_intermediate_size")
    number = _size_if_given(config, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    return Experts(
        count=_size(config, key),
        per_token=_size(config, per_token),
        width=width,
        shared=shared or width * (number or 0),
        layers=_expert_layers(config, layers),
    )


def _expert_layers(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Which layers have experts: each family has its own way to say it."""
    if kinds := config.get("mlp_layer_types"):
        return tuple(kinds[i] != "dense" for i in range(layers))
    first = _size_if_given(config, "moe_layer_start_index", "first_k_dense_replace", "num_dense_layers") or 0
    last = config.get("moe_layer_end_index")
    last = layers - 1 if last in (None, -1) else int(last)
    every = _size_if_given(config, "moe_layer_freq", "moe_layer_interval") or 1
    step = _size_if_given(config, "decoder_sparse_step") or 1
    dense = config.get("mlp_only_layers") or []
    return tuple(
        first <= i <= last and i % every == 0 and (i + 1) % step == 0 and i not in dense for i in range(layers)
    )


def _first(config: Mapping[str, Any], *keys: str) -> str | None:
    """The first of ``keys`` that ``config`` gives a value."""
    return next((key for key in keys if config.get(key)), None)


def _windows(config: Mapping[str, Any], model_type: str, layers: int) -> tuple[int | None, ...]:
    """How far each layer looks back. As in vLLM, a window without ``layer_types`` holds for all layers."""
    # Qwen's files carry a window that is not used unless they say so.
    used = config.get("use_sliding_window", not model_type.startswith("qwen"))
    window = _size_if_given(config, "sliding_window") if used else None
    kinds = config.get("layer_types") or _kinds(config, model_type, layers)
    if unknown := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
        raise PlanError(f"its layers of type {', '.join(unknown)} are not counted by plan")
    if kinds and len(kinds) != layers:
        raise PlanError(f"config.json has {layers} layers but layer_types for {len(kinds)}")
    if window is None:
        return (None,) * layers
    if len(set(kinds)) < 2:
        return (window,) * layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _kinds(config: Mapping[str, Any], model_type: str, layers: int) -> list[str]:
    """``layer_types`` of a file that was written before the key existed; empty where all layers are alike."""
    every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern")
    if every is None:
        # transformers' own defaults for these families.
        every = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2}.get(model_type)
    if isinstance(every, str):  # "LLLG": local, local, local, global
        return ["sliding_attention" if every[i % len(every)] == "L" else "full_attention" for i in range(layers)]
    if every is None:
        return []
    return ["sliding_attention" if (i + 1) % int(every) else "full_attention" for i in range(layers)]


def _context(config: Mapping[str, Any], model_type: str) -> tuple[int, int]:
    """The longest sequence that vLLM allows by itself, and when asked: the trained length and what scaling adds."""
    lengths = [config[key] for key in _CONTEXT_KEYS if config.get(key)]
    length = float(config.get("model_max_length") or min(lengths, default=0))
    if length < 1:
        raise PlanError("config.json gives no max_position_embeddings; plan cannot tell the model's context length")
    scalings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not any(key in scalings for key in ("rope_type", "type", "rope_theta")):  # one per type of layer
        each = [scaling for scaling in scalings.values() if isinstance(scaling, Mapping)]
    else:
        each = [scalings]
    factor, kinds = 1.0, []
    for scaling in each:
        kinds.append(scaling.get("rope_type") or scaling.get("type") or "default")
        # The lengths of these already include what scaling adds.
        if kinds[-1] in ("su", "longrope", "llama3") or model_type.startswith("gemma3"):
            continue
        factor = float(scaling.get("factor") or factor)
        if kinds[-1] == "yarn":
            length = float(scaling.get("original_max_position_embeddings") or length)
    longest = int(length * factor)
    # Long sequences make short ones worse with this kind, so they are on only when asked for.
    context = config.get("original_max_position_embeddings") if "longrope" in kinds else None
    return int(context or longest), longest
