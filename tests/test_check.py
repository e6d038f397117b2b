"""`check` names every fault of a file, with its path and what would be right, and starts nothing."""

import copy
import enum
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app import sources
from serve_app.check import Fault, Report, check_config, check_file
from serve_app.config import QUEUE_DEPTH, Source
from serve_app.model import engine_args


class Backend(enum.Enum):
    A = "a.module.A"


@dataclass
class Compilation:
    level: int = 0


# As much of vLLM's vocabulary as the tests need, with its kinds of hints.
ENGINE: dict[str, Any] = {
    "model": str,
    "tokenizer": str | None,
    "tensor_parallel_size": int,
    "data_parallel_size": int,
    "max_model_len": int | None,
    "max_num_seqs": int | None,
    "gpu_memory_utilization": float,
    "kv_cache_dtype": Literal["auto", "fp8", "bfloat16"],
    "kv_cache_memory_bytes": int | None,
    "enforce_eager": bool,
    "served_model_name": str | list[str] | None,
    "offload_params": set[str],
    "attention_backend": Backend | None,
    "compilation_config": Compilation,
    "quantization_config": "dict[str, Any] | SomethingUnresolved",
    "hf_overrides": dict[str, Any],
}
FRONTEND: dict[str, Any] = {"chat_template": str | None, "tool_call_parser": str | None}

GATEWAY = {"name": "gateway", "import_path": "serve_app.gateway:app", "route_prefix": "/"}
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")


def _model(name: str = "chat", *, deployments: list[Any] | None = None, **args: Any) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": name,
        "import_path": "serve_app.model:app",
        "route_prefix": None,
        "args": {"source": {"demo": "smollm2-135m-instruct"}, **args},
    }
    return entry if deployments is None else {**entry, "deployments": deployments}


def _card(**settings: Any) -> dict[str, Any]:
    return {"name": "Card", "user_config": settings}


POLICY = {"policy": {"policy_function": QUEUE_DEPTH}}


def _check(*entries: Any, gateway: dict[str, Any] = GATEWAY, **top: Any) -> Report:
    return _check_data({"applications": [gateway, *entries], **top})


def _check_data(data: object) -> Report:
    return check_config(data, base=Path(), engine_fields=lambda: ENGINE, frontend_fields=lambda: FRONTEND)


def _lines(report: Report) -> list[str]:
    return [str(f).removeprefix("applications[1] (chat).") for f in report.faults]


def test_a_right_file_has_no_faults() -> None:
    """The smallest deployment, and one that uses Serve's own options where it may."""
    assert _check(_model()) == Report((), ())
    model = {
        "name": "Model",
        "autoscaling_config": {
            "min_replicas": 0,
            "max_replicas": 4,
            "metrics_interval_s": 1,
            "look_back_period_s": 5,
            **POLICY,
        },
        "max_surge_percent": 100,
        "graceful_shutdown_timeout_s": 600,
        "health_check_period_s": 5,
    }
    card = _card(also_known_as=["org/chat"], limits={"wait_s": 5})
    entry = _model(deployments=[model, card], engine={"max_model_len": 2048, "kv_cache_dtype": "fp8"})
    gateway = {**GATEWAY, "deployments": [{"name": "Gateway", "num_replicas": 2, "user_config": {"max_body_mb": 1}}]}
    top = {"proxy_location": "EveryNode", "http_options": {"host": "127.0.0.1", "port": 8000}}
    assert _check(entry, gateway=gateway, **top) == Report((), ())


def test_three_planted_faults_are_all_named() -> None:
    """A misspelt engine key, a key at the wrong level and a size of 0: one run names all three."""
    entry = _model(engine={"gpu_memory_utilisation": 0.9}, max_model_len=2048, tensor_parallel_size=0)
    assert sorted(str(f) for f in _check(entry).faults) == [
        "applications[1] (chat).args.engine.gpu_memory_utilisation: unknown vLLM engine argument; "
        "did you mean gpu_memory_utilization?",
        "applications[1] (chat).args.max_model_len: unknown key; max_model_len belongs under args.engine",
        "applications[1] (chat).args.tensor_parallel_size: must be at least 1, is 0",
    ]


def test_a_hubs_token_is_no_part_of_a_file() -> None:
    """It is a secret: Ray's dashboard shows a deployment's arguments to whoever may look."""
    assert _lines(_check(_model(env={"HF_TOKEN": "hf_x", "HF_ENDPOINT": "http://mirror"}))) == [
        "args.env.HF_TOKEN: Ray's dashboard would show it; set it in the environment of the nodes"
    ]


