"""Reads a whole deployment file and lists everything that is wrong with it. Starts nothing.

Serve ignores keys that it does not know, at most levels, and vLLM dies with a bare TypeError in a replica. Here each
key is compared with the models that will read it; a key that is right elsewhere is told where, from the same models.
"""

import copy
import os
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import DeploymentSchema, ServeApplicationSchema, ServeDeploySchema

from serve_app import config, sources
from serve_app.check_levels import (
    FILE_LEVELS,
    GATEWAY_LEVELS,
    LIVE,
    MODEL_LEVELS,
    NOT_IN_AN_ENTRY,
    OTHER_LEVELS,
    REFUSED_EVERYWHERE,
    REFUSED_ON_MODEL,
    WITHOUT_EFFECT,
    Level,
    is_mapping,
    near,
    nested_model,
)
from serve_app.check_words import Fault, argument_problem, in_words, join, path_of
from serve_app.check_yaml import read_yaml
from serve_app.model import engine_args

__all__ = ["Fault", "Report", "check_config", "check_file"]

# A table of vLLM arguments: name -> type hint. None: vLLM is not installed.
Fields = dict[str, Any]
Loader = Callable[[], Fields | None]
_DEMO = config.Source(demo="smollm2-135m-instruct")
_HUB_TOKENS = frozenset(("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"))


@dataclass(frozen=True)
class Report:
    """What ``check`` found: ``faults`` stop a deployment, ``notes`` are worth knowing."""

    faults: tuple[Fault, ...]
    notes: tuple[str, ...]


def check_file(
    path: Path,
    *,
    engine_fields: Loader = engine_args.engine_fields,
    frontend_fields: Loader = engine_args.frontend_fields,
) -> Report:
    """Checks the deployment file at ``path``; see ``check_config``. OSError: it cannot be read."""
    data, faults = read_yaml(path.read_bytes())
    if data is None:
        return Report(tuple(faults) or (Fault(path.name, "the file is empty"),), ())
    report = check_config(data, base=path.parent, engine_fields=engine_fields, frontend_fields=frontend_fields)
    return Report((*faults, *report.faults), report.notes)


def check_config(
    data: object,
    *,
    base: Path,
    engine_fields: Loader = engine_args.engine_fields,
    frontend_fields: Loader = engine_args.frontend_fields,
) -> Report:
    """Checks a Serve config, as parsed from YAML.

    ``base`` is the folder of the file: a relative path that exists there is answered with its absolute form.
    ``engine_fields`` and ``frontend_fields`` load the tables of vLLM arguments; they are called only when needed.
    """
    checker = _Checker(base, engine_fields, frontend_fields)
    checker.file(data)
    return Report(tuple(checker.faults), tuple(dict.fromkeys(checker.notes)))


