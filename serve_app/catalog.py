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

    ``running``: replicas that answer; None where Serve does not say, as while it builds a changed application.
    ``failed``: Serve has given up deploying it. ``wanted``: replicas exist or are being made. ``updating``: Serve is
    replacing its replicas, or has given that up. ``start_failed``: ``message`` is of a replica that could not start.
    """

    name: str
    running: int | None
    wanted: bool
    failed: bool
    message: str = ""
    updating: bool = False
    start_failed: bool = False


@dataclass(frozen=True, slots=True)
class Model:
    """A model that this gateway knows. ``reason``: why it is not ready, or what goes wrong although it is; one line,
    empty where all is well."""

    name: str
    state: State
    reason: str = ""
    replicas: int = 0
    card: CardView = field(default_factory=CardView)


@dataclass(frozen=True, slots=True)
class Catalog:
    """``ids`` maps every id, adapters' too, to the name of its model; ``conflicts`` says which claims were refused.
    ``partial``: a model has not told its further ids yet, and will."""

    models: Mapping[str, Model] = field(default_factory=dict)
    ids: Mapping[str, str] = field(default_factory=dict)
    conflicts: tuple[str, ...] = ()
    partial: bool = False

    def resolve(self, asked: str) -> Model:
        """The model that ``asked`` names, letter by letter. Raises ``UnknownModel`` naming what exists; ``Unavailable``
        while not all are known."""
        name = self.ids.get(asked)
        if name is None:
            if self.partial:
                raise errors.Unavailable(
                    f"Whether the model {asked[:256]!r} exists is not known yet: not every model has told its names.",
                    param="model",
                    retry_after_s=1,
                )
            known = ", ".join(sorted(self.ids)) or "none yet"
            raise errors.UnknownModel(f"The model {asked[:256]!r} does not exist. Models here: {known}.", param="model")
        return self.models[name]

    def adapter(self, asked: str) -> str | None:
        """The folder of the adapter that ``asked`` names; None where it names a model, or nothing."""
        name = self.ids.get(asked)
        if name is None or asked == name or asked in (card := self.models[name].card).also_known_as:
            return None
        return card.adapters.get(asked)

    def one_name(self, asked: str) -> str:
        """The same for all ids of one model: its name. Adapters are ids of their own, as is what does not exist."""
        return asked if self.adapter(asked) is not None else self.ids.get(asked, asked)


def model_of(app: AppSnapshot, card: CardView) -> Model:
    """What a person should read of one application."""
    running = card.alive if app.running is None else app.running
    if running > 0:
        return Model(app.name, State.READY, _trouble(app, card), running, card)
    if app.failed:
        return Model(app.name, State.FAILED, card.error or app.message or "the deployment failed", 0, card)
    if not app.wanted and card.created:
        return Model(app.name, State.ASLEEP, "scaled to zero; a request wakes it", 0, card)
    reasons = (f"last start failed: {card.error}" if card.error else "", _progress(card), card.loading, app.message)
    return Model(app.name, State.STARTING, "; ".join(filter(None, reasons)) or "starting", 0, card)


def _progress(card: CardView) -> str:
    if card.waking_for_s is None:
        return ""
    usual = f" of usually {card.wake_s or card.start_s:.0f} s" if card.wake_s or card.start_s else " s"
    return f"waking for {card.held} request{'s' * (card.held != 1)}: {card.waking_for_s:.0f}{usual}"


def _trouble(app: AppSnapshot, card: CardView) -> str:
    """What goes wrong beside the replicas that answer."""
    if card.error:
        return f"{'the new version' if app.updating else 'a further replica'} cannot start: {card.error}"
    if app.updating and app.message:
        # A card that is made anew with the version has perhaps not heard of its failed start: Serve has.
        cannot = app.failed or app.start_failed
        return f"{'the new version cannot start' if cannot else 'not every replica runs yet'}: {app.message}"
    return ""


def build(models: Iterable[Model], before: Catalog) -> Catalog:
    """The catalog of ``models``. Who held an id in ``before`` keeps it; else a name beats a further id."""
    by_name = {model.name: model for model in sorted(models, key=lambda m: m.name)}
    claims = [(name, name) for name in by_name]
    claims += [(alias, name) for name, model in by_name.items() for alias in model.card.also_known_as]
    claims += [(adapter, name) for name, model in by_name.items() for adapter in model.card.adapters]
    # Stable: among equals, names come before aliases and those before adapters, then alphabetical.
    claims.sort(key=lambda claim: before.ids.get(claim[0]) != claim[1])
    ids: dict[str, str] = {}
    conflicts = []
    for asked, name in claims:
        if ids.setdefault(asked, name) != name:
            conflicts.append(f"{name} claims the id {asked!r}, which {ids[asked]} keeps")
    partial = any(not m.card.created and m.state is not State.FAILED for m in by_name.values())
    return Catalog(by_name, ids, tuple(conflicts), partial)
