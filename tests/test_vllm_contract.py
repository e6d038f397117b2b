"""What ``engine.py`` relies on in vLLM, held against the installed release and against any others that are given.

Everything but one test reads source text, so no vLLM is imported and a release needs not be installed: name wheels or
unpacked trees in ``MODELYARD_VLLM_SOURCES`` (separated like ``PATH``).
"""

import ast
import importlib
import importlib.util
import inspect
import os
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from serve_app.model import engine, engine_args

SOURCES_VARIABLE = "MODELYARD_VLLM_SOURCES"
FRONTEND_ARGS = tuple(f"{module}:BaseFrontendArgs" for module in engine_args._FRONTEND_MODULES)
STAT_LOGGER = ("vllm.v1.metrics.loggers:StatLoggerBase",)
SERVED_MODELS = ("vllm.entrypoints.openai.models.serving:OpenAIServingModels",)
MODEL_REGISTRY = ("vllm.entrypoints.openai.models.serving:OpenAIModelRegistry",)
OUTPUT_PROCESSOR = ("vllm.v1.engine.output_processor:OutputProcessor",)
REQUEST_STATE = ("vllm.v1.engine.output_processor:RequestState",)
DETOKENIZER = ("vllm.v1.engine.detokenizer:BaseIncrementalDetokenizer",)
CORE_CLIENT = ("vllm.v1.engine.core_client:AsyncMPClient",)
SAMPLING_PARAMS = ("vllm.sampling_params:SamplingParams",)
CORE_REQUEST = ("vllm.v1.engine:EngineCoreRequest",)
ENVIRONMENT = ("VLLM_NO_USAGE_STATS", "VLLM_ENABLE_RESPONSES_API_STORE", "VLLM_CPU_OMP_THREADS_BIND")

PLACES = {
    name: places for name, places in vars(engine).items() if name.isupper() and isinstance(places, tuple) and places
} | {
    "FRONTEND_ARGS": FRONTEND_ARGS,
    "STAT_LOGGER": STAT_LOGGER,
    "SERVED_MODELS": SERVED_MODELS,
    "MODEL_REGISTRY": MODEL_REGISTRY,
    "OUTPUT_PROCESSOR": OUTPUT_PROCESSOR,
    "REQUEST_STATE": REQUEST_STATE,
    "DETOKENIZER": DETOKENIZER,
    "CORE_CLIENT": CORE_CLIENT,
    "SAMPLING_PARAMS": SAMPLING_PARAMS,
    "CORE_REQUEST": CORE_REQUEST,
}
# What is called on the way, with how: positional arguments, then keywords.
CALLS: dict[str, tuple[tuple[str, ...], str, int, tuple[str, ...]]] = {
    "build_app": (engine.BUILD_APP, "", 3, ()),
    "init_app_state": (engine.INIT_APP_STATE, "", 4, ()),
    "make_arg_parser": (engine.MAKE_ARG_PARSER, "", 1, ()),
    "get_max_tokens": (engine.GET_MAX_TOKENS, "", 5, ("truncate_prompt_tokens",)),
    "create_error_response": (engine.CREATE_ERROR_RESPONSE, "", 1, ()),
    "add_request": (engine.ASYNC_LLM, "add_request", 4, ()),
    "create_engine_config": (("vllm.engine.arg_utils:EngineArgs",), "create_engine_config", 1, ()),
    "from_vllm_config": (
        engine.ASYNC_LLM,
        "from_vllm_config",
        2,
        ("stat_loggers", "enable_log_requests", "disable_log_stats"),
    ),
    "get_supported_tasks": (engine.ASYNC_LLM, "get_supported_tasks", 1, ()),
    "check_health": (engine.ASYNC_LLM, "check_health", 1, ()),
    "errored": (engine.ASYNC_LLM, "errored", 1, ()),  # a property
    "shutdown": (engine.ASYNC_LLM, "shutdown", 1, ()),
    "is_sleeping": (engine.ASYNC_LLM, "is_sleeping", 1, ()),
    # What `_keep_journals` replaces, with what vLLM calls them, and what it calls itself.
    "generate": (engine.ASYNC_LLM, "generate", 4, ()),
    "front end add_request": (OUTPUT_PROCESSOR, "add_request", 6, ()),
    "core add_request_async": (CORE_CLIENT, "add_request_async", 2, ()),
    "finish_request": (OUTPUT_PROCESSOR, "_finish_request", 2, ()),
    "make_request_output": (REQUEST_STATE, "make_request_output", 5, ()),
    "detokenizer update": (DETOKENIZER, "update", 3, ()),
    "clone": (SAMPLING_PARAMS, "clone", 1, ()),
    "get_num_unfinished_requests": (OUTPUT_PROCESSOR, "get_num_unfinished_requests", 1, ()),
    # What adapters are loaded with.
    "add_lora": (engine.ASYNC_LLM, "add_lora", 2, ()),
    "remove_lora": (engine.ASYNC_LLM, "remove_lora", 2, ()),
    "lora number": (("vllm.utils.counter:AtomicCounter",), "inc", 2, ()),
    "record": (STAT_LOGGER, "record", 1, ("scheduler_stats", "iteration_stats", "mm_cache_stats", "engine_idx")),
    "log_engine_initialized": (STAT_LOGGER, "log_engine_initialized", 1, ()),
    "log": (STAT_LOGGER, "log", 1, ()),
    # Those that `_answer_to_any_name` replaces: with what vLLM calls them.
    "served is_base_model": (SERVED_MODELS, "is_base_model", 2, ()),
    "served model_name": (SERVED_MODELS, "model_name", 2, ()),
    "registry is_base_model": (MODEL_REGISTRY, "is_base_model", 2, ()),
    "registry model_name": (MODEL_REGISTRY, "model_name", 2, ()),
}

