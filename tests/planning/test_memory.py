"""Weights, KV cache and working memory, against published sizes and against engines that were started."""

import contextlib
import importlib.util
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.config import ModelArgs
from serve_app.planning import engine_settings
from serve_app.planning.architecture import PlanError, architecture
from serve_app.planning.memory import ReplicaMemory, Sizes, replica_memory, sizes
from serve_app.planning.weights import parameters, pipeline_layers
from tests.planning.configs import (
    CODELLAMA_7B,
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    GEMMA2_9B,
    GPT_OSS_20B,
    LLAMA_8B,
    LLAMA_70B,
    MISTRAL_7B,
    MIXTRAL,
    PHI3_MINI,
    PUBLISHED,
    QWEN2_7B,
    QWEN3_MOE,
    SMOLLM2,
    Config,
)

GIB = 1 << 30
H200 = 150_110_000_000  # bytes, as torch sees one


def args(engine: dict[str, Any] | None = None, *, tensor: int = 1, pipeline: int = 1, **more: Any) -> ModelArgs:
    return ModelArgs.model_validate(
        {
            "source": {"hub": "some/model"},
            "engine": engine or {},
            "tensor_parallel_size": tensor,
            "pipeline_parallel_size": pipeline,
            **more,
        }
    )


def found(config: Config, engine: dict[str, Any] | None = None, **more: Any) -> Sizes:
    return sizes(args(engine, **more), config)


# --- weights


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_count_is_the_published_one(name: str) -> None:
    """Every kind of layer is counted: grouped queries, tied embeddings, experts, shared experts, latent attention."""
    config, published = PUBLISHED[name]
    assert parameters(architecture(config)) == pytest.approx(published, rel=0.002)


@pytest.mark.engine
def test_every_family_is_counted_right_or_refused() -> None:
    """transformers' own implementation of each family, at its default sizes, has as many parameters: never a guess."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as FAMILIES

    compared = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for model_type, classes in FAMILIES.items():
            name = classes if isinstance(classes, str) else classes[0]
            # The defaults of some families are no model.
            with contextlib.suppress(Exception):
                config = transformers.CONFIG_MAPPING[model_type]()
                with torch.device("meta"):
                    model = transformers.AutoModelForCausalLM.from_config(config)
                model.tie_weights()
                count = sum(p.numel() for p in model.parameters())
                compared[model_type] = (
                    {**config.to_dict(), "architectures": [name], "model_type": model_type},
                    count,
                )
    ratios = {}
    for model_type, (config, count) in compared.items():
        with contextlib.suppress(PlanError):
            ratios[model_type] = parameters(architecture(config)) / count
    assert len(ratios) > 30
    assert {k: ratio for k, ratio in ratios.items() if abs(ratio - 1) > 0.01} == {}


def test_tensor_parallel_divides_matrices_and_repeats_what_it_must() -> None:
    """Norms and routers are on every worker; KV heads that are fewer than workers are repeated."""
    one, eight = found(LLAMA_8B), found(LLAMA_8B, tensor=8)
    norms = 65 * 4096 * 2
    assert eight.memory.weights == pytest.approx((one.memory.weights - norms) / 8 + norms, rel=1e-6)
    sixteen = found(LLAMA_8B, tensor=16)
    halved = (eight.memory.weights - norms) / 2 + norms
    assert sixteen.memory.weights - halved == 32 * 2 * 4096 * 128 * 2 / 2  # half a head too many, keys and values


def test_the_vocabulary_is_padded_to_64_rows() -> None:
    """As in vLLM: the embedding has rows that no token has."""
    shares = [m.share for m in found(LLAMA_8B | {"vocab_size": 32001}).fullest if m.module == "model.embed_tokens"]
    assert shares == [32064 * 4096]


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [(32, 2, [16, 16]), (27, 2, [14, 13]), (32, 3, [11, 11, 10]), (61, 4, [15, 15, 16, 15]), (30, 4, [7, 8, 8, 7])],
)
def test_pipeline_stages_get_the_layers_that_vllm_gives_them(layers: int, stages: int, expected: list[int]) -> None:
    """What is left over goes to stages before the last one, whose output layer already weighs more."""
    divided = pipeline_layers(layers, stages)
    assert [len(stage) for stage in divided] == expected
    assert [layer for stage in divided for layer in stage] == list(range(layers))


def test_a_pipeline_counts_its_fullest_stage() -> None:
    """Embedding and output layer are on the first and the last stage, half of the layers on each."""
    memory = found(LLAMA_8B, pipeline=2).memory
    table = 128256 * 4096 * 2
    assert memory.weights == pytest.approx((16.06e9 - 2 * table) / 2 + table, rel=0.001)
    assert memory.kv_per_token == 131072 / 2


def test_latent_attention_keeps_a_copy_of_what_is_quantised() -> None:
    """vLLM decodes with an unquantised kv_b_proj; where it is unquantised already, nothing is copied."""
    assert found(DEEPSEEK_V2_LITE).memory.weights == 2 * 15_706_484_224
    fp8 = DEEPSEEK_V2_LITE | {"quantization_config": {"quant_method": "fp8"}}
    shown = found(fp8)
    copies = [m for m in shown.fullest if not m.stored]
    assert sum(shown.weight_bytes(m) for m in copies) == 2 * 27 * 512 * 16 * 256
    ignored = fp8 | {"quantization_config": {"quant_method": "fp8", "ignored_layers": ["re:.*self_attn.*"]}}
    assert sum(found(ignored).weight_bytes(m) for m in copies) == 0


@pytest.mark.parametrize(
    ("asked", "stored", "element"),
    [
        ("auto", "bfloat16", 2),
        ("auto", "float16", 2),
        ("auto", "float32", 2),
        ("auto", None, 2),
        ("float32", "bfloat16", 4),
    ],
)
def test_float32_checkpoints_run_in_16_bits_unless_asked_otherwise(
    asked: str, stored: str | None, element: int
) -> None:
    """vLLM's ``dtype: auto``."""
    assert found(LLAMA_8B | {"torch_dtype": stored}, {"dtype": asked}).engine.element == element