class _Checker:
    def __init__(self, base: Path, engine: Loader, frontend: Loader) -> None:
        self.base = base
        self.faults: list[Fault] = []
        self.notes: list[str] = []
        self.claimed: dict[str, tuple[str, str]] = {}  # model id -> (entry, where in it)
        self.names: dict[str, Any] = {}  # the gateway's, by path
        self._loaders = {"engine": engine, "frontend": frontend}
        self._tables: dict[str, Fields | None] = {}

    def fault(self, path: str, message: str, hint: str = "") -> None:
        self.faults.append(Fault(path, message, hint))

    # --- Serve's schema

    def file(self, data: object) -> None:
        if not isinstance(data, dict):
            return self.fault("file", "must be a mapping with applications:")
        top = self.known("", data, ServeDeploySchema, FILE_LEVELS)
        entries = top.get("applications")
        if isinstance(entries, list):
            self.applications(entries)
            top["applications"] = []  # so that faults there hide none here
        self.validate("", top, ServeDeploySchema)
        if not self.faults:  # whatever Serve checks across entries that is not known here
            self.validate("", copy.deepcopy(data), ServeDeploySchema)

    def applications(self, entries: list[Any]) -> None:
        gateways, models = [], 0
        names: dict[object, str] = {}
        routes: dict[object, str] = {}
        for i, entry in enumerate(entries):
            name = entry.get("name") if isinstance(entry, dict) else None
            path = f"applications[{i}]" + (f" ({name})" if isinstance(name, str) else "")
            if not isinstance(entry, dict):
                self.fault(path, "must be a mapping")
                continue
            self.once(names, name if "name" in entry else "default", path, "name")
            # A model without its route_prefix is a fault of its own.
            if entry.get("import_path") not in (None, config.MODEL_IMPORT_PATH) or "route_prefix" in entry:
                self.once(routes, entry.get("route_prefix", "/"), path, "route_prefix")
            match entry.get("import_path"):
                case config.MODEL_IMPORT_PATH:
                    models += 1
                    self.model(path, entry)
                case config.GATEWAY_IMPORT_PATH:
                    gateways.append(path)
                    self.gateway(path, entry)
                case other:
                    self.other(path, entry, other)
        if len(gateways) != 1:
            found = ", ".join(gateways) or "none"
            self.fault("applications", f"must have exactly one {config.GATEWAY_IMPORT_PATH}, found {found}")
        for where, given in self.names.items():
            self.meant(where, given)
        if not models:
            self.notes.append(f"no model: no application has import_path {config.MODEL_IMPORT_PATH}")

    def once(self, seen: dict[object, str], value: Any, path: str, key: str) -> None:
        if not isinstance(value, str):
            return
        if value in seen:
            self.fault(f"{path}.{key}", f"{value} is already the {key} of {seen[value]}")
        seen.setdefault(value, path)

    def other(self, path: str, entry: dict[str, Any], import_path: object) -> None:
        self.entry(path, entry, OTHER_LEVELS)
        for where, override in self.deployments(path, entry):
            self.deployment(where, override, OTHER_LEVELS)
        if isinstance(import_path, str) and import_path.split(".")[0].split(":")[0] == "serve_app":
            ours = (config.MODEL_IMPORT_PATH, config.GATEWAY_IMPORT_PATH)
            self.fault(f"{path}.import_path", f"unknown import path {import_path}", f"use {' or '.join(ours)}")
        elif isinstance(import_path, str):
            self.notes.append(f"{path}: {import_path} is an application of your own; only Serve's keys were checked")

    def entry(self, path: str, entry: dict[str, Any], levels: list[Level]) -> None:
        """Serve's keys of an application. Its deployments are left to the caller, so that faults there hide none."""
        for key in NOT_IN_AN_ENTRY:
            if key in entry:
                self.fault(f"{path}.{key}", "does not belong in an application", f"{key} belongs under http_options")
        own = {k: v for k, v in entry.items() if k not in ("deployments", *NOT_IN_AN_ENTRY)}
        self.validate(path, self.known(path, own, ServeApplicationSchema, levels), ServeApplicationSchema)
        route = entry.get("route_prefix")
        if isinstance(route, str) and (not route.startswith("/") or (route != "/" and route.endswith("/"))):
            self.fault(f"{path}.route_prefix", f"must begin with / and not end with one, is {route}")

    def deployments(self, path: str, entry: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """(label, deployment) of each override that is a mapping."""
        overrides = entry.get("deployments", [])
        if not isinstance(overrides, list):
            return self.fault(f"{path}.deployments", "must be a list")
        names: dict[object, str] = {}
        for i, override in enumerate(overrides):
            if not isinstance(override, dict):
                self.fault(f"{path}.deployments[{i}]", "must be a mapping")
                continue
            name = override.get("name")
            where = f"{path}.deployments[{i}]" + (f" ({name})" if isinstance(name, str) else "")
            self.once(names, name, where, "name")
            yield where, override

    def deployment(self, path: str, override: dict[str, Any], levels: list[Level]) -> None:
        given = override.get("autoscaling_config")
        override = self.known(path, override, DeploymentSchema, levels)
        replicas, scaling = override.get("num_replicas"), override.get("autoscaling_config")
        # Serve's own checks of these two stop at the first fault of a deployment, so they are made here.
        if replicas is not None and replicas != "auto":
            if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 1:
                self.fault(f"{path}.num_replicas", f"must be auto or a whole number of at least 1, is {replicas}")
                del override["num_replicas"]
            elif scaling is not None:
                self.fault(f"{path}.num_replicas", "cannot be given together with autoscaling_config")
                del override["num_replicas"]
        if isinstance(scaling, dict):
            defaults = AutoscalingConfig.default().model_dump() if replicas == "auto" else {}
            # A misspelt bound would break the rules between the bounds as well.
            self.validate(f"{path}.autoscaling_config", defaults | scaling, AutoscalingConfig, rules=scaling == given)
        self.validate(path, override, DeploymentSchema)

    # --- Modelyard's own applications

    def gateway(self, path: str, entry: dict[str, Any]) -> None:
        self.entry(path, entry, GATEWAY_LEVELS)
        if "route_prefix" in entry and entry["route_prefix"] is None:
            self.fault(f"{path}.route_prefix", "must not be null: nobody could reach the gateway", "write /")
        if isinstance(args := entry.get("args", {}), dict):
            self.spec(f"{path}.args", args, config.GatewayArgs, GATEWAY_LEVELS)
        refused = {config.GATEWAY_DEPLOYMENT: REFUSED_EVERYWHERE}
        settings = self.ours(path, entry, {config.GATEWAY_DEPLOYMENT: config.GatewaySettings}, refused, GATEWAY_LEVELS)
        for where, given in settings.items():
            if isinstance(names := given.get("names"), dict):
                self.names |= {f"{where}.names.{name}": means for name, means in names.items()}
            usage = given.get("usage_dir")
            if isinstance(usage, str) and usage.startswith("/") and not os.access(usage, os.W_OK | os.X_OK):
                self.notes.append(f"{where}.usage_dir: {usage} is no folder of this machine that you may write to")

    def meant(self, where: str, means: Any) -> None:
        """What the name at ``where`` means, beside the file's models: there may be others."""
        asked = where.rpartition(".names.")[2]
        if asked in self.claimed:
            self.fault(where, f"{asked} is an id of {self.claimed[asked][0]}, which would keep it")
        try:
            name = config.Name.model_validate(means)
        except ValidationError:
            return  # it has faults of its own
        for target in name.targets:
            if target not in self.claimed:
                found = near(target, self.claimed)
                self.notes.append(f"{where}: {target} is no model of this file" + (f"; {found} is" if found else ""))

    def model(self, path: str, entry: dict[str, Any]) -> None:
        self.entry(path, entry, MODEL_LEVELS)
        name = entry.get("name")
        if name is None:
            self.fault(f"{path}.name", "is missing: it is the model's id")
        elif isinstance(name, str):
            if not config.APP_NAME.fullmatch(name):
                rule = "use letters, digits, dot, dash and underscore, at most 128; ids with / go to also_known_as"
                self.fault(f"{path}.name", f"{name} cannot be a model's name", rule)
            self.claim(name, path, path)
        if "route_prefix" not in entry or entry["route_prefix"] is not None:
            self.fault(f"{path}.route_prefix", "must be given as null: else Serve takes / and the gateway's requests")
        args = entry.get("args", {})
        if isinstance(args, dict):
            self.model_args(f"{path}.args", args)
        refused = {config.MODEL_DEPLOYMENT: REFUSED_ON_MODEL, config.CARD_DEPLOYMENT: REFUSED_EVERYWHERE}
        cards = self.ours(path, entry, {config.CARD_DEPLOYMENT: config.CardSettings}, refused, MODEL_LEVELS)
        for where, card in cards.items():
            also = card.get("also_known_as")
            for i, other in enumerate(also if isinstance(also, list) else ()):
                self.claim(other, path, f"{where}.also_known_as[{i}]")
            if isinstance(adapters := card.get("adapters"), dict) and adapters:
                self.adapters(path, f"{where}.adapters", adapters, args)

    def adapters(self, path: str, where: str, adapters: dict[Any, Any], args: Any) -> None:
        engine = args.get("engine") if isinstance(args, dict) else None
        if not isinstance(engine, dict) or engine.get("enable_lora") is not True:
            hint = "write engine: {enable_lora: true} in args, and max_lora_rank if theirs is above 16"
            self.fault(where, "the engine is not told to load adapters", hint)
        for adapter, folder in adapters.items():
            self.claim(adapter, path, f"{where}.{adapter}")
            if (
                isinstance(folder, str)
                and folder.startswith("/")
                and not (Path(folder) / "adapter_config.json").exists()
            ):
                self.notes.append(f"{where}.{adapter}: no adapter_config.json in {folder} on this machine")

    def claim(self, model_id: object, owner: str, where: str) -> None:
        """``owner`` (an entry) answers to ``model_id``, as it says at ``where``."""
        if not isinstance(model_id, str):
            return
        if model_id not in self.claimed:
            self.claimed[model_id] = (owner, where)
            return
        other, other_where = self.claimed[model_id]
        if other == owner:
            self.fault(where, f"{model_id} is already an id of this model")
        elif not (where == owner and other_where == other):  # two entries of one name are a fault of their own
            self.fault(where, f"the model id {model_id} is claimed by {other} and by {owner}")

    def ours(
        self,
        path: str,
        entry: dict[str, Any],
        settings: dict[str, type[BaseModel]],
        refused: dict[str, dict[str, str]],
        levels: list[Level],
    ) -> dict[str, dict[str, Any]]:
        """Checks the overrides of our deployments, which are the keys of ``refused``.

        Each user_config that ``settings`` has a model for, by its path, without its unknown keys.
        """
        found: dict[str, dict[str, Any]] = {}
        for where, override in self.deployments(path, entry):
            name = override.get("name")
            kept = dict(override)
            if isinstance(name, str) and name not in refused:
                self.fault(f"{where}.name", f"unknown deployment {name}", f"use {' or '.join(refused)}")
            for key, hint in refused.get(name, {}).items() if isinstance(name, str) else ():
                if key in kept:
                    self.fault(f"{where}.{key}", "may not be set here", hint)
                    del kept[key]
            self.scaling(where, kept, is_model=name == config.MODEL_DEPLOYMENT)
            self.deployment(where, kept, levels)
            given = kept.get("user_config")
            if isinstance(given, dict) and isinstance(name, str) and name in settings:
                place = f"{where}.user_config"
                found[place] = self.spec(place, given, settings[name], levels)
        return found

    def scaling(self, path: str, override: dict[str, Any], *, is_model: bool) -> None:
        """Serve's own policy counts requests as its handles see them, and it would be used silently."""
        scaling, auto = override.get("autoscaling_config"), override.get("num_replicas") == "auto"
        policy = scaling.get("policy") if isinstance(scaling, dict) else None
        if isinstance(policy, dict) and "policy_kwargs" in policy:
            self.fault(f"{path}.autoscaling_config.policy.policy_kwargs", "may not be set here", LIVE)
        if not is_model or not (isinstance(scaling, dict) or auto):
            return
        if policy is None:
            self.fault(
                f"{path}.autoscaling_config.policy",
                "is missing: replicas would follow Serve's own rules, not the engine's queue",
                f"write policy: {{policy_function: {config.QUEUE_DEPTH}}}",
            )
        elif isinstance(policy, dict) and policy.get("policy_function") == config.QUEUE_DEPTH:
            for key in WITHOUT_EFFECT & (scaling or {}).keys():
                hint = "its targets are in deployments: [{name: Card, user_config: {scaling: …}}]"
                self.fault(f"{path}.autoscaling_config.{key}", f"has no effect with {config.QUEUE_DEPTH}", hint)

    def model_args(self, path: str, args: dict[str, Any]) -> None:
        kept = self.known(path, args, config.ModelArgs, MODEL_LEVELS)
        for part in ("engine", "frontend"):
            if isinstance(kept.get(part), dict) and kept[part]:
                kept[part] = self.arguments(f"{path}.{part}", part, kept[part])
        env = kept.get("env")
        for name in _HUB_TOKENS & env.keys() if isinstance(env, dict) else ():
            self.fault(f"{path}.env.{name}", "Ray's dashboard would show it", "set it in the environment of the nodes")
        engine, resources = kept.get("engine"), kept.get("resources")
        if isinstance(engine, dict) and isinstance(resources, dict):
            key = "gpu_memory_utilization"
            if problem := config.share_problem(resources.get("num_gpus"), engine.get(key)):
                self.fault(f"{path}.engine.{key}", problem, f"or leave it out: {config.FILLED_OF_SHARE:g} of the share")
                kept["engine"] = {k: v for k, v in engine.items() if k != key}
        # A stand-in for what is wrong lets the rules between fields be checked in the same run.
        while bad := self.validate(path, kept, config.ModelArgs) - {None}:
            kept = {k: v for k, v in kept.items() if k not in bad} | ({"source": _DEMO} if "source" in bad else {})
        source = kept.get("source")
        if isinstance(source, dict):
            self.source(f"{path}.source", config.Source.model_validate(source))

    def source(self, path: str, source: config.Source) -> None:
        key = "path" if source.path else "shape"
        if source.tokenizer and source.tokenizer.startswith((".", "~")):
            self.fault(f"{path}.tokenizer", f"{source.tokenizer} is relative", "give a hub id or an absolute path")
        if source.path is None and source.shape is None:
            return
        try:
            found = sources.resolve(source)
        except sources.SourceError as e:
            given = str(source.path or source.shape)
            there = next((p for b in (Path.cwd(), self.base) if (p := (b / given).resolve()).exists()), None)
            return self.fault(f"{path}.{key}", str(e), f"write {there}" if there else "give an absolute path")
        if source.shape:
            try:
                sources.read_shape(found)
            except sources.SourceError as e:
                shipped = ", ".join(f"shapes/{p.name}" for p in sorted(sources.SHAPES.glob("*.json")))
                self.fault(f"{path}.shape", str(e), f"shipped: {shipped}" if shipped else "")
        elif not found.exists():
            # A file is often checked on a machine that has no weights.
            self.notes.append(f"{path}.path: {found} is not on this machine; it must be on every node of the model")
        elif not (found / "config.json").is_file():
            self.fault(f"{path}.path", f"{found} has no config.json", "give the folder of a model")

    # --- vLLM's arguments

    def table(self, part: str) -> Fields | None:
        if part not in self._tables:
            try:
                self._tables[part] = self._loaders[part]()
                if self._tables[part] is None:
                    self.notes.append("vLLM is not installed here: engine and frontend keys were not checked")
            except ImportError as e:
                self._tables[part] = None
                self.notes.append(f"vLLM cannot be imported here ({e}): {part} keys were not checked")
        return self._tables[part]

    def arguments(self, path: str, part: str, given: dict[Any, Any]) -> dict[Any, Any]:
        """``given`` without what is faulty, each fault reported."""
        ours = {k: name for name, keys in MODEL_LEVELS[:2] for k in keys}  # args and args.source
        kept = {}
        for key, value in given.items():
            where = f"{path}.{key}"
            if part == "engine" and key in engine_args.OWNED_ENGINE_KEYS:
                self.fault(where, "is set by Modelyard", engine_args.OWNED_ENGINE_KEYS[key])
            elif key in ours:
                self.fault(where, "does not belong here", f"{key} belongs under {ours[key]}")
            elif (table := self.table(part)) is None:
                kept[key] = value
            elif key not in table:
                self.unknown(path, str(key), table, MODEL_LEVELS, f"unknown vLLM {part} argument")
            elif problem := argument_problem(key, value, table[key]):
                self.fault(where, problem)
            else:
                kept[key] = value
        return kept

    # --- Keys and values against a model

    def spec(self, path: str, value: dict[str, Any], model: type[BaseModel], levels: list[Level]) -> dict[str, Any]:
        kept = self.known(path, value, model, levels)
        self.validate(path, kept, model)
        return kept

    def known(self, path: str, value: dict[Any, Any], model: type[BaseModel], levels: list[Level]) -> dict[str, Any]:
        """``value`` without the keys that ``model`` does not have, each reported."""

        def inside(where: str, item: Any, nested: type[BaseModel]) -> Any:
            if isinstance(item, dict):
                return self.known(where, item, nested, levels)
            if isinstance(item, list):
                return [inside(f"{where}[{i}]", each, nested) for i, each in enumerate(item)]
            return item

        kept = {}
        for key, item in value.items():
            if key not in model.model_fields:
                self.unknown(path, str(key), model.model_fields, levels)
            elif key == "applications" or not (inner := nested_model(model.model_fields[key].annotation)):
                kept[key] = item  # entries of applications are read one by one, with better names
            elif is_mapping(model.model_fields[key].annotation) and isinstance(item, dict):
                kept[key] = {k: inside(join(join(path, key), k), each, inner) for k, each in item.items()}
            else:
                kept[key] = inside(join(path, key), item, inner)
        return kept

    def unknown(
        self, path: str, key: str, here: Collection[str], levels: list[Level], what: str = "unknown key"
    ) -> None:
        self.fault(join(path, key), what, self.hint(key, here, levels))

    def hint(self, key: str, here: Collection[str], levels: list[Level]) -> str:
        """Where ``key`` belongs, or the right key near to it."""
        if levels is MODEL_LEVELS and key in engine_args.OWNED_ENGINE_KEYS:
            return engine_args.OWNED_ENGINE_KEYS[key]
        if home := next((name for name, keys in self.all_levels(levels) if key in keys), None):
            return f"{key} belongs under {home}"
        if found := near(key, here):
            return f"did you mean {found}?"
        for name, keys in self.all_levels(levels):
            if found := near(key, keys):
                return f"did you mean {found}, under {name}?"
        return f"known here: {', '.join(here)}" if 0 < len(here) <= 12 else ""

    def all_levels(self, levels: list[Level]) -> Iterator[Level]:
        yield from levels
        if levels is MODEL_LEVELS:  # last, because loading vLLM's tables takes long
            for part in ("engine", "frontend"):
                yield f"args.{part}", self.table(part) or {}

    def validate(self, path: str, value: Any, model: type[BaseModel], *, rules: bool = True) -> set[object]:
        """The top-level keys of ``value`` that are at fault, each reported; None stands for a rule between keys."""
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model.model_validate(value)
        except ValidationError as e:
            places: dict[str, object] = {}
            for error in e.errors(include_url=False):
                if not error["loc"] and not rules:
                    continue
                where = path_of(path, error["loc"], value, error["type"] == "missing") or "file"
                if where not in places:  # a union reports each of its branches
                    self.fault(where, in_words(error))
                places[where] = error["loc"][0] if error["loc"] else None
            return set(places.values())
        except (ImportError, AttributeError, ValueError) as e:  # Serve imports the policies that a file names
            self.fault(path, f"names code that cannot be imported: {e}")
            return set()
        # Serve warns of what it will refuse one day; what it merely calls deprecated is still the way to set it.
        self.notes += [f"{path}: {w.message}" for w in caught if issubclass(w.category, FutureWarning)]
        return set()