# --- Keys at the wrong level


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ({"max_model_len": 1}, "args.max_model_len: unknown key; max_model_len belongs under args.engine"),
        ({"chat_template": "x"}, "args.chat_template: unknown key; chat_template belongs under args.frontend"),
        ({"num_gpus": 1}, "args.num_gpus: unknown key; num_gpus belongs under args.resources"),
        ({"hub": "a/b"}, "args.hub: unknown key; hub belongs under args.source"),
        (
            {"num_replicas": 2},
            "args.num_replicas: unknown key; num_replicas belongs under deployments: [{name: Model}]",
        ),
        (
            {"min_replicas": 2},
            "args.min_replicas: unknown key; "
            "min_replicas belongs under deployments: [{name: Model, autoscaling_config: …}]",
        ),
        (
            {"also_known_as": ["a"]},
            "args.also_known_as: unknown key; also_known_as belongs under deployments: [{name: Card, user_config: …}]",
        ),
        (
            {"wait_s": 1},
            "args.wait_s: unknown key; wait_s belongs under deployments: [{name: Card, user_config: {limits: …}}]",
        ),
        ({"port": 1}, "args.port: unknown key; port belongs under http_options"),
        ({"enviroment": {}}, "args.enviroment: unknown key; known here: "),
        ({"resource": {}}, "args.resource: unknown key; did you mean resources?"),
        ({"max_model_length": 1}, "args.max_model_length: unknown key; did you mean max_model_len, under args.engine?"),
        (
            {"engine": {"tensor_parallel_size": 2}},
            "args.engine.tensor_parallel_size: does not belong here; tensor_parallel_size belongs under args",
        ),
        (
            {"engine": {"tokenizer": "a/b"}},
            "args.engine.tokenizer: does not belong here; tokenizer belongs under args.source",
        ),
        (
            {"engine": {"tool_call_parser": "hermes"}},
            "args.engine.tool_call_parser: unknown vLLM engine argument; tool_call_parser belongs under args.frontend",
        ),
        (
            {"frontend": {"max_model_len": 1}},
            "args.frontend.max_model_len: unknown vLLM frontend argument; max_model_len belongs under args.engine",
        ),
        ({"engine": {"model": "a/b"}}, "args.engine.model: is set by Modelyard; the model comes from args.source"),
        ({"model": "a/b"}, "args.model: unknown key; the model comes from args.source"),
    ],
)
def test_a_key_of_another_level_is_told_where_it_belongs(args: dict[str, Any], line: str) -> None:
    """The right place comes from the models, whichever wrong place the key stands in."""
    found = _lines(_check(_model(**args)))
    assert len(found) == 1
    assert found[0].startswith(line)


def test_an_engine_setting_in_the_entry_itself() -> None:
    """Serve would drop such a key without a word."""
    entry = {**_model(), "max_model_len": 1, "also_known_as": ["a"], "engine": {}, "host": "::"}
    assert sorted(_lines(_check(entry))) == [
        "also_known_as: unknown key; also_known_as belongs under deployments: [{name: Card, user_config: …}]",
        "engine: unknown key; engine belongs under args",
        "host: does not belong in an application; host belongs under http_options",
        "max_model_len: unknown key; max_model_len belongs under args.engine",
    ]


def test_unknown_keys_of_serve_are_refused_at_every_level() -> None:
    """Serve ignores these silently: top level, http_options, entry, deployment, autoscaling, actor options."""
    gateway = {
        **GATEWAY,
        "runtime_enw": {},
        "deployments": [
            {
                "name": "Gateway",
                "num_replica": 1,
                "autoscaling_config": {"max_replica": 2},
                "ray_actor_options": {"num_cpu": 1},
            }
        ],
    }
    report = _check(_model(), gateway=gateway, proxy_locaton="EveryNode", http_options={"prot": 1}, port=1)
    where = "applications[0] (gateway)"
    assert sorted(map(str, report.faults)) == [
        f"{where}.deployments[0] (Gateway).autoscaling_config.max_replica: unknown key; did you mean max_replicas?",
        f"{where}.deployments[0] (Gateway).num_replica: unknown key; did you mean num_replicas?",
        f"{where}.deployments[0] (Gateway).ray_actor_options.num_cpu: unknown key; did you mean num_cpus?",
        f"{where}.runtime_enw: unknown key; did you mean runtime_env?",
        "http_options.prot: unknown key; did you mean port?",
        "port: unknown key; port belongs under http_options",
        "proxy_locaton: unknown key; did you mean proxy_location?",
    ]