# --- quantisation

W4 = {"num_bits": 4, "type": "int", "group_size": 128, "strategy": "group", "symmetric": True}
FP8_CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
NVFP4 = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group", "symmetric": True}


@pytest.mark.parametrize(
    ("stored", "bits"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8.002),
        ({"quant_method": "fbgemm_fp8"}, 8),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, 4.156),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": True}, 8.75),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": W4}}}, 4.125),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": FP8_CHANNEL}}}, 8),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": NVFP4}}}, 4.5),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 8),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}}, 4.5),
    ],
)
def test_quantised_layers_take_their_bits_and_embeddings_stay(stored: dict[str, Any], bits: float) -> None:
    """Scales are counted; embedding, output layer and norms keep 16 bits."""
    linear = 8_030_261_248 - 2 * 128256 * 4096 - 65 * 4096
    expected = linear * bits / 8 + 2 * (2 * 128256 * 4096 + 65 * 4096)
    assert found(LLAMA_8B | {"quantization_config": stored}).memory.weights == pytest.approx(expected, rel=1e-3)


def test_modules_that_the_checkpoint_leaves_out_stay_as_they_are() -> None:
    """Exact names, parts of names and regular expressions; ``mlp.gate`` is the router, never ``mlp.gate_proj``."""
    fp8 = {"quant_method": "fp8", "ignored_layers": ["re:.*self_attn.*", "mlp.gate", "model.layers.0.mlp.up_proj"]}
    shown = found(LLAMA_8B | {"quantization_config": fp8})
    sizes_of = {m.module: shown.weight_bytes(m) / m.count for m in shown.fullest}
    assert sizes_of["model.layers.5.self_attn.q_proj"] == 2
    assert sizes_of["model.layers.0.mlp.up_proj"] == 2
    assert sizes_of["model.layers.1.mlp.up_proj"] == sizes_of["model.layers.0.mlp.gate_proj"] == 1


