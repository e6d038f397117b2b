"""Public models' ``config.json``, cut down to what their size depends on, with their published parameter counts."""

from typing import Any

Config = dict[str, Any]

_SILU = {"hidden_act": "silu", "torch_dtype": "bfloat16"}


def _model(name: str, model_type: str, sizes: tuple[int, int, int, int, int, int], **more: Any) -> Config:
    """``sizes``: hidden, intermediate, layers, heads, KV heads, vocabulary."""
    hidden, width, layers, heads, kv_heads, vocab = sizes
    return {
        "architectures": [name],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        **_SILU,
        **more,
    }


LLAMA_8B = _model(
    "LlamaForCausalLM",
    "llama",
    (4096, 14336, 32, 32, 8, 128256),
    max_position_embeddings=131072,
    rope_scaling={"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
)
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
CODELLAMA_7B = _model("LlamaForCausalLM", "llama", (4096, 11008, 32, 32, 32, 32016), max_position_embeddings=16384)
SMOLLM2 = _model(
    "LlamaForCausalLM",
    "llama",
    (576, 1536, 30, 9, 3, 49152),
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)
MISTRAL_7B = _model("MistralForCausalLM", "mistral", (4096, 14336, 32, 32, 8, 32000), sliding_window=4096)
MIXTRAL = _model(
    "MixtralForCausalLM",
    "mixtral",
    (4096, 14336, 32, 32, 8, 32000),
    num_local_experts=8,
    num_experts_per_tok=2,
    sliding_window=None,
)
QWEN2_7B = _model(
    "Qwen2ForCausalLM",
    "qwen2",
    (3584, 18944, 28, 28, 4, 152064),
    sliding_window=131072,
    use_sliding_window=False,
    max_window_layers=28,
)
QWEN3_MOE = _model(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    (2048, 6144, 48, 32, 4, 151936),
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    decoder_sparse_step=1,
    mlp_only_layers=[],
    max_position_embeddings=40960,
)
GEMMA2_9B = _model(
    "Gemma2ForCausalLM",
    "gemma2",
    (3584, 14336, 42, 16, 8, 256000),
    head_dim=256,
    hidden_act="gelu_pytorch_tanh",
    sliding_window=4096,
    max_position_embeddings=8192,
)
del GEMMA2_9B["tie_word_embeddings"]  # as in its file: the family's default is true
PHI3_MINI = _model(
    "Phi3ForCausalLM",
    "phi3",
    (3072, 8192, 32, 32, 32, 32064),
    max_position_embeddings=131072,
    original_max_position_embeddings=4096,
    rope_scaling={"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
)
STARCODER2_3B = _model(
    "Starcoder2ForCausalLM", "starcoder2", (3072, 12288, 30, 24, 2, 49152), hidden_act="gelu_pytorch_tanh"
)
del STARCODER2_3B["tie_word_embeddings"]
DEEPSEEK_V2_LITE = _model(
    "DeepseekV2ForCausalLM",
    "deepseek_v2",
    (2048, 10944, 27, 16, 16, 102400),
    q_lora_rank=None,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_routed_experts=64,
    n_shared_experts=2,
    num_experts_per_tok=6,
    moe_intermediate_size=1408,
    first_k_dense_replace=1,
    moe_layer_freq=1,
    max_position_embeddings=163840,
    rope_scaling={"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
)
DEEPSEEK_V3 = DEEPSEEK_V2_LITE | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "vocab_size": 129280,
    "q_lora_rank": 1536,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
GPT_OSS_20B = _model(
    "GptOssForCausalLM",
    "gpt_oss",
    (2880, 2880, 24, 64, 8, 201088),
    head_dim=64,
    num_local_experts=32,
    num_experts_per_tok=4,
    sliding_window=128,
    layer_types=["sliding_attention", "full_attention"] * 12,
    max_position_embeddings=131072,
    quantization_config={
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    },
)

# Published counts, from the model cards and from the files themselves.
PUBLISHED: dict[str, tuple[Config, int]] = {
    "Llama-3.1-8B": (LLAMA_8B, 8_030_261_248),
    "Llama-3.1-70B": (LLAMA_70B, 70_553_706_496),
    "CodeLlama-7b": (CODELLAMA_7B, 6_738_546_688),
    "SmolLM2-135M": (SMOLLM2, 134_515_008),
    "Mistral-7B": (MISTRAL_7B, 7_241_732_096),
    "Mixtral-8x7B": (MIXTRAL, 46_702_792_704),
    "Qwen2.5-7B": (QWEN2_7B, 7_615_616_512),
    "Qwen3-30B-A3B": (QWEN3_MOE, 30_532_122_624),
    "Gemma-2-9B": (GEMMA2_9B, 9_241_705_984),
    "Phi-3-mini": (PHI3_MINI, 3_821_079_552),
    "StarCoder2-3B": (STARCODER2_3B, 3_030_371_328),
    "DeepSeek-V2-Lite": (DEEPSEEK_V2_LITE, 15_706_484_224),
    "DeepSeek-V3": (DEEPSEEK_V3, 671_026_419_200),
    "gpt-oss-20b": (GPT_OSS_20B, 20_914_757_184),
}