# --- Entries


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ({"ray_actor_options": {"num_gpus": 1}}, "ray_actor_options"),
        ({"placement_group_bundles": [{"GPU": 1}]}, "placement_group_bundles"),
        ({"placement_group_strategy": "PACK"}, "placement_group_strategy"),
        ({"max_ongoing_requests": 5}, "max_ongoing_requests"),
        ({"max_queued_requests": 5}, "max_queued_requests"),
        ({"request_router_config": {}}, "request_router_config"),
        ({"user_config": {}}, "user_config"),
        (
            {"autoscaling_config": {"policy": {**POLICY["policy"], "policy_kwargs": {"a": 1}}}},
            "autoscaling_config.policy.policy_kwargs",
        ),
    ],
)
def test_what_modelyard_computes_may_not_be_overridden(override: dict[str, Any], key: str) -> None:
    """Each refusal says what to use instead."""
    (fault,) = _check(_model(deployments=[{"name": "Model", **override}])).faults
    assert fault.path == f"applications[1] (chat).deployments[0] (Model).{key}"
    assert fault.message == "may not be set here"
    assert fault.hint


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"route_prefix": "/chat"}, "applications[1] (chat).route_prefix: must be given as null"),
        ({"route_prefix": ...}, "applications[1] (chat).route_prefix: must be given as null"),
        ({"name": ...}, "applications[1].name: is missing: it is the model's id"),
        ({"name": "org/chat"}, "applications[1] (org/chat).name: org/chat cannot be a model's name"),
        ({"args": ...}, "applications[1] (chat).args.source: is missing"),
        ({"args": 3}, "applications[1] (chat).args: must be a mapping, is 3"),
        ({"deployments": {}}, "applications[1] (chat).deployments: must be a list"),
        ({"deployments": [3]}, "applications[1] (chat).deployments[0]: must be a mapping"),
        (
            {"deployments": [{"name": "Modle"}]},
            "applications[1] (chat).deployments[0] (Modle).name: unknown deployment Modle; use Model or Card",
        ),
        (
            {"deployments": [{"name": "Model"}, {"name": "Model"}]},
            "applications[1] (chat).deployments[1] (Model).name: Model is already the name of",
        ),
        (
            {"import_path": "serve_app.models:app"},
            "applications[1] (chat).import_path: unknown import path serve_app.models:app; use serve_app.model:app or",
        ),
    ],
)
def test_a_wrong_entry(change: dict[str, Any], line: str) -> None:
    """Each rule of a model's entry, alone in an otherwise right file."""
    entry = {k: v for k, v in {**_model(), **change}.items() if v is not ...}
    faults = [str(f) for f in _check(entry).faults]
    assert len(faults) == 1
    assert faults[0].startswith(line)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ({"num_replicas": 0}, "num_replicas: must be auto or a whole number of at least 1, is 0"),
        ({"num_replicas": "two"}, "num_replicas: must be auto or a whole number of at least 1, is two"),
        ({"num_replicas": 2, "autoscaling_config": POLICY}, "num_replicas: cannot be given together with autosc"),
        ({"max_surge_percent": 101}, "max_surge_percent: must be at most 100, is 101"),
        (
            {"autoscaling_config": {"min_replicas": -1, **POLICY}},
            "autoscaling_config.min_replicas: must be at least 0, is -1",
        ),
        ({"autoscaling_config": {"min_replicas": 2, **POLICY}}, "autoscaling_config: max_replicas (1) must be greater"),
    ],
)
def test_values_of_serves_options(override: dict[str, Any], line: str) -> None:
    """Serve itself looks into autoscaling_config only after the deployment began."""
    (fault,) = _check(_model(deployments=[{"name": "Model", **override}])).faults
    assert str(fault).startswith(f"applications[1] (chat).deployments[0] (Model).{line}")


def test_num_replicas_auto_brings_its_own_bounds() -> None:
    """Serve's `auto` allows 100 replicas, so a lower bound alone is right with it, and with it only."""
    model = {"name": "Model", "num_replicas": "auto", "autoscaling_config": {"min_replicas": 2, **POLICY}}
    assert _check(_model(deployments=[model])).faults == ()


def own_policy(_context: Any) -> Any:
    """A policy of somebody's own, for a file that names it."""


def test_a_policy_that_cannot_be_imported_is_a_fault() -> None:
    """Serve imports it while it reads the file."""
    own = {"autoscaling_config": {"policy": {"policy_function": "no_such_module:policy"}}}
    fault = _check(_model(deployments=[{"name": "Model", **own}])).faults[0]
    assert "cannot be imported: No module named 'no_such_module'" in str(fault)