DEPLOYED = [
    file
    for file in (Path(__file__).resolve().parent.parent / "deployments").rglob("*")
    if file.suffix in (".json", ".yml")
]

Read = Callable[[str], str | None]


def _folder(path: Path) -> Read:
    root = path if path.name == "vllm" else path / "vllm"
    assert root.is_dir(), f"{path} holds no vllm"

    def read(name: str) -> str | None:
        file = root.parent / name
        return file.read_text() if file.is_file() else None

    return read


def _wheel(path: Path) -> Read:
    archive = zipfile.ZipFile(path)
    names = frozenset(archive.namelist())
    return lambda name: archive.read(name).decode() if name in names else None


def _sources() -> Iterator[Any]:
    spec = importlib.util.find_spec("vllm")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    here = Path(folders[0]) if folders else None
    skip = pytest.mark.skipif(here is None, reason="vLLM is not installed")
    yield pytest.param(here, id="installed", marks=skip)
    given = [Path(path) for path in os.environ.get(SOURCES_VARIABLE, "").split(os.pathsep) if path]
    for path in given:
        yield pytest.param(path, id=path.name if path.suffix == ".whl" else str(path))
    if not given:
        yield pytest.param(
            None, id="others", marks=pytest.mark.skip(reason=f"{SOURCES_VARIABLE} names no other release")
        )


class Release:
    """One vLLM release as text."""

    def __init__(self, path: Path) -> None:
        self.read = _wheel(path) if path.suffix == ".whl" else _folder(path)
        self._trees: dict[str, ast.Module | None] = {}

    def module(self, name: str) -> ast.Module | None:
        if name not in self._trees:
            base = name.replace(".", "/")
            text = self.read(f"{base}.py") or self.read(f"{base}/__init__.py")
            self._trees[name] = None if text is None else ast.parse(text)
        return self._trees[name]

    def find(self, places: tuple[str, ...]) -> ast.AST:
        """What defines the first of ``places`` that this release has; re-exports do not count."""
        for place in places:
            module, name = place.split(":")
            tree = self.module(module)
            if tree is not None and (found := _defined(tree.body, name)) is not None:
                return found
        raise AssertionError(f"none of {', '.join(places)} is defined in this release")


def _defined(body: list[ast.stmt], name: str) -> ast.AST | None:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return node
    return None


@cache
def _release(path: Path) -> Release:
    return Release(path)


@pytest.fixture(scope="module", params=list(_sources()))
def release(request: pytest.FixtureRequest) -> Release:
    return _release(request.param)


@pytest.mark.parametrize("name", PLACES)
def test_each_thing_is_in_one_of_its_places(release: Release, name: str) -> None:
    """Every import of the adapter finds its target, in each release that we support."""
    release.find(PLACES[name])


@pytest.mark.parametrize("name", CALLS)
def test_signatures_accept_our_calls(release: Release, name: str) -> None:
    """Each function takes the arguments that the adapter gives, by position and by keyword, and needs no others."""
    places, method, positional, keywords = CALLS[name]
    found = release.find(places)
    if method:
        assert isinstance(found, ast.ClassDef)
        found = _defined(found.body, method) or pytest.fail(f"{places[0]} has no {method}")
    assert isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef)
    arguments = found.args
    by_position = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    assert len(by_position) >= positional or arguments.vararg
    named = {a.arg for a in (*arguments.args, *arguments.kwonlyargs)}
    assert arguments.kwarg or named >= set(keywords)
    required = by_position[: len(by_position) - len(arguments.defaults)][positional:]
    required += [a.arg for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is None]
    assert set(required) <= set(keywords), "it needs arguments that the adapter does not give"


