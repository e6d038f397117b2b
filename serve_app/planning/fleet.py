"""A deployment file as a fleet: for each Serve deployment its replicas and what one of them takes. Pure.

Only what Serve starts counts. A model's card takes no resources; an application that is not Modelyard's takes what
its deployments say in the file, and Serve's default where they say nothing.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from serve_app.config import GATEWAY_DEPLOYMENT, GATEWAY_IMPORT_PATH, MODEL_DEPLOYMENT, MODEL_IMPORT_PATH, ModelArgs
from serve_app.model.placement import needs, placement
from serve_app.planning.nodes import Need

# Serve's bounds of `num_replicas: auto`.
_AUTO_MAX = 100


@dataclass(frozen=True, slots=True)
class Unit:
    """One Serve deployment. ``name``: the model's id, or the gateway's; else application and deployment.

    ``needs``: what one replica takes; each has to fit on one node. ``least``, ``most``: bounds of its replicas.
    ``per_node``: the most on one node, None for any number. ``args``: of a model, else None.
    """

    name: str
    application: str
    deployment: str
    needs: tuple[Need, ...]
    least: int
    most: int
    per_node: int | None = None
    args: ModelArgs | None = None


def fleet(config: Mapping[str, Any]) -> tuple[Unit, ...]:
    """What a Serve config (checked: see ``serve_app.check``) would start."""
    return tuple(unit for entry in config.get("applications") or () for unit in _units(entry))


def bounds(deployment: Mapping[str, Any]) -> tuple[int, int]:
    """The least and the most replicas of a deployment, by Serve's rules."""
    scaling = deployment.get("autoscaling_config")
    replicas = deployment.get("num_replicas")
    if replicas == "auto":
        scaling = {"min_replicas": 1, "max_replicas": _AUTO_MAX} | (scaling or {})
    if scaling:
        return int(scaling.get("min_replicas", 1)), int(scaling.get("max_replicas", 1))
    count = 1 if replicas is None else int(replicas)
    return count, count


def _units(entry: Mapping[str, Any]) -> Iterator[Unit]:
    name = str(entry.get("name", "default"))
    overrides = {str(each["name"]): each for each in entry.get("deployments") or ()}
    if entry.get("import_path") == MODEL_IMPORT_PATH:
        args = ModelArgs.model_validate(entry.get("args") or {})
        model = overrides.pop(MODEL_DEPLOYMENT, {})
        per_node = model.get("max_replicas_per_node")
        yield Unit(name, name, MODEL_DEPLOYMENT, placement(args).needs, *bounds(model), per_node, args)
        overrides = {each: options for each, options in overrides.items() if options.get("ray_actor_options")}
    elif entry.get("import_path") == GATEWAY_IMPORT_PATH:
        overrides.setdefault(GATEWAY_DEPLOYMENT, {})
    for each, options in overrides.items():
        label = name if each == GATEWAY_DEPLOYMENT else f"{name}.{each}"
        yield Unit(label, name, each, _needs(options), *bounds(options), options.get("max_replicas_per_node"))


def _needs(options: Mapping[str, Any]) -> tuple[Need, ...]:
    return needs(
        options.get("ray_actor_options") or {},
        options.get("placement_group_bundles"),
        options.get("placement_group_strategy"),
        options.get("placement_group_bundle_label_selector"),
    )