@pytest.mark.parametrize("override", [{"autoscaling_config": {"max_replicas": 2}}, {"num_replicas": "auto"}])
def test_scaling_without_our_policy_is_a_fault(override: dict[str, Any]) -> None:
    """Serve would take its own silently; the fault says what to write. A policy of one's own is one's own choice."""
    (fault,) = _check(_model(deployments=[{"name": "Model", **override}])).faults
    assert fault.path == "applications[1] (chat).deployments[0] (Model).autoscaling_config.policy"
    assert fault.hint == "write policy: {policy_function: serve_app.policy:queue_depth}"
    own = {"autoscaling_config": {"policy": {"policy_function": f"{__name__}:own_policy"}, "upscale_delay_s": 1}}
    assert _check(_model(deployments=[{"name": "Model", **own}])).faults == ()
    gateway = {**GATEWAY, "deployments": [{"name": "Gateway", "autoscaling_config": {"max_replicas": 2}}]}
    assert _check(_model(), gateway=gateway).faults == ()


def test_what_our_policy_does_not_read_is_a_fault() -> None:
    """A delay that is written but not kept would be believed."""
    model = {"name": "Model", "autoscaling_config": {"max_replicas": 2, "upscale_delay_s": 5, **POLICY}}
    (fault,) = _check(_model(deployments=[model])).faults
    assert fault.path.endswith("autoscaling_config.upscale_delay_s")
    assert "has no effect" in str(fault)


def test_what_only_serve_checks_is_still_found() -> None:
    """A file that passes is one that Serve takes: its own validators have the last word."""
    (fault,) = _check(_model(), gateway={**GATEWAY, "name": ""}).faults
    assert str(fault) == "applications: Application names must be nonempty."


def test_exactly_one_gateway() -> None:
    """None and two are faults."""
    assert [str(f) for f in _check_data({"applications": [_model()]}).faults] == [
        "applications: must have exactly one serve_app.gateway:app, found none"
    ]
    second = {**GATEWAY, "name": "second", "route_prefix": "/second"}
    assert [str(f) for f in _check(_model(), second).faults] == [
        "applications: must have exactly one serve_app.gateway:app, "
        "found applications[0] (gateway), applications[2] (second)"
    ]


def test_no_model_is_worth_a_note_only() -> None:
    """An operator may start the gateway first."""
    report = _check()
    assert report.faults == ()
    assert report.notes == ("no model: no application has import_path serve_app.model:app",)


def test_the_gateway_must_be_reachable() -> None:
    """A null route or a broken one would take the whole endpoint away."""
    for route, words in ((None, "must not be null"), ("v1", "must begin with /"), ("/v1/", "not end with one")):
        (fault,) = _check(_model(), gateway={**GATEWAY, "route_prefix": route}).faults
        assert fault.path == "applications[0] (gateway).route_prefix"
        assert words in fault.message


def test_a_users_own_application_is_left_alone() -> None:
    """Its args and user_config are its own; Serve's keys are checked, and its route may not be the gateway's."""
    own = {
        "name": "mine",
        "import_path": "my.module:app",
        "route_prefix": "/mine",
        "args": {"anything": 1},
        "deployments": [{"name": "Any", "user_config": {"a": 1}, "request_router_config": {}}],
    }
    report = _check(_model(), own)
    assert report.faults == ()
    assert report.notes == (
        "applications[2] (mine): my.module:app is an application of your own; only Serve's keys were checked",
    )
    (fault,) = _check(_model(), {k: v for k, v in own.items() if k != "route_prefix"}).faults
    assert str(fault).startswith("applications[2] (mine).route_prefix: / is already the route_prefix of")


# --- Ids


@pytest.mark.parametrize(
    ("first", "second", "model_id"),
    [
        (
            _model("a", deployments=[_card(also_known_as=["x"])]),
            _model("b", deployments=[_card(also_known_as=["x"])]),
            "x",
        ),
        (_model("a"), _model("b", deployments=[_card(also_known_as=["a"])]), "a"),
        (_model("a", deployments=[_card(also_known_as=["b"])]), _model("b"), "b"),
    ],
)
def test_an_id_belongs_to_one_model(first: dict[str, Any], second: dict[str, Any], model_id: str) -> None:
    """Both claimants are named, whether the id is a name or an alias and whichever comes first."""
    (fault,) = _check(first, second).faults
    assert f"the model id {model_id} is claimed by applications[1] (a) and by applications[2] (b)" in str(fault)


