"""Which file may know what: read from the import statements, so that a lazy import counts too."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "serve_app"

# Decisions. They get the clock and the cluster's state as arguments.
PURE = (
    "config",
    "errors",
    "catalog",
    "names",
    "routing",
    "prefixes",
    "scaling",
    "planning",
    "admission",
    "resume",
    "usage",
    "placement",
    "rollout",
)
KNOWS_TOO_MUCH = ("ray", "vllm", "starlette", "fastapi", "asyncio", "time")
# Of planning. (`explain` only prints, and prints what `checkpoint` found.)
PLANNING_ADAPTERS = {f"serve_app.planning.{name}" for name in ("checkpoint", "live", "explain")}
REACHES_OUT = ("os", "subprocess", "socket", "httpx", "serve_app.ray_api", "serve_app.local_cluster")
KNOWS_VLLM = {"serve_app.model.engine", "serve_app.model.engine_args"}


def _module(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_module(f): f for f in sorted(PACKAGE.rglob("*.py"))}


def _imports(module: str) -> Iterator[str]:
    """Dotted names that ``module`` imports anywhere in it, also by ``import_module("…")``."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        match node:
            case ast.Import(names=names):
                yield from (n.name for n in names)
            case ast.ImportFrom(module=name, names=names, level=0):
                yield from (f"{name}.{n.name}" for n in names)
            case ast.ImportFrom():
                pytest.fail(f"{module}: relative import; write it in full")
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name)), *_]):
                yield name


def _under(name: str, *roots: str) -> bool:
    return any(name == r or name.startswith(f"{r}.") for r in roots)


def _reached(module: str) -> Iterator[tuple[str, str]]:
    """(module of ours, what it imports), beginning with ``module``'s own imports and going on in what it imports."""
    seen, todo = set(), [module]
    while todo:
        current = todo.pop()
        seen.add(current)
        for name in _imports(current):
            yield current, name
            ours = next((m for m in (name, name.rpartition(".")[0]) if m in MODULES), None)
            if ours and ours not in seen:
                todo.append(ours)


def _pure_modules() -> list[str]:
    return [m for m in MODULES if any(p in PURE for p in m.split(".")[1:])]


@pytest.mark.parametrize("module", _pure_modules())
def test_decisions_know_no_framework_and_no_clock(module: str) -> None:
    """A decision is tested without a cluster, an event loop or a sleep; what it imports of ours is as pure."""
    for importer, name in _reached(module):
        assert not _under(name, *KNOWS_TOO_MUCH), f"{importer} imports {name}"


PLANNING = [m for m in MODULES if _under(m, "serve_app.planning") and m not in PLANNING_ADAPTERS]


@pytest.mark.parametrize("module", PLANNING)
def test_a_plan_is_made_of_what_it_is_given(module: str) -> None:
    """Two files of planning fetch something from outside; every decision gets a snapshot."""
    for importer, name in _reached(module):
        assert not _under(name, *REACHES_OUT), f"{importer} imports {name}"


@pytest.mark.parametrize("module", MODULES)
def test_no_private_part_of_ray(module: str) -> None:
    """Ray's private modules change without notice; ray.llm brings its own opinion of vLLM."""
    assert [n for n in _imports(module) if _under(n, "ray.serve._private", "ray.llm")] == []


@pytest.mark.parametrize("module", sorted(MODULES.keys() - KNOWS_VLLM))
def test_only_the_adapters_know_vllm(module: str) -> None:
    """vLLM moves its classes with every release: two files have to follow, no more."""
    assert [n for n in _imports(module) if _under(n, "vllm")] == []


def test_the_lists_above_mean_files_that_exist() -> None:
    """A renamed file must not slip out of these tests."""
    assert {"serve_app.config", "serve_app.errors"} <= set(_pure_modules())
    assert "serve_app.model.engine_args" in MODULES
    assert set(MODULES) >= PLANNING_ADAPTERS
