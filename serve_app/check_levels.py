"""The levels of a deployment file, built from the models that read them: which key belongs where.

Used by ``check`` to say of a key that is wrong in one place where it would be right.
"""

import difflib
import typing
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from pydantic import BaseModel
from ray.serve.schema import DeploymentSchema, HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

from serve_app import config

# A level: (how to call it, the keys that belong there).
Level = tuple[str, Collection[str]]

LIVE = "it is part of the code version: changing it restarts every replica"
_COMPUTED = "Modelyard computes it: use args.resources"
_SLOTS = "Modelyard computes it: use args.engine.max_num_seqs and args.overcommit"

# Serve's own options that a deployment of ours may not override, with what to use instead.
REFUSED_EVERYWHERE = {"request_router_config": LIVE}
REFUSED_ON_MODEL = {
    **REFUSED_EVERYWHERE,
    "ray_actor_options": _COMPUTED,
    "placement_group_bundles": _COMPUTED,
    "placement_group_strategy": _COMPUTED,
    "placement_group_bundle_label_selector": _COMPUTED,
    "gang_scheduling_config": _COMPUTED,
    "max_ongoing_requests": _SLOTS,
    "max_queued_requests": _SLOTS,
    "user_config": "it belongs to the Card: deployments: [{name: Card, user_config: …}]",
}
# What of Serve's autoscaling_config our own policy does not look at.
WITHOUT_EFFECT = frozenset(
    {
        "target_ongoing_requests",
        "upscale_delay_s",
        "downscale_delay_s",
        "downscale_to_zero_delay_s",
        "upscaling_factor",
        "downscaling_factor",
        "smoothing_factor",
        "upscale_smoothing_factor",
        "downscale_smoothing_factor",
        "aggregation_function",
    }
)
# Serve keeps these in an application for another file format and refuses them in this one.
NOT_IN_AN_ENTRY = ("host", "port")


def nested_model(annotation: Any) -> type[BaseModel] | None:
    """The pydantic model inside an annotation such as ``Optional[Union[Dict, Model]]`` or ``List[Model]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((m for arg in typing.get_args(annotation) if (m := nested_model(arg))), None)


def is_mapping(annotation: Any) -> bool:
    """Whether it is ``dict[str, Model]``: keys of the user's own, a model behind each."""
    return typing.get_origin(annotation) is dict


def _levels(name: Callable[..., str], model: type[BaseModel], skip: Collection[str] = ()) -> Iterator[Level]:
    """``model`` and the models inside it; ``name`` turns the keys down to a level into what it is called."""

    def walk(model: type[BaseModel], keys: tuple[str, ...]) -> Iterator[Level]:
        fields = {k: f for k, f in model.model_fields.items() if k not in skip}
        yield name(*keys), fields
        for key, field in fields.items():
            if inner := nested_model(field.annotation):
                yield from walk(inner, (*keys, key, "NAME") if is_mapping(field.annotation) else (*keys, key))

    return walk(model, ())


def _dotted(root: str) -> Callable[..., str]:
    return lambda *keys: ".".join((root, *keys))


def _override(deployment: str, *prefix: str) -> Callable[..., str]:
    """Names levels inside ``deployments:`` the way they are written: ``[{name: Card, user_config: {limits: …}}]``."""

    def name(*keys: str) -> str:
        inner = ""
        for key in reversed((*prefix, *keys)):
            inner = f"{key}: {{{inner}}}" if inner else f"{key}: …"
        return f"deployments: [{{name: {deployment}{', ' if inner else ''}{inner}}}]"

    return name


_ENTRY: Level = (
    "the application's entry",
    [k for k in ServeApplicationSchema.model_fields if k not in NOT_IN_AN_ENTRY],
)
_TOP: list[Level] = [
    ("the top level of the file", ServeDeploySchema.model_fields),
    ("http_options", HTTPOptionsSchema.model_fields),
]
MODEL_LEVELS: list[Level] = [
    *_levels(_dotted("args"), config.ModelArgs, skip=["fake"]),
    *_levels(_override(config.CARD_DEPLOYMENT, "user_config"), config.CardSettings),
    _ENTRY,
    *_levels(_override(config.MODEL_DEPLOYMENT), DeploymentSchema, skip=REFUSED_ON_MODEL),
    *_levels(_override(config.CARD_DEPLOYMENT), DeploymentSchema, skip=REFUSED_EVERYWHERE),
    *_TOP,
]
GATEWAY_LEVELS: list[Level] = [
    *_levels(_override(config.GATEWAY_DEPLOYMENT, "user_config"), config.GatewaySettings),
    _ENTRY,
    *_levels(_override(config.GATEWAY_DEPLOYMENT), DeploymentSchema, skip=REFUSED_EVERYWHERE),
    *_TOP,
]
OTHER_LEVELS: list[Level] = [_ENTRY, *_levels(_override("…"), DeploymentSchema), *_TOP]
FILE_LEVELS: list[Level] = [*_TOP, (f"applications: one of its entries ({_ENTRY[0]})", _ENTRY[1])]


def near(key: str, keys: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(key, list(keys), n=1, cutoff=0.7)), None)