def test_adapters_are_ids_and_need_an_engine_that_loads_them(tmp_path: Path) -> None:
    """One id for two things is a fault; so is an engine that was not told, and not a folder that is not here."""
    (tmp_path / "adapter_config.json").touch()
    card = _card(also_known_as=["x"], adapters={"sql": str(tmp_path), "chat": "/nowhere", "far": "relative"})
    report = _check(_model(deployments=[card]))
    where = "deployments[0] (Card).user_config.adapters"
    assert _lines(report) == [
        f"{where}.far: must be an absolute path, is 'relative'",
        f"{where}: the engine is not told to load adapters; write engine: {{enable_lora: true}} in args, and "
        "max_lora_rank if theirs is above 16",
        f"{where}.chat: chat is already an id of this model",
    ]
    assert [note for note in report.notes if "nowhere" in note]


def test_an_id_twice_in_one_entry() -> None:
    """An alias that repeats the name or another alias is a slip worth showing."""
    found = _lines(_check(_model(deployments=[_card(also_known_as=["chat", "x", "x"])])))
    assert found == [
        "deployments[0] (Card).user_config.also_known_as[0]: chat is already an id of this model",
        "deployments[0] (Card).user_config.also_known_as[2]: x is already an id of this model",
    ]


def test_two_entries_of_one_name_are_one_fault() -> None:
    """Serve's rule and ours do not both report it."""
    (fault,) = _check(_model(), _model()).faults
    assert str(fault) == "applications[2] (chat).name: chat is already the name of applications[1] (chat)"


# --- Engine values


@pytest.mark.parametrize(
    "engine",
    [
        {"max_model_len": 2048},
        {"max_model_len": "16k"},
        {"max_model_len": "auto"},
        {"max_model_len": None},
        {"kv_cache_memory_bytes": "2G"},
        {"gpu_memory_utilization": 1},
        {"offload_params": ["a", "b"]},
        {"attention_backend": "FLASH_ATTN"},
        {"compilation_config": {"level": 3}},
        {"compilation_config": 3},
        {"quantization_config": {"anything": [1]}},
        {"hf_overrides": {"rope_theta": 1.0, "deep": {"er": None}}},
    ],
)
def test_values_that_vllm_takes_pass(engine: dict[str, Any]) -> None:
    """No false alarm: where the hint cannot tell, the value passes."""
    assert _lines(_check(_model(engine=engine))) == []


@pytest.mark.parametrize(
    ("engine", "line"),
    [
        ({"max_model_len": "long"}, 'max_model_len: must be a whole number, is "long"'),
        ({"max_model_len": 2.5}, "max_model_len: must be a whole number, is 2.5"),
        ({"max_model_len": True}, "max_model_len: must be a whole number, is true"),
        ({"enforce_eager": "false"}, 'enforce_eager: must be true or false, is "false"'),
        ({"kv_cache_dtype": "fp9"}, "kv_cache_dtype: must be 'auto', 'fp8' or 'bfloat16', is \"fp9\""),
        ({"gpu_memory_utilization": [1]}, "gpu_memory_utilization: must be a number"),
        ({"compilation_config": {"levl": 3}}, "compilation_config: unknown key levl (did you mean level?)"),
    ],
)
def test_values_of_the_wrong_type(engine: dict[str, Any], line: str) -> None:
    """They would die in a replica, minutes later, for one attempt after the other."""
    assert _lines(_check(_model(engine=engine))) == [f"args.engine.{line}"]


def test_without_vllm_a_note_says_what_was_not_checked() -> None:
    """The check still works where only the gateway is installed, and still refuses what is ours."""
    data = {"applications": [GATEWAY, _model(engine={"no_such_key": 1, "model": "x"})]}
    report = check_config(data, base=Path(), engine_fields=lambda: None, frontend_fields=lambda: None)
    assert _lines(report) == ["args.engine.model: is set by Modelyard; the model comes from args.source"]
    assert report.notes == ("vLLM is not installed here: engine and frontend keys were not checked",)


def test_vllm_is_loaded_only_for_its_keys() -> None:
    """Importing vLLM takes ten seconds: a file without engine keys does not pay for it."""

    def load() -> dict[str, Any]:
        raise AssertionError("loaded")

    data = {"applications": [GATEWAY, _model()]}
    assert check_config(data, base=Path(), engine_fields=load, frontend_fields=load).faults == ()


def test_a_broken_vllm_is_a_note() -> None:
    """An ImportError inside vLLM is not a fault of the file."""

    def load() -> dict[str, Any]:
        raise ImportError("libcuda.so.1")

    data = {"applications": [GATEWAY, _model(engine={"max_model_len": 1})]}
    report = check_config(data, base=Path(), engine_fields=load, frontend_fields=load)
    assert report.faults == ()
    assert "libcuda.so.1" in report.notes[0]


