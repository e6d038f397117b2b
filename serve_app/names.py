"""What a name of the gateway's own means: the models to ask, in order, and what changes in the request. Pure."""

import contextlib
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from serve_app import errors
from serve_app.catalog import Catalog, Model, State
from serve_app.config import LENGTH_FIELDS, Name
from serve_app.keys import Caller

# How each route that generates calls the bound on an answer's length; the first one is set where a request has none.
_LENGTHS = {
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/completions": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
    "/v1/messages": ("max_tokens",),
}
# What an absent bound means in the protocol itself; elsewhere it means as long as the context has room.
_PROTOCOL_DEFAULTS = {"/v1/completions": 16}


@dataclass(frozen=True, slots=True)
class Choice:
    """``targets``: models and adapters to ask in this order, all but the first only where those before cannot serve;
    some may not exist. ``name``: what changes in the request; None where a model was asked by an id of its own."""

    targets: tuple[str, ...]
    name: Name | None = None


@dataclass(frozen=True, slots=True)
class Names:
    """``models``: what exists. ``held``: the names that mean something now. ``catalog``: ``models`` with the names
    among its ids, each as the first of its models that has not failed, the heaviest first; and what is wrong with names
    among its conflicts."""

    models: Catalog = field(default_factory=Catalog)
    held: Mapping[str, Name] = field(default_factory=dict)
    catalog: Catalog = field(default_factory=Catalog)

    def resolve(self, asked: str, caller: Caller) -> Model:
        """What ``asked`` means, as far as ``caller`` may know; raises ``Forbidden`` or ``UnknownModel``."""
        caller.check(asked, self._model_of(asked))
        if asked not in self.catalog.ids:
            return self.seen_by(caller).resolve(asked)
        return self.catalog.resolve(asked)

    def listed(self, caller: Caller) -> dict[str, Model]:
        """Every id that ``caller`` may ask for, with the model that answers to it."""
        return {asked: self.catalog.models[to] for asked, to in self.seen_by(caller).ids.items()}

    def seen_by(self, caller: Caller) -> Catalog:
        """What ``caller`` may know of. Its ids may lead to models that are not in it."""
        if caller.models is None:
            return self.catalog
        ids = {asked: to for asked, to in self.catalog.ids.items() if caller.may(asked, self._model_of(asked))}
        own = {to for asked, to in ids.items() if asked not in self.held and self.models.adapter(asked) is None}
        return Catalog({to: self.catalog.models[to] for to in sorted(own)}, ids, partial=self.catalog.partial)

    def _model_of(self, asked: str) -> str | None:
        """A key for a model is good for the model's further ids, and neither for its adapters, which may be somebody
        else's, nor for names that may lead there."""
        return self.models.one_name(asked) if asked in self.models.ids else None

    def choose(self, asked: str, who: str) -> Choice:
        """``who``: a request with the same one, usually of the same user, gets the same choice. Raises
        ``UnknownModel``."""
        model = self.catalog.resolve(asked)
        name = self.held.get(asked)
        if name is None:
            return Choice((asked if self.models.adapter(asked) else model.name,))
        # The share of a model that does not exist now is the others'.
        there = {target: weight for target, weight in name.weights.items() if target in self.models.ids}
        chosen = pick(asked, who, there or name.weights)
        targets = dict.fromkeys(map(self.models.one_name, (chosen, *name.fallback)))
        return Choice(tuple(targets), name)


def build(models: Catalog, names: Mapping[str, Name]) -> Names:
    """What ``names`` mean where ``models`` exist. A model's own id wins against a name."""
    held: dict[str, Name] = {}
    ids = dict(models.ids)
    conflicts = list(models.conflicts)
    for asked, name in names.items():
        if asked in models.ids:
            conflicts.append(f"the name {asked!r} is an id of {models.ids[asked]}, which keeps it")
            continue
        there = [target for target in name.targets if target in models.ids]
        conflicts += [
            f"the name {asked!r} leads to {target!r}, which does not exist now"
            for target in name.targets
            if target not in there
        ]
        if there:
            held[asked] = name
            able = (target for target in there if models.resolve(target).state is not State.FAILED)
            ids[asked] = models.ids[next(able, there[0])]
    return Names(models, held, replace(models, ids=ids, conflicts=tuple(conflicts)))


def pick(asked: str, who: str, weights: Mapping[str, float]) -> str:
    """One of ``weights``, always the same for the same ``who``.

    Weighted rendezvous hashing: a weight that grows takes users from the others and moves nobody between those.
    """

    def distance(target: str) -> float:
        hashed = hashlib.blake2b(f"{asked}\0{target}\0{who}".encode(errors="backslashreplace"), digest_size=8).digest()
        return -math.log((int.from_bytes(hashed) + 1) / (2**64 + 1)) / weights[target]

    return min(weights, key=distance)


def cannot_serve(error: errors.ModelyardError) -> bool:
    """Whether another model may be asked: this one does not exist any more, has no replica or too long a queue. What
    an engine says of a request stands."""
    if isinstance(error, errors.TooManyRequests):
        return error.code == errors.TooManyRequests.code
    return isinstance(error, errors.Unavailable | errors.UnknownModel)


def apply(body: bytes, path: str, name: Name) -> bytes | None:
    """``body`` (a JSON object) with ``name``'s defaults and cap; None where nothing changes.

    What the request says stays as it was written, to the letter. Null counts as not given. Raises ``InvalidRequest``
    where a bound that is capped is no number, and where a field's name is no UTF-8.
    """
    if not name.defaults and name.max_tokens is None:
        return None
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):  # fields that the gateway does not look at were not read before
        raise errors.InvalidRequest("The body is not valid JSON.") from None
    changes = _changes(fields, path, name)
    return msgspec.json.encode(fields | changes) if changes else None


def _changes(fields: Mapping[str, msgspec.Raw], path: str, name: Name) -> dict[str, Any]:
    given = {key for key, raw in fields.items() if bytes(raw) != b"null"}
    changes: dict[str, Any] = {
        key: value for key, value in name.defaults.items() if key not in given and key not in LENGTH_FIELDS
    }
    if not (lengths := _LENGTHS.get(path)):
        return changes
    cap = name.max_tokens
    asked = [key for key in lengths if key in given]
    if cap is not None:
        changes |= {key: cap for key in asked if _number(key, fields[key]) > cap}
    if not asked:
        bound = next((name.defaults[key] for key in LENGTH_FIELDS if key in name.defaults), None)
        if bound is None and cap is not None:
            bound = _PROTOCOL_DEFAULTS.get(path, cap)
        if isinstance(bound, int):
            changes[lengths[0]] = bound if cap is None else min(bound, cap)
    return changes


def _number(key: str, raw: msgspec.Raw) -> float:
    """Only a number can be compared with a cap, and an engine would read "5000" as one."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(bytes(raw))
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
    raise errors.InvalidRequest(f"`{key}` must be a whole number.", param=key)