def test_mxfp4_quantises_experts_only() -> None:
    """gpt-oss-20b: about 12.8 GiB, as its files are."""
    assert found(GPT_OSS_20B).memory.weights / GIB == pytest.approx(12.8, rel=0.02)


def test_quantising_while_loading() -> None:
    """``quantization: fp8`` on a 16-bit checkpoint halves its linear layers."""
    assert found(LLAMA_8B, {"quantization": "fp8"}).memory.weights / GIB == pytest.approx(8.46, abs=0.02)


def test_an_unknown_quantisation_is_refused() -> None:
    """Never a guess, and a method without a checkpoint that has it is vLLM's error too."""
    with pytest.raises(PlanError, match="quark"):
        found(LLAMA_8B | {"quantization_config": {"quant_method": "quark"}})
    with pytest.raises(PlanError, match="awq_marlin"):
        found(LLAMA_8B, {"quantization": "awq_marlin"})


# --- the size that the checkpoint tells


def test_the_stored_size_beats_the_count() -> None:
    """Biases and norms that nobody counts are in it; tensor parallelism divides it as it divides the count."""
    counted, stored = found(QWEN2_7B), sizes(args(), QWEN2_7B, stored_bytes=15_231_233_024)
    assert (counted.scale, stored.memory.weights) == (None, 15_231_233_024)
    assert sizes(args(tensor=2), QWEN2_7B, 15_231_233_024).memory.weights > 15_231_233_024 / 2


def test_the_stored_size_is_not_used_where_the_engine_loads_something_else() -> None:
    """Another type, quantising while loading, or layers that only speculative decoding needs."""
    float32 = LLAMA_8B | {"torch_dtype": "float32"}
    assert sizes(args(), float32, 4 * 8_030_261_248).scale is None
    assert sizes(args({"quantization": "fp8"}), LLAMA_8B, 2 * 8_030_261_248).scale is None
    assert sizes(args(), DEEPSEEK_V3, 688_000_000_000).scale is None


def test_a_tied_embedding_that_is_stored_twice_counts_once() -> None:
    """Some files hold lm_head although it is the embedding."""
    table = 49152 * 576 * 2
    assert sizes(args(), SMOLLM2, 2 * 134_515_008 + table).memory.weights == pytest.approx(2 * 134_515_008, rel=1e-4)


def test_a_stored_size_far_from_the_count_is_refused() -> None:
    """Then the config describes another model than this one: a new family that only looks like a known one."""
    with pytest.raises(PlanError, match=r"22\.00 GB, but config\.json describes 16\.06 GB"):
        sizes(args(), LLAMA_8B, 22_000_000_000)


# --- KV cache


@pytest.mark.parametrize(
    ("config", "engine", "tensor", "expected"),
    [
        (LLAMA_8B, {}, 1, 131072),
        (LLAMA_8B, {"kv_cache_dtype": "fp8"}, 1, 65536),
        (LLAMA_8B, {"kv_cache_dtype": "fp8_e5m2"}, 2, 32768),
        (LLAMA_8B, {}, 16, 2 * 32 * 128 * 2),
        (CODELLAMA_7B, {}, 1, 524288),
        (SMOLLM2, {}, 3, 7680),
        (QWEN3_MOE, {}, 1, 98304),
        (DEEPSEEK_V2_LITE, {}, 1, 31104),
        (DEEPSEEK_V2_LITE, {}, 4, 31104),
        (DEEPSEEK_V2_LITE, {"kv_cache_dtype": "fp8"}, 1, 15552),
        (QWEN2_7B, {}, 1, 57344),
    ],
)
def test_bytes_per_token(config: Config, engine: dict[str, Any], tensor: int, expected: int) -> None:
    """Grouped queries, one head per worker at least, latent attention that no worker shares, FP8."""
    assert found(config, engine, tensor=tensor).memory.kv_per_token == expected