def test_numbers_are_read_as_on_vllms_command_line() -> None:
    """k is 1,000 and K is 1,024; what is no such number is refused."""
    read = engine_args.read_numbers
    given_ = {"max_model_len": "16k", "kv_cache_memory_bytes": "2G", "max_num_batched_tokens": "25.6k", "seed": "1k"}
    assert read(given_) == {
        "max_model_len": 16_000,
        "kv_cache_memory_bytes": 2 * 1024**3,
        "max_num_batched_tokens": 25_600,
        "seed": "1k",
    }
    assert read({"max_model_len": "auto"}) == {"max_model_len": -1}
    for wrong in ("1.5K", "many", ""):
        with pytest.raises(ValueError, match="invalid literal"):
            read({"max_model_len": wrong})


# --- Sources


def test_a_relative_path_is_refused_with_the_absolute_one(tmp_path: Path) -> None:
    """Replicas run elsewhere; where the file's folder has such a path, the hint is ready to copy."""
    (tmp_path / "model").mkdir()
    data = {"applications": [GATEWAY, _model(source={"path": "model"})]}
    (fault,) = check_config(data, base=tmp_path).faults
    assert fault.path == "applications[1] (chat).args.source.path"
    assert fault.hint == f"write {(tmp_path / 'model').resolve()}"
    (fault,) = _check(_model(source={"path": "no/such"})).faults
    assert fault.hint == "give an absolute path"


def test_a_folder_must_be_a_model_where_it_can_be_seen(tmp_path: Path) -> None:
    """An existing folder without config.json is a fault; one that only the nodes have is a note."""
    (fault,) = _check(_model(source={"path": str(tmp_path)})).faults
    assert "has no config.json" in fault.message
    report = _check(_model(source={"path": str(tmp_path / "elsewhere")}))
    assert report.faults == ()
    assert "is not on this machine" in report.notes[0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot read"),
        ("{", "is not JSON"),
        ("[]", "is not a model's config.json"),
        ('{"model_type": "llama"}', "is not a model's config.json"),
        (b"\xff\xfe\x00", "is not JSON"),
    ],
)
def test_a_shape_must_be_a_models_config(tmp_path: Path, content: str | bytes | None, words: str) -> None:
    """Every way in which the file can be wrong is a fault with its path, none an exception."""
    file = tmp_path / "config.json"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    (fault,) = _check(_model(source={"shape": str(file)})).faults
    assert fault.path == "applications[1] (chat).args.source.shape"
    assert words in fault.message


def test_a_shipped_shape_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """shapes/NAME.json means the repository's, in the command's folder and in a replica's."""
    monkeypatch.chdir(tmp_path)
    source = Source(shape="shapes/SmolLM2-135M-Instruct.json")
    assert sources.read_shape(sources.resolve(source))["hidden_size"] == 576
    for wrong in ("shapes/../x.json", "shapes/a/b.json", "other/x.json", "shapes/.."):
        with pytest.raises(sources.SourceError):
            sources.resolve(Source(shape=wrong))
    with pytest.raises(sources.SourceError):
        sources.resolve(Source(path="shapes/SmolLM2-135M-Instruct.json"))


def test_an_engine_that_takes_more_than_its_share_of_a_gpu() -> None:
    """The fault names the engine's key, once, with the share and what to do."""
    entry = _model(engine={"gpu_memory_utilization": 0.9}, resources={"num_gpus": 0.25})
    assert _lines(_check(entry)) == [
        "args.engine.gpu_memory_utilization: must be at most 0.25, which is resources.num_gpus, is 0.9: "
        "the rest is for other models; or leave it out: 0.9 of the share"
    ]
    assert _check(_model(engine={"gpu_memory_utilization": 0.25}, resources={"num_gpus": 0.25})).faults == ()


def test_rules_between_fields_are_checked_beside_broken_fields() -> None:
    """The fault of one field hides neither another's nor that of a rule between two others."""
    entry = _model(source={"hub": 3}, tensor_parallel_size=2, resources={"num_gpus": 0.5}, overcommit=-1)
    assert sorted(line.split(":")[0] for line in _lines(_check(entry))) == [
        "args",
        "args.overcommit",
        "args.source.hub",
    ]


# --- Whole files


def _file(tmp_path: Path, text: str) -> Report:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    return check_file(file, engine_fields=lambda: ENGINE, frontend_fields=lambda: FRONTEND)