def test_attributes_that_the_adapter_reads_exist(release: Release) -> None:
    """``AsyncLLM.model_config`` and ``.output_processor``, ``OpenAIServingModels.registry``, ``app.state``'s
    ``openai_serving_models``."""
    llm, models = release.find(engine.ASYNC_LLM), release.find(SERVED_MODELS)
    assert {"model_config", "output_processor"} <= _assigned(llm)
    assert "registry" in _assigned(models)
    texts = [release.read(place.split(":")[0].replace(".", "/") + ".py") for place in engine.INIT_APP_STATE]
    texts.append(release.read("vllm/entrypoints/generate/factories.py"))
    assert any("state.openai_serving_models = " in text for text in texts if text)


def test_a_request_is_continued_where_vllm_passes_it_on(release: Release) -> None:
    """``generate`` adds a request to the front end first and to the core then, through the two calls that are wrapped;
    prompt ids, limits and the queue are where the adapter changes them."""
    llm = release.find(engine.ASYNC_LLM)
    assert isinstance(llm, ast.ClassDef)
    text = ast.unparse(_defined(llm.body, "_add_request") or pytest.fail("AsyncLLM has no _add_request"))
    front_end = text.index("self.output_processor.add_request(request, ")
    assert front_end < text.index("self.engine_core.add_request_async(request)")
    assert "self.add_request(" in ast.unparse(_defined(llm.body, "generate") or llm)
    assert "request_states" in _assigned(release.find(OUTPUT_PROCESSOR))
    assert {"detokenizer", "queue"} <= _assigned(release.find(REQUEST_STATE))
    assert {"request_id", "prompt_token_ids", "sampling_params"} <= _fields(release.find(CORE_REQUEST))
    assert {"max_tokens", "min_tokens"} <= _fields(release.find(SAMPLING_PARAMS))
    assert "STOP" in ast.unparse(release.find(engine.FINISH_REASON))


