"""The models of a deployment file: what they refuse, and what they derive."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from serve_app import config, keys
from serve_app.config import CardSettings, GatewaySettings, ModelArgs, Name, RequestLimits, Resources, Source

DEMO = {"demo": "smollm2-135m-instruct"}
SPECS = sorted(config.Spec.__subclasses__(), key=lambda c: c.__name__)
KEY = {"name": "a", "hash": keys.hash_of("a")}
LEAST = {Source: DEMO, ModelArgs: {"source": DEMO}, Name: {"to": "chat"}, keys.Key: KEY, keys.KeysFile: {"keys": [KEY]}}
IDS = [c.__name__ for c in SPECS]


def _args(**more: Any) -> ModelArgs:
    return ModelArgs.model_validate({"source": DEMO, **more})


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
def test_unknown_keys_are_refused(spec: type[BaseModel]) -> None:
    """A misspelt key never passes for a default."""
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        spec.model_validate({"no_such_key": 1})


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
def test_specs_are_frozen(spec: type[BaseModel]) -> None:
    """What was checked is what runs: nobody changes a spec later."""
    instance = spec.model_validate(LEAST.get(spec, {}))
    with pytest.raises(ValidationError, match="frozen"):
        setattr(instance, next(iter(spec.model_fields), "anything"), None)


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
def test_every_field_says_what_it_is(spec: type[BaseModel]) -> None:
    """Descriptions are the reference that a person reads."""
    assert [name for name, f in spec.model_fields.items() if not f.description] == []


@pytest.mark.parametrize("source", [{}, {"hub": "a/b", "path": "/x"}, {"tokenizer": "a/b"}, {**DEMO, "fake": {}}])
def test_a_source_is_exactly_one(source: dict[str, Any]) -> None:
    """Two sources, or none, are refused, with what was found."""
    with pytest.raises(ValidationError, match="exactly one of hub, path, shape, demo; found"):
        Source.model_validate(source)


@pytest.mark.parametrize("hub", ["/models/x", "./x", "a/b/c", "a b", "", "https://a/b"])
def test_a_hub_id_is_not_a_path(hub: str) -> None:
    """vLLM would take a path for a hub id, in whatever folder the replica runs."""
    with pytest.raises(ValidationError):
        Source.model_validate({"hub": hub})


@pytest.mark.parametrize(
    ("spec", "value"),
    [
        (RequestLimits, {"max_waiting": True}),
        (RequestLimits, {"max_waiting": "5"}),
        (RequestLimits, {"max_waiting": 1.5}),
        (RequestLimits, {"wait_s": float("inf")}),
        (RequestLimits, {"wait_s": float("nan")}),
        (GatewaySettings, {"refresh_s": True}),
        (GatewaySettings, {"refresh_s": 5.1}),
        (Resources, {"num_gpus": 2}),
        (Resources, {"custom": {"GPU": 1}}),
        (Resources, {"custom": {"nvme": 0}}),
        (Resources, {"labels": {"rack": "a b"}}),
        (Resources, {"labels": {"rack": "in()"}}),
        (Resources, {"labels": {"-rack": "a"}}),
        (Resources, {"labels": {"rack": 1}}),
        (CardSettings, {"also_known_as": ["a b"]}),
        (CardSettings, {"also_known_as": ["a\n"]}),
        (CardSettings, {"also_known_as": [""]}),
    ],
)
def test_values_that_would_surprise_are_refused(spec: type[BaseModel], value: dict[str, Any]) -> None:
    """No value is clamped, rounded or read as something else."""
    with pytest.raises(ValidationError):
        spec.model_validate(value)


@pytest.mark.parametrize("seqs", [0, -1, True, None, "16", 1.0])
def test_max_num_seqs_must_be_known_before_the_engine_is(seqs: object) -> None:
    """Serve's max_ongoing_requests is computed from it, so it has to be a number."""
    with pytest.raises(ValidationError, match="max_num_seqs must be a whole number"):
        _args(engine={"max_num_seqs": seqs})


def test_slots_are_the_batch_and_the_overcommit() -> None:
    """With and without a max_num_seqs of its own."""
    assert _args().slots == config.DEFAULT_MAX_NUM_SEQS + 8
    assert _args(engine={"max_num_seqs": 16}, overcommit=0).slots == 16


@given(tensor=st.integers(1, 64), pipeline=st.integers(1, 64), gpus=st.sampled_from([0, 0.25, 0.5, 1]))
def test_a_fraction_of_a_gpu_is_for_one_worker(tensor: int, pipeline: int, gpus: float) -> None:
    """Several workers need whole GPUs or none; one worker may have a fraction. Workers are tensor x pipeline."""
    value = {
        "source": DEMO,
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": pipeline,
        "resources": {"num_gpus": gpus},
    }
    if tensor * pipeline > 1 and gpus not in (0, 1):
        with pytest.raises(ValidationError, match="each worker needs 1 GPU or 0"):
            ModelArgs.model_validate(value)
    else:
        assert ModelArgs.model_validate(value).workers == tensor * pipeline


@pytest.mark.parametrize(
    ("pipeline", "gpus", "eager", "refused"),
    [(2, 0, True, True), (2, 0, False, False), (2, 1, True, False), (1, 0, True, False)],
)
def test_stages_on_cpus_must_be_compiled(pipeline: int, gpus: int, eager: bool, refused: bool) -> None:
    """An engine that would start and never answer is refused, with what to do."""
    value = {
        "source": DEMO,
        "engine": {"enforce_eager": eager},
        "pipeline_parallel_size": pipeline,
        "resources": {"num_gpus": gpus},
    }
    if refused:
        with pytest.raises(ValidationError, match="Leave it out, or say"):
            ModelArgs.model_validate(value)
    else:
        ModelArgs.model_validate(value)


@pytest.mark.parametrize("value", ["a", "!a", "in(a,b)", "in(a, b)", "!in(a)", "A100-80G"])
def test_labels_are_rays_selectors(value: str) -> None:
    """What Ray itself takes passes."""
    assert Resources(labels={"ray.io/accelerator-type": value}).labels["ray.io/accelerator-type"] == value


@pytest.mark.parametrize(
    ("resources", "engine", "fills"),
    [
        ({}, {}, None),
        ({"num_gpus": 0}, {}, None),
        ({"num_gpus": 0.4}, {}, 0.36),
        ({"num_gpus": 0.4}, {"gpu_memory_utilization": 0.4}, 0.4),
        ({}, {"gpu_memory_utilization": 0.8}, 0.8),
    ],
)
def test_an_engine_fills_its_share_of_a_gpu(
    resources: dict[str, Any], engine: dict[str, Any], fills: float | None
) -> None:
    """Nine tenths of a fraction unless told otherwise; of a whole GPU what vLLM takes."""
    assert _args(resources=resources, engine=engine).gpu_memory_utilization == fills


def test_an_engine_may_not_take_more_than_its_share() -> None:
    """What Ray gives to another model is not this one's to fill."""
    with pytest.raises(ValidationError, match=r"must be at most 0\.25, which is resources\.num_gpus, is 0\.9"):
        _args(resources={"num_gpus": 0.25}, engine={"gpu_memory_utilization": 0.9})
