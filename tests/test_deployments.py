"""What the repository ships under deployments/ is right, complete and loadable."""

import importlib.util
import json
import re
import typing
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from serve_app import config, sources
from serve_app.check import check_file
from serve_app.planning.architecture import architecture
from serve_app.planning.weights import parameters

DEPLOYMENTS = Path(__file__).resolve().parent.parent / "deployments"
# What `modelyard check` is for. (cluster-*: tests/test_launcher.py)
FILES = sorted(f for f in DEPLOYMENTS.glob("*.yaml") if not f.name.startswith("cluster-"))
SHAPES = sorted(sources.SHAPES.glob("*.json"))

# Published parameter counts: a wrong size in a shape shows here.
PARAMETERS = {
    "Llama-3.1-8B-Instruct": 8_030_261_248,
    "CodeLlama-7b-Instruct-hf": 6_738_546_688,
    "SmolLM2-135M-Instruct": 134_515_008,
    "Qwen3-30B-A3B": 30_532_122_624,
    "DeepSeek-V2-Lite-Chat": 15_706_484_224,
}


def _load(name: str) -> dict[str, Any]:
    data = yaml.safe_load((DEPLOYMENTS / name).read_text())
    assert isinstance(data, dict)
    return data


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_every_shipped_file_passes_check(file: Path) -> None:
    """A person's first `serve run` of a shipped file cannot fail over its keys (vLLM's are checked below)."""
    assert check_file(file, engine_fields=lambda: None, frontend_fields=lambda: None).faults == ()


@pytest.mark.engine
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_every_shipped_file_passes_check_with_vllm(file: Path) -> None:
    """The engine and frontend keys of the shipped files exist in the installed vLLM, with values of its types."""
    report = check_file(file)
    assert report.faults == ()
    assert "vLLM" not in "".join(report.notes)


# --- example.yaml shows every key


def inner_model(annotation: Any) -> type[BaseModel] | None:
    """The model that an annotation holds, if it holds one."""
    found = [a for a in (annotation, *typing.get_args(annotation)) if isinstance(a, type) and issubclass(a, BaseModel)]
    return found[0] if found else None


def _missing(model: type[BaseModel], shown: list[dict[str, Any]], path: str) -> list[str]:
    """Fields of ``model``, and of the models in it, that none of ``shown`` has."""
    missing = []
    for name, field in model.model_fields.items():
        if name == "fake":  # FakeScript is for tests and load tests: nobody should copy it from an example
            continue
        values = [s[name] for s in shown if name in s]
        if not values:
            missing.append(f"{path}.{name}")
        elif inner := inner_model(field.annotation):
            if typing.get_origin(field.annotation) is dict:  # keys of the user's own
                values = [each for value in values for each in value.values()]
            missing += _missing(inner, values, f"{path}.{name}")
    return missing


def _user_configs(name: str) -> list[dict[str, Any]]:
    overrides = [d for a in _load("example.yaml")["applications"] for d in a.get("deployments", [])]
    return [d["user_config"] for d in overrides if d["name"] == name]


def _shown() -> dict[type[BaseModel], list[dict[str, Any]]]:
    args: dict[str, list[dict[str, Any]]] = {config.MODEL_IMPORT_PATH: [], config.GATEWAY_IMPORT_PATH: []}
    for application in _load("example.yaml")["applications"]:
        args[application["import_path"]].append(application["args"])
    return {
        config.ModelArgs: args[config.MODEL_IMPORT_PATH],
        config.GatewayArgs: args[config.GATEWAY_IMPORT_PATH],
        config.CardSettings: _user_configs(config.CARD_DEPLOYMENT),
        config.GatewaySettings: _user_configs(config.GATEWAY_DEPLOYMENT),
    }


def _reachable(model: type[BaseModel]) -> set[type[BaseModel]]:
    inner = {i for f in model.model_fields.values() if (i := inner_model(f.annotation))}
    return {model}.union(*(_reachable(i) for i in inner))


def test_the_example_shows_every_key() -> None:
    """A new field of any of our models is not finished before the example has it. (FakeScript is exempt.)"""
    assert [m for model, shown in _shown().items() for m in _missing(model, shown, model.__name__)] == []


def test_the_walk_above_reaches_every_model() -> None:
    """A model that no walked one contains would otherwise be left out of the example unseen."""
    reached = set().union(*(_reachable(m) for m in _shown()))
    assert reached == {c for c in config.Spec.__subclasses__() if c.__module__ == config.__name__}


def test_the_example_explains_every_key() -> None:
    """Each of our keys has a comment on a line where it stands."""
    text = (DEPLOYMENTS / "example.yaml").read_text()
    models = set().union(*(_reachable(m) for m in _shown())) - {config.FakeScript}
    fields = {name for m in models for name in m.model_fields} - {"fake"}
    assert [f for f in sorted(fields) if not re.search(rf"^\s*{f}:.*# ", text, re.MULTILINE)] == []


# --- What the shipped files promise


def test_local_says_that_both_names_are_one_checkpoint() -> None:
    """Nobody may take the demo's `codellama` for CodeLlama."""
    text = (DEPLOYMENTS / "local.yaml").read_text()
    assert "same small checkpoint" in text.split("applications:")[0]
    local = _load("local.yaml")
    assert local["http_options"]["host"] == "127.0.0.1"
    models = [a for a in local["applications"] if a["import_path"] == config.MODEL_IMPORT_PATH]
    assert {a["name"]: a["args"]["source"] for a in models} == {
        "chat": {"demo": "smollm2-135m-instruct"},
        "codellama": {"demo": "smollm2-135m-instruct"},
    }


def test_the_dummy_fleet_is_the_fleet() -> None:
    """gpu-dummy.yaml differs from gpu.yaml in the models' sources alone, so what it shows of placement is true."""

    def without_sources(name: str) -> list[dict[str, Any]]:
        applications: list[dict[str, Any]] = _load(name)["applications"]
        for application in applications:
            application.get("args", {}).pop("source", None)
        return applications

    assert without_sources("gpu-dummy.yaml") == without_sources("gpu.yaml")


# --- shapes/


@pytest.mark.parametrize("shape", SHAPES, ids=lambda f: f.stem)
def test_a_shape_has_the_size_of_its_model(shape: Path) -> None:
    """The sizes in the file give the published number of parameters, up to a few norms."""
    counted = parameters(architecture(sources.read_shape(shape)))
    assert counted == pytest.approx(PARAMETERS[shape.stem], rel=1e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda f: f.stem)
def test_a_shape_loads_as_a_config(shape: Path, tmp_path: Path) -> None:
    """vLLM reads a shape through AutoConfig: it loads from a folder, with nothing lost."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
        (tmp_path / "config.json").write_bytes(shape.read_bytes())
        loaded = transformers.AutoConfig.from_pretrained(tmp_path)
    written = json.loads(shape.read_text())
    assert loaded.model_type == written["model_type"]
    assert type(loaded).__name__ != "PreTrainedConfig"
    for key in ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings", "eos_token_id"):
        assert getattr(loaded, key) == written[key]


def test_each_shape_names_its_source() -> None:
    """Numbers without an origin cannot be checked by anyone."""
    readme = (sources.SHAPES / "README.md").read_text()
    rows = {s.stem: next((r for r in readme.splitlines() if f"`{s.name}`" in r), "") for s in SHAPES}
    assert rows.keys() == PARAMETERS.keys()
    assert [name for name, row in rows.items() if "https://" not in row] == []