def test_broken_yaml_is_one_fault_with_its_place(tmp_path: Path) -> None:
    """A person goes straight to the line."""
    (fault,) = _file(tmp_path, "applications:\n  - name: a\n   import_path: b\n").faults
    assert fault.path == "line 3, column 4"
    assert fault.message.startswith("not valid YAML: ")
    assert "\n" not in str(fault)


@pytest.mark.parametrize(
    "text",
    ["a: [", "a: \t- b", "\x00", "a: *no", "--- 1\n--- 2\n", "? [a]\n: b", "a: 2001-99-99", "a: &x [*x]", "[" * 5000],
)
def test_all_kinds_of_broken_yaml(tmp_path: Path, text: str) -> None:
    """Whatever the parser dislikes ends as one fault."""
    (fault,) = _file(tmp_path, text).faults
    assert "not valid YAML" in fault.message


def test_an_empty_file(tmp_path: Path) -> None:
    """Also one of comments alone."""
    for text in ("", "# nothing\n", "---\n"):
        assert len(_file(tmp_path, text).faults) == 1


def test_duplicate_keys_are_faults_beside_the_others(tmp_path: Path) -> None:
    """PyYAML keeps the last of two; here both places are named, and the rest is checked as well."""
    text = yaml.safe_dump({"applications": [GATEWAY, _model()]}) + "http_options: {port: 1, port: 2}\nprot: 3\n"
    found = [str(f) for f in _file(tmp_path, text).faults]
    assert len(found) == 2
    assert "port is given twice in one mapping; the first is at line" in found[0]
    assert found[1].startswith("prot: unknown key")


def test_merge_keys_and_anchors_are_no_duplicates(tmp_path: Path) -> None:
    """`<<` exists to be overridden, and an anchor's mapping is one mapping however often it is used."""
    text = """
applications:
- {name: gateway, import_path: "serve_app.gateway:app", route_prefix: /}
- &base
  name: chat
  import_path: serve_app.model:app
  route_prefix: null
  args: {source: {demo: smollm2-135m-instruct}}
- <<: *base
  name: other
"""
    assert _file(tmp_path, text).faults == ()


def test_a_file_that_cannot_be_read_raises(tmp_path: Path) -> None:
    """That is not a fault of a deployment file; the caller says which file it was."""
    with pytest.raises(OSError, match="No such file"):
        check_file(tmp_path / "absent.yaml")


def test_faults_are_one_line_without_the_validators_jargon() -> None:
    """No URL, no class name, no line break, in any of many faults."""
    entry = _model(
        source={"hub": 3, "demo": "x"},
        resources=[],
        env={"A": 1},
        engine=3,
        overcommit="a",
        tensor_parallel_size=1.5,
        deployments=[_card(also_known_as="x", limits={"wait_s": None, "max_waiting": -1})],
    )
    report = _check(entry, proxy_location="Everywhere", http_options={"port": "x"})
    assert len(report.faults) >= 12
    for fault in report.faults:
        text = str(fault)
        assert "\n" not in text
        for jargon in ("http://", "https://", "pydantic", "type=", "input", "Input", "dict", "instance"):
            assert jargon not in text


RIGHT = {
    "proxy_location": "EveryNode",
    "http_options": {"port": 8000},
    "applications": [
        {**GATEWAY, "args": {}, "deployments": [{"name": "Gateway", "user_config": {"max_body_mb": 1}}]},
        _model(
            engine={"max_model_len": 1, "compilation_config": {}},
            resources={"num_gpus": 1},
            env={"A": "1"},
            deployments=[
                {"name": "Model", "autoscaling_config": {"max_replicas": 2, **POLICY}},
                _card(also_known_as=["x"], limits={}),
            ],
        ),
    ],
}
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    max_leaves=5,
)


def _places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path, *(p for key, item in items for p in _places(item, (*path, key)))]


@settings(max_examples=200, deadline=None)
@given(place=st.sampled_from(_places(RIGHT)), junk=JUNK)
def test_no_content_makes_it_raise(place: tuple[Any, ...], junk: Any) -> None:
    """Anything that YAML can hold, anywhere in a file: the answer is a report whose lines have a place."""
    data: Any = copy.deepcopy(RIGHT)
    if place:
        target = data
        for key in place[:-1]:
            target = target[key]
        target[place[-1]] = junk
    else:
        data = junk
    for fault in _check_data(data).faults:
        assert isinstance(fault, Fault)
        assert fault.path
        assert fault.message


# --- The gateway's names


def _named(**names: Any) -> Report:
    gateway = {**GATEWAY, "deployments": [{"name": "Gateway", "user_config": {"names": names}}]}
    return _check(_model("chat", deployments=[_card(also_known_as=["llama"])]), gateway=gateway)