@pytest.mark.parametrize(
    "stored",
    [
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
        {"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
    ],
)
def test_a_checkpoint_may_ask_for_an_fp8_cache(stored: dict[str, Any]) -> None:
    """``kv_cache_dtype: auto`` follows it; an explicit type wins."""
    config = LLAMA_8B | {"quantization_config": stored}
    assert found(config).memory.kv_per_token == 65536
    assert found(config, {"kv_cache_dtype": "bfloat16"}).memory.kv_per_token == 131072


def _small(name: str, model_type: str, layers: int, context: int, **more: Any) -> Config:
    return {
        **LLAMA_8B,
        "architectures": [name],
        "model_type": model_type,
        "vocab_size": 49152,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": context,
        "rope_scaling": None,
        **more,
    }


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        (_small("Gemma2ForCausalLM", "gemma2", 7, 8192, sliding_window=512), 49344),
        (_small("Gemma3ForCausalLM", "gemma3_text", 13, 32768, sliding_window=512), 87838),
        (_small("MistralForCausalLM", "mistral", 6, 32768, sliding_window=4096), 228038),
    ],
    ids=["gemma2", "gemma3", "mistral"],
)
def test_sliding_windows_as_vllm_reported_them(config: Config, tokens: int) -> None:
    """``tokens``: what vLLM 0.32 reported for this very shape on the CPU, with 128 MiB of KV cache."""
    memory = found(config, {"kv_cache_memory_bytes": 1 << 27}, resources={"num_gpus": 0}).memory
    assert memory.kv_tokens(24 * GIB) == pytest.approx(tokens, rel=0.002)


def test_windows_can_be_switched_off() -> None:
    """Without the hybrid manager each layer keeps everything; without windows the context shrinks to the window."""
    full = 2 * 42 * 8 * 256 * 2
    assert found(GEMMA2_9B, {"max_num_batched_tokens": 512}).memory.kv_per_token < 0.9 * full
    assert found(GEMMA2_9B, {"disable_hybrid_kv_cache_manager": True}).memory.kv_per_token == full
    off = found(MISTRAL_7B, {"disable_sliding_window": True}).memory
    assert (off.context, off.kv_per_token) == (4096, 131072)


def test_a_window_that_the_file_switches_off_is_none() -> None:
    """Qwen's files carry one with ``use_sliding_window: false``."""
    assert set(architecture(QWEN2_7B).windows) == {None}
    assert set(architecture(QWEN2_7B | {"use_sliding_window": True}).windows) == {131072}


@pytest.mark.parametrize(
    ("engine", "env", "expected"),
    [
        ({"kv_cache_memory_bytes": "2G"}, {}, 2 * GIB),
        ({"num_gpu_blocks_override": 100}, {}, 100 * 128 * 23040),
        ({}, {"VLLM_CPU_KVCACHE_SPACE": "4"}, 4 * GIB),
        ({"kv_cache_memory_bytes": 1 << 28}, {"VLLM_CPU_KVCACHE_SPACE": "4"}, 4 * GIB),
    ],
)
def test_a_cache_of_a_given_size(engine: dict[str, Any], env: dict[str, str], expected: int) -> None:
    """The CPU engine's usual way, and its blocks of 128 tokens; the device's size no longer matters."""
    memory = found(SMOLLM2, engine, resources={"num_gpus": 0}, env=env).memory
    assert memory.kv_bytes == expected
    assert memory.kv_tokens(16 * GIB) == memory.kv_tokens(64 * GIB) == expected // 23040
    assert memory.kv_tokens(1 * GIB) == 0


# --- the engine's settings