def test_adapters_go_where_vllm_takes_them(release: Release) -> None:
    """``generate`` and ``encode`` hand a request to ``add_request`` with its adapter by keyword, where ours is put; the
    request of the engine core carries it. Settings, counter and list are where the adapter looks for them."""
    llm = release.find(engine.ASYNC_LLM)
    assert isinstance(llm, ast.ClassDef)
    for name in ("generate", "encode"):
        text = ast.unparse(_defined(llm.body, name) or pytest.fail(f"AsyncLLM has no {name}"))
        call = text[text.index("self.add_request(") :]
        assert "lora_request=lora_request" in call[: call.index(")\n")]
    assert "lora_request" in _fields(release.find(CORE_REQUEST))
    lora = release.find(engine.LORA_REQUEST)
    assert isinstance(lora, ast.ClassDef)
    fields = [n.target.id for n in lora.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
    assert fields[:3] == ["lora_name", "lora_int_id", "lora_path"]
    assert {"lora_id_counter", "lora_requests"} <= _assigned(release.find(SERVED_MODELS))
    config = release.find(("vllm.config.lora:LoRAConfig",))
    assert {"max_loras", "max_cpu_loras"} <= _fields(config)
    assert "self.max_cpu_loras = self.max_loras" in ast.unparse(config), "it is None where it is not set"
    assert {"lora_config", "device_config"} <= _fields(release.find(("vllm.config.vllm:VllmConfig",)))
    assert "device_type" in _fields(release.find(("vllm.config.device:DeviceConfig",)))


def test_the_numbers_that_scaling_follows_exist(release: Release) -> None:
    """What the scheduler and each step tell to a stat logger."""
    scheduler = release.find(("vllm.v1.metrics.stats:SchedulerStats",))
    wanted = {"num_waiting_reqs", "num_skipped_waiting_reqs", "kv_cache_usage", "prefix_cache_stats"}
    assert wanted <= _fields(scheduler)
    step = release.find(("vllm.v1.metrics.stats:IterationStats",))
    assert isinstance(step, ast.ClassDef)
    assert "num_generation_tokens" in _assigned(step)
    assert _defined(step.body, "num_prompt_tokens")


def test_tokens_are_counted_and_priorities_passed_where_vllm_has_them(release: Release) -> None:
    """A request's own state knows its prompt and answer; ``generate`` takes a priority; the scheduler has a policy."""
    assert "prompt_len" in _assigned(release.find(REQUEST_STATE))
    detokenizer = release.find(("vllm.v1.engine.detokenizer:IncrementalDetokenizer",))
    assert isinstance(detokenizer, ast.ClassDef)
    assert _defined(detokenizer.body, "num_output_tokens")
    processor = release.find(OUTPUT_PROCESSOR)
    assert isinstance(processor, ast.ClassDef)
    add = _defined(processor.body, "add_request")
    assert isinstance(add, ast.FunctionDef)
    names = [argument.arg for argument in add.args.args]
    assert names[:5] == ["self", "request", "prompt", "parent_req", "request_index"]
    llm = release.find(engine.ASYNC_LLM)
    assert isinstance(llm, ast.ClassDef)
    generate = _defined(llm.body, "generate")
    assert isinstance(generate, ast.AsyncFunctionDef)
    assert "priority" in {a.arg for a in (*generate.args.args, *generate.args.kwonlyargs)}
    assert "vllm_config" in _assigned(llm)
    assert "policy" in _fields(release.find(("vllm.config.scheduler:SchedulerConfig", "vllm.config:SchedulerConfig")))


def _fields(found: ast.AST) -> set[str]:
    """Annotated names in a class's body."""
    assert isinstance(found, ast.ClassDef)
    return {n.target.id for n in found.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}


def test_the_plugin_group_and_the_environment_variables_exist(release: Release) -> None:
    """The orphan guard's entry point group is loaded by vLLM, and the variables that we set are its own."""
    assert '"vllm.general_plugins"' in (release.read("vllm/plugins/__init__.py") or "")
    known = release.read("vllm/envs.py") or ""
    assert [name for name in ENVIRONMENT if f'"{name}"' not in known] == []


@pytest.mark.parametrize("module", ["vllm/v1/engine/core.py", "vllm/v1/executor/multiproc_executor.py"])
def test_processes_log_that_they_failed_to_start(release: Release, module: str) -> None:
    """With a traceback, behind the words that the adapter looks for."""
    assert re.search(rf'logger\.exception\("\w+{re.escape(engine.START_FAILED)}"', release.read(module) or "")


def test_metrics_of_the_dashboard_are_vllms(release: Release) -> None:
    """Every one of vLLM's that the dashboard or an alert asks for is made in the logger whose metrics Ray has, with the
    label ``model_name``; Ray puts ``_total`` behind a counter's name."""
    text = release.read("vllm/v1/metrics/loggers.py")
    assert text is not None
    assert re.search(r"labelnames = \[\"model_name\"", text)
    asked = {name for file in DEPLOYED for name in re.findall(r"\bray_vllm_(\w+)", file.read_text())}
    assert asked
    for name in asked:
        assert f'name="vllm:{name.removesuffix("_total")}"' in text


def _assigned(found: ast.AST) -> set[str]:
    """Attributes of ``self`` that a class assigns."""
    targets: list[ast.expr] = []
    for node in ast.walk(found):
        if isinstance(node, ast.Assign):
            targets += node.targets
        elif isinstance(node, ast.AnnAssign):
            targets.append(node.target)
    return {t.attr for t in targets if isinstance(t, ast.Attribute) and getattr(t.value, "id", None) == "self"}


@pytest.mark.engine
def test_the_installed_release_really_imports() -> None:
    """Importing, which text cannot prove: every place resolves and binds the adapter's arguments."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM and torch deprecate much of their own
        for places in PLACES.values():
            engine._first(places)
    for places, method, positional, keywords in CALLS.values():
        call = engine._first(places)
        unbound = inspect.getattr_static(call, method) if method else call
        function = unbound.fget if isinstance(unbound, property) else getattr(unbound, "__func__", unbound)
        signature = inspect.signature(function)
        signature.bind(*[None] * positional, **dict.fromkeys(keywords))


@pytest.mark.engine
def test_the_orphan_guard_is_registered() -> None:
    """vLLM finds the guard by its entry point: an installation without it would leave engines behind."""
    from importlib.metadata import entry_points

    guards = [entry for entry in entry_points(group="vllm.general_plugins") if entry.name == "modelyard_orphan_guard"]
    assert {entry.value for entry in guards} == {"serve_app.orphan_guard:install"}
    assert callable(guards[0].load())
