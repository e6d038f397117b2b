"""What deploying a file would do to what runs: per application, and why. Pure.

Serve's rules (Ray 2.60). An application's code version is made of its import path, runtime environment, arguments,
and the autoscaling policies, request routers and actors of its deployments: another one restarts all its replicas.
What a deployment asks of the cluster restarts that deployment's. Everything else reaches running replicas, or Serve's
controller alone. An application that the file does not name is deleted.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from serve_app.config import MODEL_DEPLOYMENT, MODEL_IMPORT_PATH, ModelArgs
from serve_app.model.placement import placement
from serve_app.model.rollout import OLD_FIRST, rollout
from serve_app.planning.nodes import Node, several

Config = Mapping[str, Any]

_CODE = ("import_path", "runtime_env", "args", "autoscaling_policy")
# Of a deployment: part of the application's code version, and what restarts the deployment alone.
_CODE_OF_DEPLOYMENT = ("request_router_config", "deployment_actors")
_ASKED = (
    "ray_actor_options",
    "placement_group_bundles",
    "placement_group_strategy",
    "placement_group_bundle_label_selector",
    "placement_group_fallback_strategy",
    "max_replicas_per_node",
    "gang_scheduling_config",
)
# Values below these keys may be secrets.
_UNSAID = ("env", "env_vars")
_LONGEST = 60


class Action(StrEnum):
    ADD = "add"
    RESTART = "restart"
    LIVE = "apply live"
    REMOVE = "remove"
    NONE = "unchanged"


@dataclass(frozen=True, slots=True)
class Change:
    """What happens to one application. ``keys``: what differs, as ``path: old → new``. ``why``: one sentence."""

    application: str
    action: Action
    why: str
    keys: tuple[str, ...] = ()


def changes(
    config: Config,
    deployed: Mapping[str, Config],
    free: Sequence[Node] | None,
    http: tuple[str, int] | None = None,
) -> list[Change]:
    """``config``: the file's. ``deployed``: the entry that each running application was deployed from, by name.

    ``free``: the nodes with what is free now, None where that is not known: it decides how a model is rolled.
    ``http``: the host and port of a Serve that runs.
    """
    found = _http(config, http)
    named = set()
    for entry in config.get("applications") or ():
        name = str(entry.get("name", "default"))
        named.add(name)
        if name in deployed:
            found.append(_change(name, deployed[name], entry, free))
        else:
            found.append(Change(name, Action.ADD, "it does not run yet"))
    gone = sorted(deployed.keys() - named)
    return found + [Change(name, Action.REMOVE, "the file does not name it: Serve deletes it") for name in gone]


def _http(config: Config, http: tuple[str, int] | None) -> list[Change]:
    asked = config.get("http_options") or {}
    if http is None:
        return []
    running = {"host": http[0], "port": http[1]}
    keys = tuple(_differences("http_options", running, {**running, **{k: asked[k] for k in running if k in asked}}))
    why = f"Serve keeps {http[0]}:{http[1]} until it is shut down"
    return [Change("http_options", Action.NONE, why, keys)] if keys else []


def _change(name: str, old: Config, new: Config, free: Sequence[Node] | None) -> Change:
    before, after = _by_deployment(old), _by_deployment(new)
    keys = tuple(_differences("", before, after))
    if any(before.get(key) != after.get(key) for key in _CODE) or _deployment_code(old) != _deployment_code(new):
        return Change(
            name, Action.RESTART, f"the code version changes: every replica restarts, {_roll(new, free)}", keys
        )
    restarted = [
        each
        for each in before["deployments"].keys() | after["deployments"].keys()
        if any(_option(before, each, key) != _option(after, each, key) for key in _ASKED)
    ]
    if restarted:
        why = f"what {several(sorted(restarted))} asks of the cluster changes: its replicas restart"
        return Change(name, Action.RESTART, why, keys)
    if keys:
        return Change(name, Action.LIVE, "nothing restarts", keys)
    return Change(name, Action.NONE, "the entry is the same")


def _by_deployment(entry: Config) -> dict[str, Any]:
    """The entry with its defaults, and its deployments by name."""
    deployments = {str(each["name"]): each for each in entry.get("deployments") or ()}
    filled = {"route_prefix": "/", **entry, "deployments": deployments}
    return filled | {key: entry.get(key) or {} for key in ("runtime_env", "args")}


def _option(entry: Mapping[str, Any], deployment: str, key: str) -> Any:
    return entry["deployments"].get(deployment, {}).get(key)


def _deployment_code(entry: Config) -> list[Any]:
    """What deployments add to the code version. Serve counts even an autoscaling_config without a policy."""
    deployments = entry.get("deployments") or ()
    scaling = [each["autoscaling_config"] for each in deployments if each.get("autoscaling_config") is not None]
    others = [[each[key] for each in deployments if each.get(key)] for key in _CODE_OF_DEPLOYMENT]
    return [[each.get("policy") for each in scaling], *others]


def _roll(entry: Config, free: Sequence[Node] | None) -> str:
    """How Serve replaces the replicas."""
    if entry.get("import_path") != MODEL_IMPORT_PATH:
        return "the old ones first"
    model = _by_deployment(entry)["deployments"].get(MODEL_DEPLOYMENT, {})
    surge = model.get("max_surge_percent")
    if surge is None:
        surge = rollout(placement(ModelArgs.model_validate(entry.get("args") or {})), free).max_surge_percent
        because = "no room for one more" if surge == OLD_FIRST else "there is room for one more"
        because = "what is free is not known" if free is None else because
    else:
        because = f"max_surge_percent is {surge}"
    return f"{'the old ones first' if surge == OLD_FIRST else 'new ones first'} ({because})"


def _differences(path: str, old: Any, new: Any) -> Iterator[str]:
    if old == new:
        return
    if path.rpartition(".")[2] in _UNSAID and not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        yield f"{path}: changed"
        return
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in dict.fromkeys((*old, *new)):
            inner = f"{path}.{key}" if path else str(key)
            if path.rpartition(".")[2] in _UNSAID and old.get(key) != new.get(key):
                yield f"{inner}: changed"
            else:
                yield from _differences(inner, old.get(key), new.get(key))
        return
    yield f"{path}: {_short(old)} → {_short(new)}"


def _short(value: Any) -> str:
    if value is None:
        return "not set"
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
