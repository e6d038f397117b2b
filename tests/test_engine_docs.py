"""docs/engine.md and docs/coming-from.md: their lines work, their keys exist, their tables are of the raw values."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from ray.serve.schema import DeploymentSchema, HTTPOptionsSchema

from loadtest.powers import report
from loadtest.powers.rows import ROWS
from serve_app.check import check_config
from serve_app.config import CardSettings, GatewaySettings, ModelArgs
from serve_app.model import engine_args
from tests.test_check import needs_vllm
from tests.test_deployments import inner_model

DOCS = Path(__file__).resolve().parent.parent / "docs"
ENGINE, COMING_FROM = ((DOCS / name).read_text() for name in ("engine.md", "coming-from.md"))
LINES = re.findall(r"```yaml\n(.*?)```", ENGINE, re.DOTALL)
# What a key of coming-from.md begins with, and what has it.
OWNERS: dict[str, type[BaseModel]] = {
    "args": ModelArgs,
    "Card": CardSettings,
    "Gateway": GatewaySettings,
    "Model": DeploymentSchema,
    "http_options": HTTPOptionsSchema,
}


def config(lines: str) -> dict[str, Any]:
    """A whole file around lines of a model's entry."""
    entry = yaml.safe_load(lines)
    entry["args"] = {"source": {"demo": "smollm2-135m-instruct"}, **entry["args"]}
    gateway = {"name": "gateway", "import_path": "serve_app.gateway:app", "route_prefix": "/"}
    model = {"name": "chat", "import_path": "serve_app.model:app", "route_prefix": None, **entry}
    return {"applications": [gateway, model]}


@pytest.mark.parametrize("lines", LINES)
def test_every_line_passes_check(lines: str) -> None:
    """Modelyard's own keys; vLLM's in the next test."""
    assert check_config(config(lines), base=DOCS, engine_fields=lambda: None, frontend_fields=dict).faults == ()


@pytest.mark.engine
@needs_vllm
@pytest.mark.parametrize("lines", LINES)
def test_every_line_passes_check_with_vllm(lines: str) -> None:
    """Its engine keys exist in the installed vLLM, with values of their types."""
    assert check_config(config(lines), base=DOCS).faults == ()


def test_the_tables_are_those_of_the_raw_values() -> None:
    """`python -m loadtest.powers document docs/engine.md` would change nothing."""
    assert report.with_tables(ENGINE, report.kept()) == ENGINE


def test_every_row_has_its_table() -> None:
    """Once, and its name is in the list of powers."""
    assert sorted(re.findall(r"<!-- row: ([\w-]+) -->", ENGINE)) == sorted(ROWS)
    assert set(re.findall(r"`([\w-]+)`", "".join(cells[-1] for cells in powers()))) == ROWS.keys()


def powers() -> list[list[str]]:
    """The cells of the list of powers."""
    lines = [line for line in ENGINE.splitlines() if line.startswith("| [")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


@pytest.mark.parametrize("cells", powers(), ids=lambda cells: cells[0])
def test_what_a_power_gained_is_in_its_tables(cells: list[str]) -> None:
    """Each number of the list of powers stands in a table of the power's section."""
    (title,) = re.findall(r"\[(.*?)\]", cells[0])
    section = ENGINE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    measured = set(re.findall(r"\d[\d,.]*\d|\d", "".join(re.findall(r"^\|.*$", section, re.MULTILINE))))
    gained = re.findall(r"\d[\d,.]*\d|\d", cells[3])
    assert set(gained) <= measured
    assert gained or cells[3] == "not measured"


def keys() -> list[str]:
    return sorted(set(re.findall(rf"`((?:{'|'.join(OWNERS)})\.[\w.]+)`", COMING_FROM)))


@pytest.mark.parametrize("key", keys())
def test_every_key_exists(key: str) -> None:
    """In our config models, or in Ray Serve's; vLLM's in the next test."""
    owner, *path = key.split(".")
    if path[0] == "engine":
        path = path[:1]
    model: type[BaseModel] | None = OWNERS[owner]
    for name in path:
        assert model is not None
        assert name in model.model_fields, key
        model = inner_model(model.model_fields[name].annotation)


@pytest.mark.engine
@needs_vllm
def test_every_engine_key_exists() -> None:
    """In the installed vLLM, and it is one that a file may set."""
    named = {key.removeprefix("args.engine.") for key in keys() if key.startswith("args.engine.")}
    fields = engine_args.engine_fields()
    assert fields is not None
    assert named
    assert named <= fields.keys() - engine_args.OWNED_ENGINE_KEYS.keys()
