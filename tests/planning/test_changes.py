"""changes: what a deploy would do to what runs, and why. (On a real Serve: tests/serve/test_placement.py.)"""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from serve_app.planning.changes import Action, Change, changes
from serve_app.planning.nodes import Node
from tests.planning.fleets import GATEWAY, model

ROOM = [Node("n", {"CPU": 8.0, "GPU": 1.0})]
Edit = Callable[[dict[str, Any]], object]


def entry(**args: Any) -> dict[str, Any]:
    made = model("chat", engine={"max_model_len": 4096}, **args)
    card = {"name": "Card", "user_config": {"also_known_as": ["a"]}}
    return made | {"deployments": [{"name": "Model", "num_replicas": 1}, card]}


def change(edit: Edit, free: list[Node] | None = None, before: Mapping[str, Any] | None = None) -> Change:
    """Of the entry above, after ``edit``."""
    new = entry()
    edit(new)
    (found,) = changes({"applications": [new]}, {"chat": before or entry()}, free)
    return found


def in_model(**options: Any) -> Edit:
    return lambda new: new["deployments"][0].update(options)


def test_what_is_added_removed_and_left_alone() -> None:
    """In the order of the file, then what goes; the gateway is an application like others."""
    config = {"applications": [GATEWAY, entry()]}
    found = changes(config, {"gateway": GATEWAY, "old": entry(), "older": entry()}, None)
    assert [(c.application, c.action) for c in found] == [
        ("gateway", Action.NONE),
        ("chat", Action.ADD),
        ("old", Action.REMOVE),
        ("older", Action.REMOVE),
    ]


@pytest.mark.parametrize(
    ("edit", "key"),
    [
        (lambda e: e["args"]["engine"].update(max_model_len=8192), "args.engine.max_model_len: 4096 → 8192"),
        (lambda e: e["args"].update(tensor_parallel_size=2), "args.tensor_parallel_size: not set → 2"),
        (lambda e: e["args"].pop("engine"), 'args.engine: {"max_model_len": 4096} → not set'),
        (lambda e: e.update(import_path="mine:app"), "import_path: serve_app.model:app → mine:app"),
        (lambda e: e.update(runtime_env={"pip": ["x"]}), 'runtime_env.pip: not set → ["x"]'),
        # Serve lists the policies of all autoscaling_configs: one that names none counts.
        (
            in_model(autoscaling_config={"max_replicas": 2}),
            'deployments.Model.autoscaling_config: not set → {"max_replicas": 2}',
        ),
        (
            in_model(request_router_config={"request_router_class": "x:y"}),
            'deployments.Model.request_router_config: not set → {"request_router_class": "x:y"}',
        ),
    ],
)
def test_another_code_version_restarts_every_replica(edit: Edit, key: str) -> None:
    """The key that changed is named, old → new."""
    found = change(edit)
    assert (found.action, found.keys) == (Action.RESTART, (key,))
    assert found.why.startswith("the code version changes: every replica restarts")


@pytest.mark.parametrize(
    "edit",
    [
        in_model(num_replicas=3),
        in_model(graceful_shutdown_timeout_s=5),
        in_model(max_surge_percent=100),
        lambda e: e["deployments"][1]["user_config"].update(also_known_as=["b"]),
        lambda e: e["deployments"].pop(),
    ],
)
def test_what_reaches_running_replicas_applies_live(edit: Edit) -> None:
    """Numbers of replicas, options of updates, the card's settings."""
    found = change(edit)
    assert (found.action, found.why, len(found.keys)) == (Action.LIVE, "nothing restarts", 1)


def test_other_numbers_of_an_autoscaling_config_apply_live() -> None:
    """Only its policy is code."""
    scaled = entry()
    scaled["deployments"][0] = {"name": "Model", "autoscaling_config": {"max_replicas": 2}}
    assert (
        change(in_model(num_replicas=None, autoscaling_config={"max_replicas": 3}), before=scaled).action is Action.LIVE
    )


def test_what_a_deployment_asks_of_the_cluster_restarts_that_deployment() -> None:
    """The model's replicas run on while its card starts again."""
    found = change(lambda e: e["deployments"][1].update(ray_actor_options={"num_cpus": 1}))
    assert (found.action, found.why) == (
        Action.RESTART,
        "what Card asks of the cluster changes: its replicas restart",
    )


def test_defaults_that_are_written_out_change_nothing() -> None:
    """An empty runtime_env, no args and Serve's route are what Serve takes them for."""
    plain = {"name": "x", "import_path": "x:y"}
    full = plain | {"runtime_env": {}, "args": {}, "route_prefix": "/"}
    (found,) = changes({"applications": [full]}, {"x": plain}, None)
    assert found.action is Action.NONE


@pytest.mark.parametrize(
    ("options", "free", "words"),
    [
        ({}, ROOM, "new ones first (there is room for one more)"),
        ({}, [], "the old ones first (no room for one more)"),
        ({}, None, "the old ones first (what is free is not known)"),
        ({"max_surge_percent": 100}, [], "new ones first (max_surge_percent is 100)"),
        ({"max_surge_percent": 0}, ROOM, "the old ones first (max_surge_percent is 0)"),
    ],
)
def test_how_a_changed_model_is_rolled(options: dict[str, Any], free: list[Node] | None, words: str) -> None:
    """As the builder will decide it, unless the file decides."""

    def edit(new: dict[str, Any]) -> None:
        new["args"]["overcommit"] = 1
        new["deployments"][0].update(options)

    assert change(edit, free).why.endswith(words)


def test_values_that_may_be_secrets_are_not_shown() -> None:
    """Only that they changed."""
    before = entry(env={"TOKEN": "old", "SAME": "x"})
    (found,) = changes({"applications": [entry(env={"TOKEN": "new", "SAME": "x"})]}, {"chat": before}, None)
    assert found.keys == ("args.env.TOKEN: changed",)
    (found,) = changes({"applications": [entry()]}, {"chat": before}, None)
    assert found.keys == ("args.env: changed",)
    (found,) = changes(
        {"applications": [entry() | {"runtime_env": {"env_vars": {"T": "new"}}}]}, {"chat": entry()}, None
    )
    assert "new" not in "".join(found.keys)


def test_serve_keeps_its_first_address() -> None:
    """A changed http_options.port does nothing while Serve runs, which is worth a line."""
    config = {"http_options": {"port": 9000}, "applications": [entry()]}
    first, _ = changes(config, {"chat": entry()}, None, ("127.0.0.1", 8000))
    assert first.keys == ("http_options.port: 8000 → 9000",)
    assert first.why == "Serve keeps 127.0.0.1:8000 until it is shut down"
    assert len(changes(config, {"chat": entry()}, None, ("127.0.0.1", 9000))) == 1