@pytest.mark.parametrize(
    ("config", "engine", "context"),
    [
        (LLAMA_8B, {}, 131072),
        (LLAMA_8B, {"max_model_len": "16k"}, 16000),
        (LLAMA_8B, {"max_model_len": "16K"}, 16384),
        (LLAMA_8B, {"max_model_len": "auto"}, 131072),
        (DEEPSEEK_V2_LITE, {}, 163840),
        (PHI3_MINI, {}, 4096),
        (PHI3_MINI, {"max_model_len": 131072}, 131072),
        (CODELLAMA_7B | {"rope_scaling": {"type": "linear", "factor": 2.0}}, {}, 32768),
        (CODELLAMA_7B | {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, {}, 65536),
        (CODELLAMA_7B | {"model_max_length": 8192}, {}, 8192),
        (CODELLAMA_7B, {"hf_overrides": {"max_position_embeddings": 32768}}, 32768),
    ],
)
def test_the_context_is_the_one_that_vllm_derives(config: Config, engine: dict[str, Any], context: int) -> None:
    """From the trained length and the kind of rope scaling, unless max_model_len says less."""
    assert found(config, engine).memory.context == context


def test_a_context_beyond_the_models_own_is_refused() -> None:
    """vLLM would refuse it after the weights were fetched; with its own variable it does not."""
    with pytest.raises(PlanError, match="max_model_len is 20,000, but the model's longest context is 16,384"):
        found(CODELLAMA_7B, {"max_model_len": 20000})
    allowed = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    assert found(CODELLAMA_7B, {"max_model_len": 20000}, env=allowed).memory.context == 20000


@pytest.mark.parametrize(
    ("engine", "tokens"),
    [
        ({}, 2048),
        ({"max_num_batched_tokens": "8K"}, 8192),
        ({"performance_mode": "throughput"}, 4096),
        ({"enable_chunked_prefill": False}, 16384),
        ({"max_num_seqs": 1, "max_model_len": 512}, 512),
    ],
)
def test_tokens_per_step(engine: dict[str, Any], tokens: int) -> None:
    """vLLM's default without a usage context, which is how a replica builds its engine."""
    assert found(CODELLAMA_7B, engine).engine.batch_tokens == tokens


@pytest.mark.parametrize(("gib", "tokens"), [(None, 2048), (24, 2048), (80, 8192), (140, 8192), (180, 16384)])
def test_the_largest_step_grows_with_the_gpu(gib: int | None, tokens: int) -> None:
    """As vLLM has it for API servers. More tokens take more working memory; the CPU engine has no such steps."""
    gpu = None if gib is None else gib << 30
    assert sizes(args(), LLAMA_8B, gpu_bytes=gpu).engine.batch_tokens == tokens
    assert sizes(args({"max_num_batched_tokens": 512}), LLAMA_8B, gpu_bytes=gpu).engine.batch_tokens == 512
    assert sizes(args(resources={"num_gpus": 0}), LLAMA_8B, gpu_bytes=gpu).engine.batch_tokens == 2048


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("config/cache.py", rf"gpu_memory_utilization: float = Field\(default={engine_settings.UTILIZATION}\b"),
        ("config/cache.py", rf"DEFAULT_BLOCK_SIZE: ClassVar\[int\] = {engine_settings._BLOCK}\n"),
        *(
            ("engine/arg_utils.py", rf"device_memory >= {least >> 30} \* GiB_bytes(?s:.{{1,400}})SERVER: {tokens},\n")
            for least, tokens in engine_settings._BATCH_TOKENS[1:]
        ),
        ("engine/arg_utils.py", rf"UsageContext.OPENAI_API_SERVER: {engine_settings._BATCH_TOKENS[0][1]},\n"),
        ("platforms/cpu.py", rf"cache_config\.block_size = {engine_settings._CPU_BLOCK}\n"),
        ("model_executor/layers/vocab_parallel_embedding.py", r"DEFAULT_VOCAB_PADDING_SIZE = 64\n"),
        ("model_executor/layers/attention/mla_attention.py", r"64 \* 1024,\n"),
    ],
)
def test_vllm_still_has_these_defaults(file: str, line: str) -> None:
    """The numbers that the plan takes from vLLM, in the text of the installed release."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs vLLM")
    assert re.search(line, (Path(spec.submodule_search_locations[0]) / file).read_text())


@pytest.mark.parametrize("key", ["speculative_config", "enable_lora", "cpu_offload_gb", "kv_cache_dtype_skip_layers"])
def test_arguments_that_are_not_counted_are_refused_by_name(key: str) -> None:
    """A number without them would be wrong."""
    with pytest.raises(PlanError, match=f"engine.{key} "):
        found(LLAMA_8B, {key: 1})


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype is nvfp4"),
        ({"dtype": "float8"}, "dtype is float8"),
        ({"max_model_len": "long"}, "cannot read"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size"),
    ],
)
def test_values_that_are_not_counted_are_refused(engine: dict[str, Any], words: str) -> None:
    """One line, with what it is about."""
    with pytest.raises(PlanError, match=words):
        found(LLAMA_8B, engine)


@pytest.mark.parametrize(
    ("tensor", "pipeline", "words"),
    [(2, 1, "9 attention heads .* use 1 or 3 or 9"), (1, 31, "30 layers"), (9, 1, None), (3, 1, None)],
)
def test_divisions_that_vllm_refuses(tensor: int, pipeline: int, words: str | None) -> None:
    """Heads must divide evenly, and say which sizes do."""
    if words is None:
        assert found(SMOLLM2, tensor=tensor, pipeline=pipeline).memory.weights
        return
    with pytest.raises(PlanError, match=words):
        found(SMOLLM2, tensor=tensor, pipeline=pipeline)


# --- what is refused


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vision_config": {"hidden_size": 1024}}, "vision_config"),
        ({"text_config": {"hidden_size": 1024}}, "text_config"),
        ({"architectures": ["BertModel"]}, "BertModel is not a decoder-only"),
        ({"architectures": ["WhisperForConditionalGeneration"]}, "not a decoder-only"),
        ({"is_encoder_decoder": True}, "not a decoder-only"),
        ({"mamba_d_state": 128}, "mamba_d_state"),
        ({"layer_types": ["linear_attention"] * 32}, "linear_attention"),
        ({"layer_types": ["full_attention"] * 3}, "32 layers but layer_types for 3"),
        ({"index_topk": 2048}, "sparse"),
        ({"model_type": None}, "no model_type"),
        ({"hidden_size": None}, "no usable hidden_size"),
        ({"hidden_size": "large"}, "no usable hidden_size"),
        ({"hidden_size": True}, "no usable hidden_size"),
        ({"num_hidden_layers": 0}, "no usable num_hidden_layers"),
        ({"head_dim": -128}, "no usable head_dim"),
        ({"num_key_value_heads": 8.0}, "no usable num_key_value_heads"),
        ({"sliding_window": -4096}, "no usable sliding_window"),
        ({"max_position_embeddings": None}, "context length"),
        ({"hidden_act": "gelu", "model_type": "novel"}, "gated"),
        ({"kv_lora_rank": 512, "model_type": "novel"}, "latent attention"),
        ({"n_routed_experts": 8}, "num_experts_per_tok"),
        ({"v_head_dim": 64}, "v_head_dim"),
        ({"rope_scaling": "yarn"}, "cannot read"),
    ],
)
def test_what_is_not_understood_is_refused(change: dict[str, Any], words: str) -> None:
    """One clear line, never a guess."""
    with pytest.raises(PlanError, match=words) as refusal:
        found(LLAMA_8B | change)
    assert "\n" not in str(refusal.value)


_JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 300), st.floats(allow_nan=True), st.text(max_size=6),
    st.lists(st.integers(-2, 9), max_size=4), st.dictionaries(st.text(max_size=6), st.integers(-2, 9), max_size=3),
)  # fmt: skip


@settings(deadline=None)
@given(st.sampled_from([LLAMA_8B, DEEPSEEK_V3, GPT_OSS_20B, GEMMA2_9B]), st.data())
def test_a_broken_config_is_refused_and_never_crashes(config: Config, data: st.DataObject) -> None:
    """Whatever a file holds: sizes, or one line."""
    key = data.draw(st.sampled_from(sorted(config)))
    with contextlib.suppress(PlanError):
        memory = found(config | {key: data.draw(_JUNK)}).memory
        assert memory.weights > 0
        assert memory.kv_tokens(H200) >= 0


# --- against engines that were started


def test_an_engine_on_two_h200() -> None:
    """CodeLlama-7B's shape at tensor parallel 2, vLLM 0.26: 499,568 tokens (gpu-first-light-2026-11-29.txt).

    Its vocabulary was that of the borrowed tokenizer.
    """
    memory = found(
        CODELLAMA_7B | {"vocab_size": 49152}, {"max_model_len": 8192, "enforce_eager": True}, tensor=2
    ).memory
    assert memory.kv_tokens(H200) == pytest.approx(499_568, rel=0.01)
    assert memory.full_sequences(H200) == pytest.approx(60.98, rel=0.01)


# --- rules


CONFIGS = st.sampled_from([LLAMA_8B, LLAMA_70B, CODELLAMA_7B, MIXTRAL, QWEN3_MOE, DEEPSEEK_V2_LITE, GEMMA2_9B])


@settings(deadline=None)
@given(CONFIGS, st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2]))
def test_more_workers_never_need_more(config: Config, tensor: int, pipeline: int) -> None:
    """Twice the tensor parallelism: less weights, not more cache per token, at least as many tokens."""
    less = found(config, tensor=tensor, pipeline=pipeline).memory
    more = found(config, tensor=2 * tensor, pipeline=pipeline).memory
    assert more.weights < less.weights
    assert more.kv_per_token <= less.kv_per_token
    assert more.kv_tokens(H200) >= less.kv_tokens(H200)


@settings(deadline=None)
@given(CONFIGS, st.integers(1024, 8192), st.integers(8, 512))
def test_an_fp8_cache_holds_twice_as_much(config: Config, context: int, seqs: int) -> None:
    """The type of the cache changes nothing else."""
    engine = {"max_model_len": context, "max_num_seqs": seqs}
    wide, narrow = found(config, engine).memory, found(config, engine | {"kv_cache_dtype": "fp8"}).memory
    assert narrow.kv_per_token * 2 == wide.kv_per_token
    assert (narrow.weights, narrow.working) == (wide.weights, wide.working)


@settings(deadline=None)
@given(CONFIGS, st.integers(64, 8192))
def test_the_cache_of_a_sequence_is_whole_blocks(config: Config, context: int) -> None:
    """A context that ends inside a block pays for the block."""
    shown = found(config, {"max_model_len": context})
    assert shown.kv.sequence_bytes % shown.kv.block_bytes == 0
    assert shown.memory.kv_per_token * context == pytest.approx(shown.kv.sequence_bytes)


@settings(deadline=None)
@given(st.floats(0.1, 0.9), st.integers(8 * GIB, 192 * GIB))
def test_tokens_follow_utilization_and_size(utilization: float, gpu_bytes: int) -> None:
    """Never negative; more of a GPU, or a larger one, never holds less."""
    at = found(LLAMA_8B, {"gpu_memory_utilization": utilization}).memory
    more = found(LLAMA_8B, {"gpu_memory_utilization": utilization + 0.05}).memory
    assert 0 <= at.kv_tokens(gpu_bytes) <= more.kv_tokens(gpu_bytes) <= more.kv_tokens(gpu_bytes + GIB)


def test_the_type_says_when_a_model_does_not_fit() -> None:
    """0 tokens without room for the weights; below one sequence vLLM does not start, unless it may shorten it."""
    memory = ReplicaMemory(0.9, 10 * GIB, GIB, 131072.0, 16384, 256)
    assert memory.kv_tokens(12 * GIB) == 0
    assert memory.full_sequences(14 * GIB) == pytest.approx(0.8, rel=1e-3)
    auto = ReplicaMemory(0.9, 10 * GIB, GIB, 131072.0, 16384, 256, shrinks=True)
    assert auto.full_sequences(14 * GIB) == 1.0
    assert auto.full_sequences(12 * GIB) == 0.0


def test_replica_memory_is_what_the_sizes_say() -> None:
    """The short way and the long way agree."""
    assert replica_memory(args(), LLAMA_8B) == found(LLAMA_8B).memory


def test_the_cpu_engine_needs_no_activations_of_a_gpu() -> None:
    """Nothing of CUDA in it, and vLLM's blocks of 128 tokens."""
    shown = found(SMOLLM2, resources={"num_gpus": 0})
    assert list(shown.working) == ["Python and libraries"]
    assert shown.engine.block == 128
