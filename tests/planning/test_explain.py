"""What a person reads who wants to learn where the memory goes: the formulas, with numbers that add up."""

import io
from typing import Any

import pytest
from rich.console import Console

from serve_app.config import ModelArgs
from serve_app.planning.architecture import PlanError
from serve_app.planning.checkpoint import Checkpoint
from serve_app.planning.explain import explain
from tests.planning.configs import DEEPSEEK_V2_LITE, GEMMA2_9B, LLAMA_8B, QWEN3_MOE, SMOLLM2, Config

GIB = 1 << 30


def shown(
    config: Config, engine: dict[str, Any] | None = None, gib: float = 80, stored: int | None = None, **more: Any
) -> str:
    """The explanation as text, white space made single."""
    args = ModelArgs.model_validate({"source": {"hub": "some/model"}, "engine": engine or {}, **more})
    console = Console(file=io.StringIO(), width=200)
    console.print(explain("chat", args, Checkpoint(config, "a test", stored), int(gib * GIB)))
    assert isinstance(console.file, io.StringIO)
    return " ".join(console.file.getvalue().split())


def test_grouped_queries() -> None:
    """The formula of the KV cache with this model's own numbers, down to the sequences that fit."""
    text = shown(LLAMA_8B, {"max_model_len": 16384})
    for part in (
        "chat: 8.03e9 parameters, 32 layers, bfloat16",
        "config.json from a test",
        "per token = 2 (keys and values) × 32 layers × 8 KV heads × 128 (head size) × 2 bytes (bfloat16) = 131,072",
        "Each KV head serves 4 of the 32 query heads (GQA).",
        "one sequence of 16,384 tokens (its longest) = 1,024 blocks of 2,097,152 bytes (16 tokens) = 2.00 GiB",
        "for the engine = 80.00 GiB × 0.92 (gpu_memory_utilization) = 73.60 GiB",
        "KV cache = 73.60 GiB − 14.96 GiB weights −",
        "sequences of 16,384 tokens at once",
        "256 sequences (max_num_seqs) at once while they have at most",
    ):
        assert part in text
    assert "Counted from config.json" in text


def test_the_stored_size_is_said_to_have_been_used() -> None:
    """Which of the two it was is part of the answer."""
    assert "The checkpoint says how large its weights are" in shown(LLAMA_8B, stored=16_060_522_496)


def test_tensor_parallel() -> None:
    """What is divided, and what is repeated."""
    assert "× 4 KV heads of 8 (tensor parallel 2) ×" in shown(LLAMA_8B, tensor_parallel_size=2)
    text = shown(QWEN3_MOE, tensor_parallel_size=8)
    assert "× 1 KV head of 4 (tensor parallel 8) ×" in text
    assert "2 workers each keep a copy of one head" in text
    assert "one of 8 workers" in text


def test_pipeline_parallel() -> None:
    """The layers of one stage."""
    assert "× 16 layers of 32 (one of 2 stages) ×" in shown(LLAMA_8B, pipeline_parallel_size=2)


def test_latent_attention_and_experts() -> None:
    """MLA's cache is not divided; its weights have parts of their own."""
    text = shown(DEEPSEEK_V2_LITE, {"kv_cache_dtype": "fp8"}, tensor_parallel_size=2)
    assert "27 layers × (512 + 64) (compressed keys and values, kept whole by every worker) × 1 byte (fp8)" in text
    for part in ("64 experts", "shared experts", "routers"):
        assert part in text
    assert "copies for decoding (MLA)" not in text
    assert "copies for decoding (MLA)" in shown(DEEPSEEK_V2_LITE | {"quantization_config": {"quant_method": "fp8"}})


def test_windows() -> None:
    """Why a hybrid model holds more tokens than its layers suggest."""
    text = shown(GEMMA2_9B, {"max_num_batched_tokens": 512})
    assert (
        "21 layers look back 4,096 tokens: they hold at most 321 blocks of a sequence, where others hold 512." in text
    )
    assert "so a token of such a sequence takes" in text


def test_quantised_weights() -> None:
    """Bits per weight in the head line, bytes per part in the table."""
    text = shown(LLAMA_8B | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}})
    assert "gptq, 4.16 bits per quantised weight" in text


@pytest.mark.parametrize(
    ("engine", "gib", "words"),
    [
        ({}, 8, "The model does not fit"),
        ({}, 24, "vLLM refuses to start: not one sequence of 131,072 tokens fits. Set max_model_len to at most"),
        ({"max_model_len": "auto"}, 24, "vLLM shortens the context to about"),
        (
            {"kv_cache_memory_bytes": GIB, "max_model_len": 4096},
            24,
            "KV cache = 1.00 GiB, as the engine's",
        ),
        ({"kv_cache_memory_bytes": GIB, "max_model_len": 4096}, 14, "The model does not fit"),
    ],
)
def test_what_does_not_fit_says_what_to_do(engine: dict[str, Any], gib: float, words: str) -> None:
    """The three ways in which it ends, and a cache of a given size."""
    assert words in shown(LLAMA_8B, engine, gib)


def test_the_cpu_engine() -> None:
    """A node's memory instead of a GPU's."""
    text = shown(SMOLLM2, {"kv_cache_memory_bytes": 1 << 28}, 16, resources={"num_gpus": 0})
    assert "On a node of 16.00 GiB" in text
    assert "KV tokens = 0.25 GiB / 23,040 bytes = 11,650" in text


def test_names_are_not_markup() -> None:
    """What comes from files is shown as it is."""
    args = ModelArgs.model_validate({"source": {"hub": "some/model"}})
    console = Console(file=io.StringIO(), width=200)
    console.print(explain("[red]x", args, Checkpoint(LLAMA_8B, "[bold]there"), 80 * GIB))
    assert isinstance(console.file, io.StringIO)
    assert "[red]x" in console.file.getvalue()
    assert "[bold]there" in console.file.getvalue()


def test_what_cannot_be_counted_is_an_error() -> None:
    """The same one line as the plan's."""
    with pytest.raises(PlanError):
        shown({**LLAMA_8B, "vision_config": {"depth": 3}})
