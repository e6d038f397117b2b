"""Which names exist and which model each one means. Pure: snapshots in, a ``Catalog`` out."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from serve_app import errors
from serve_app.lease import CardView


class State(StrEnum):
    READY = "ready"  # at least one replica answers
    STARTING = "starting"
    ASLEEP = "asleep"  # scaled to zero on purpose; a request wakes it
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class AppSnapshot:
    """One model application as Serve sees it, in plain words.

    ``failed``: Serve has given up deploying it. ``wanted``: replicas exist or are being made.
    """

    name: str
    running: int
    wanted: bool
    failed: bool
    message: str = ""


@dataclass(frozen=True, slots=True)
class Model:
    """A model that this gateway knows. ``reason``: why it is not ready, one line, empty when it is."""

    name: str
    state: State
    reason: str = ""
    replicas: int = 0
    card: CardView = field(default_factory=CardView)


@dataclass(frozen=True, slots=True)
class Catalog:
    """``ids`` maps every id to the name of its model; ``conflicts`` says which claims were refused."""

    models: Mapping[str, Model] = field(default_factory=dict)
    ids: Mapping[str, str] = field(default_factory=dict)
    conflicts: tuple[str, ...] = ()

    def resolve(self, asked: str) -> Model:
        """The model that ``asked`` names, letter by letter; raises ``UnknownModel`` naming what exists."""
        name = self.ids.get(asked)
        if name is None:
            known = ", ".join(sorted(self.ids)) or "none yet"
            raise errors.UnknownModel(f"The model {asked[:256]!r} does not exist. Models here: {known}.", param="model")
        return self.models[name]


def model_of(app: AppSnapshot, card: CardView) -> Model:
    """What a person should read of one application."""
    if app.running > 0:
        return Model(app.name, State.READY, "", app.running, card)
    if app.failed:
        return Model(app.name, State.FAILED, card.error or app.message or "the deployment failed", 0, card)
    if not app.wanted:
        return Model(app.name, State.ASLEEP, "scaled to zero; a request wakes it", 0, card)
    reason = f"last start failed: {card.error}" if card.error else app.message or "starting"
    return Model(app.name, State.STARTING, reason, 0, card)


def build(models: Iterable[Model], before: Catalog) -> Catalog:
    """The catalog of ``models``. Who held an id in ``before`` keeps it; else a name beats a further id."""
    by_name = {model.name: model for model in sorted(models, key=lambda m: m.name)}
    claims = [(name, name) for name in by_name]
    claims += [(alias, name) for name, model in by_name.items() for alias in model.card.also_known_as]
    # Stable: among equals, names come before aliases, then alphabetical.
    claims.sort(key=lambda claim: before.ids.get(claim[0]) != claim[1])
    ids: dict[str, str] = {}
    conflicts = []
    for asked, name in claims:
        if ids.setdefault(asked, name) != name:
            conflicts.append(f"{name} claims the id {asked!r}, which {ids[asked]} keeps")
    return Catalog(by_name, ids, tuple(conflicts))