NAMES = "applications[0] (gateway).deployments[0] (Gateway).user_config.names"


@pytest.mark.parametrize(
    ("means", "line"),
    [
        ({"to": "chat", "fallbck": []}, ".fallbck: unknown key; did you mean fallback?"),
        ({"to": "chat", "wait_s": 3}, ".wait_s: unknown key; known here: to, fallback, defaults, max_tokens"),
        ({"to": {"chat": -1}}, ".to.chat: must be greater than 0, is -1"),
        ({"to": {"a b": 1}}, '.to.a b: has a character that is not allowed here, is "a b"'),
        ({"to": {}}, ".to: must not be empty"),
        ({"to": 5}, '.to: must be text, is 5 (write it in quotes: "5")'),
        ({}, ".to: is missing"),
        (7, ": must be a mapping, is 7"),
        ({"to": "chat", "fallback": "chat"}, '.fallback: must be a list, is "chat"'),
        ({"to": "chat", "max_tokens": 0}, ".max_tokens: must be at least 1, is 0"),
        ({"to": "chat", "defaults": {"model": "x"}}, ".defaults: model is for the request alone to say"),
    ],
)
def test_faults_of_a_name(means: Any, line: str) -> None:
    """Each with its path down to the key, and nothing said of the names beside it."""
    report = _named(smart=means, fine={"to": "llama"})
    assert [str(f) for f in report.faults] == [f"{NAMES}.smart{line}"]


@pytest.mark.parametrize("name", ["chat", "llama"])
def test_a_name_that_is_a_models_id(name: str) -> None:
    """It would change nothing, so it is a fault."""
    (fault,) = _named(**{name: {"to": "elsewhere"}}).faults
    assert fault.path == f"{NAMES}.{name}"
    assert fault.message == f"{name} is an id of applications[1] (chat), which would keep it"


def test_a_name_for_a_model_of_another_file() -> None:
    """It may be there, or be misspelt: a note, and no fault."""
    report = _named(smart={"to": {"chat": 1, "caht": 1}, "fallback": ["elsewhere"]})
    assert report.faults == ()
    assert report.notes == (
        f"{NAMES}.smart: caht is no model of this file; chat is",
        f"{NAMES}.smart: elsewhere is no model of this file",
    )


# --- The installed vLLM


@pytest.mark.engine
@needs_vllm
def test_the_real_tables_hold_what_we_rely_on() -> None:
    """A contract with vLLM: names that Modelyard sets, or that the shipped files use, still exist."""
    engine, frontend = engine_args.engine_fields(), engine_args.frontend_fields()
    assert engine is not None
    assert frontend is not None
    assert engine_args.OWNED_ENGINE_KEYS.keys() - engine.keys() == set()
    assert {"max_model_len", "max_num_seqs", "kv_cache_memory_bytes", "tensor_parallel_size"} <= engine.keys()
    assert {"chat_template", "tool_call_parser", "enable_auto_tool_choice"} <= frontend.keys()
    assert not [name for name in engine if name.startswith("_")]


@pytest.mark.engine
@needs_vllm
def test_vllms_own_defaults_raise_no_alarm() -> None:
    """Each default that can be written in YAML passes the check of its own argument."""
    import dataclasses

    from vllm.engine.arg_utils import AsyncEngineArgs

    engine = {}
    for field in dataclasses.fields(AsyncEngineArgs):
        try:
            engine[field.name] = json.loads(json.dumps(field.default))
        except TypeError:
            continue  # a factory, or an object of vLLM's
    table = engine_args.engine_fields()
    assert table is not None
    ours = engine_args.OWNED_ENGINE_KEYS.keys() | {"tokenizer", "tensor_parallel_size", "pipeline_parallel_size"}
    kept = {k: v for k, v in engine.items() if k in table and k not in ours and k != "max_num_seqs"}
    assert len(kept) > 100
    data = {"applications": [GATEWAY, _model(engine=kept)]}
    assert _lines(check_config(data, base=Path())) == []


def test_a_usage_folder_that_is_not_there_is_a_note(tmp_path: Path) -> None:
    """The nodes may have it; where it exists nothing is said."""

    def notes(folder: Path) -> tuple[str, ...]:
        settings = [{"name": "Gateway", "user_config": {"usage_dir": str(folder)}}]
        return _check(_model(), gateway={**GATEWAY, "deployments": settings}).notes

    assert [note for note in notes(tmp_path) if "usage_dir" in note] == []
    assert any(f"usage_dir: {tmp_path / 'no'} is no folder of this machine" in note for note in notes(tmp_path / "no"))
