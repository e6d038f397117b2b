"""How the vLLM adapter words a refusal; needs no vLLM."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serve_app import errors
from serve_app.config import ModelArgs
from serve_app.model import engine
from serve_app.model.engine_protocol import ASKED_MODEL, Adapter


def test_faults_are_those_of_the_branch_that_was_meant() -> None:
    """A union's other branches do not speak, and no class name is shown."""
    where = ("body", "messages", 0)
    faults = [
        {"type": "literal_error", "loc": (*where, "SystemParam", "role"), "msg": "Input should be 'system'"},
        {"type": "string_type", "loc": (*where, "SystemParam", "content"), "msg": "should be a text"},
        {"type": "missing", "loc": (*where, "HarmonyMessage", "author"), "msg": "Field required"},
        {"type": "string_type", "loc": (*where, "UserParam", "content", "str"), "msg": "should be text"},
    ]
    error = errors.invalid_body(engine._meant(faults))
    assert (error.param, error.message) == ("messages.0.content", "messages.0.content: should be text")


def test_faults_stay_where_no_branch_was_meant() -> None:
    """A constant that fits no branch is still a fault."""
    fault = {"type": "literal_error", "loc": ("body", "input", "Item", "type"), "msg": "Input should be 'message'"}
    assert errors.invalid_body(engine._meant([fault])).param == "input.type"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("Call to add_lora method failed: LoRA rank 32 is greater than 16.", "LoRA rank 32 is greater than 16"),
        (
            "Call to add_lora method failed: Worker failed with error '/a/left doesn't contain tensors\nat /x/y.py', "
            "please check the stack trace above for the root cause",
            "its folder doesn't contain tensors",
        ),
        ("", "Exception"),
    ],
)
def test_what_is_wrong_with_an_adapter_is_told_without_its_path(said: str, told: str) -> None:
    """vLLM's own words, unwrapped: one line, no file."""
    assert engine._cause(Exception(said), Adapter("left", "/a/left")).rstrip(".") == told


class Llm:
    """As much of ``AsyncLLM`` as is asked before an adapter is loaded."""

    def __init__(self, lora: Any, device: str = "cuda") -> None:
        self.vllm_config = SimpleNamespace(lora_config=lora, device_config=SimpleNamespace(device_type=device))


def an_engine(llm: Llm) -> engine.VllmEngine:
    made = engine.VllmEngine(ModelArgs.model_validate({"source": {"demo": "smollm2-135m-instruct"}}), "chat")
    made._llm = llm
    made._app = SimpleNamespace(state=SimpleNamespace(openai_serving_models=SimpleNamespace(lora_requests={})))
    return made


async def test_an_engine_without_adapters_says_so(tmp_path: Path) -> None:
    """400 for its clients, with what the operator has to set."""
    with pytest.raises(errors.AdapterUnusable, match="enable_lora"):
        await an_engine(Llm(None))._load_adapter(Adapter("left", str(tmp_path)))


def test_how_many_adapters_an_engine_keeps() -> None:
    """What its memory holds; on the CPU one less than its places, because the last must stay empty."""
    lora = SimpleNamespace(max_loras=3, max_cpu_loras=8)
    assert [an_engine(Llm(lora, device))._adapter_room for device in ("cuda", "cpu")] == [8, 2]


class Registry:
    """vLLM's registry of base models, and what delegates to it as its served models do."""

    def is_base_model(self, name: str) -> bool:
        return name == "chat"

    def model_name(self, lora_request: Any = None) -> str:
        return "chat"


def test_the_asked_id_is_accepted_and_an_unknown_one_is_not() -> None:
    """Where one object asks the other, both of which are replaced, neither asks itself for ever."""
    registry = Registry()
    models = SimpleNamespace(registry=registry, model_name=registry.model_name)
    models.is_base_model = lambda name: models.registry.is_base_model(name)
    engine._answer_to_any_name(models)
    token = ASKED_MODEL.set("asked")
    try:
        assert [models.is_base_model(name) for name in ("asked", "chat", "other")] == [True, True, False]
        assert models.model_name() == "asked"
    finally:
        ASKED_MODEL.reset(token)
