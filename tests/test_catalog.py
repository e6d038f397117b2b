"""Names: letter by letter, one owner per id."""

import pytest

from serve_app import catalog, errors
from serve_app.catalog import AppSnapshot, Catalog, Model, State
from serve_app.lease import CardView


def entry(name: str, *aliases: str) -> Model:
    return Model(name, State.READY, "", 1, CardView(also_known_as=aliases, created=1))


@pytest.mark.parametrize("asked", ["Chat", "chat ", "cha", "org/chat/", "", "org"])
def test_near_misses_are_unknown(asked: str) -> None:
    """A name that differs in case, in a space or in its end is nobody's, never another model's."""
    built = catalog.build([entry("chat", "org/chat")], Catalog())
    with pytest.raises(errors.UnknownModel, match="chat, org/chat"):
        built.resolve(asked)


def test_every_id_finds_its_model() -> None:
    """Names and further ids lead to the same model."""
    built = catalog.build([entry("chat", "org/chat"), entry("code")], Catalog())
    assert built.resolve("org/chat").name == built.resolve("chat").name == "chat"
    assert built.resolve("code").name == "code"
    assert built.conflicts == ()


def test_first_holder_keeps_a_contested_id() -> None:
    """Whoever held an id keeps it when another model claims it later, and the conflict is told."""
    before = catalog.build([entry("zeta", "shared")], Catalog())
    built = catalog.build([entry("alpha", "shared"), entry("zeta", "shared")], before)
    assert built.ids["shared"] == "zeta"
    assert built.conflicts == ("alpha claims the id 'shared', which zeta keeps",)


def test_a_name_beats_a_further_id() -> None:
    """With no history, an application's own name wins over another's alias of that name."""
    built = catalog.build([entry("alpha", "beta"), entry("beta")], Catalog())
    assert built.ids["beta"] == "beta"
    assert len(built.conflicts) == 1


def test_an_id_is_free_again_when_its_holder_is_gone() -> None:
    """Removing the holder hands the id to the other claimant."""
    before = catalog.build([entry("zeta", "shared")], Catalog())
    assert catalog.build([entry("alpha", "shared")], before).ids["shared"] == "alpha"


def test_adapters_are_ids_of_their_own() -> None:
    """Each leads to its base, has a folder, and is no other name of it; whose id it is already keeps it."""
    chat = CardView(also_known_as=("org/chat",), adapters={"sql": "/a/sql", "code": "/a/code"}, created=1)
    built = catalog.build([Model("chat", State.READY, "", 1, chat), entry("code")], Catalog())
    assert built.ids == {"chat": "chat", "org/chat": "chat", "sql": "chat", "code": "code"}
    assert built.conflicts == ("chat claims the id 'code', which code keeps",)
    assert {asked: built.adapter(asked) for asked in ("sql", "chat", "org/chat", "code", "none")} == {
        "sql": "/a/sql",
        "chat": None,
        "org/chat": None,
        "code": None,
        "none": None,
    }
    assert [built.one_name(asked) for asked in ("sql", "org/chat", "chat", "none")] == ["sql", "chat", "chat", "none"]


@pytest.mark.parametrize(
    ("app", "card", "state"),
    [
        (AppSnapshot("m", running=2, wanted=True, failed=False), CardView(), State.READY),
        (AppSnapshot("m", running=1, wanted=True, failed=True), CardView(), State.READY),
        (AppSnapshot("m", running=None, wanted=True, failed=True), CardView(alive=1), State.READY),
        (AppSnapshot("m", running=None, wanted=True, failed=True), CardView(), State.FAILED),
        (AppSnapshot("m", running=0, wanted=True, failed=False), CardView(), State.STARTING),
        (AppSnapshot("m", running=0, wanted=False, failed=False), CardView(created=1), State.ASLEEP),
        (AppSnapshot("m", running=0, wanted=False, failed=False), CardView(), State.STARTING),
        (AppSnapshot("m", running=0, wanted=True, failed=True), CardView(error="no such file"), State.FAILED),
    ],
)
def test_states(app: AppSnapshot, card: CardView, state: State) -> None:
    """What Serve says becomes one of four states; a failed update with old replicas alive is still ready."""
    assert catalog.model_of(app, card).state is state


@pytest.mark.parametrize(("state", "partial"), [(State.STARTING, True), (State.READY, True), (State.FAILED, False)])
def test_no_name_is_unknown_before_all_are_told(state: State, partial: bool) -> None:
    """While a model's card has not been heard, a name that nobody has may be its further id: try again, rather than
    404. One that failed for good has no card to wait for."""
    built = catalog.build([entry("chat"), Model("new", state)], Catalog())
    assert built.resolve("chat").name == "chat"
    with pytest.raises(errors.Unavailable if partial else errors.UnknownModel) as refused:
        built.resolve("org/new")
    assert refused.value.retry_after_s == (1 if partial else None)


def test_a_failure_says_why() -> None:
    """The replica's own cause is what people read, rather than Serve's summary."""
    app = AppSnapshot("m", running=0, wanted=True, failed=True, message="The deployment failed to start 3 times.")
    assert catalog.model_of(app, CardView(error="no such file")).reason == "no such file"
    assert "3 times" in catalog.model_of(app, CardView()).reason


@pytest.mark.parametrize(
    ("app", "card", "reason"),
    [
        (AppSnapshot("m", 1, wanted=True, failed=False), CardView(), ""),
        (
            AppSnapshot("m", 1, wanted=True, failed=False, message="busy", updating=True),
            CardView(),
            "not every replica",
        ),
        (AppSnapshot("m", 1, wanted=True, failed=False, updating=True), CardView(error="no file"), "the new version"),
        (AppSnapshot("m", 1, wanted=True, failed=False), CardView(error="no file"), "a further replica cannot start"),
        (AppSnapshot("m", 1, wanted=True, failed=True, message="no", updating=True), CardView(), "the new version"),
        (
            AppSnapshot("m", 1, wanted=True, failed=False, message="no", updating=True, start_failed=True),
            CardView(),
            "the new version cannot start",
        ),
    ],
)
def test_a_ready_model_says_what_goes_wrong_beside_it(app: AppSnapshot, card: CardView, reason: str) -> None:
    """Old replicas that answer do not hide that their successors cannot; where all is well there is nothing to say."""
    told = catalog.model_of(app, card)
    assert (told.state, told.replicas) == (State.READY, 1)
    assert told.reason.startswith(reason)
    assert bool(told.reason) == bool(reason)
    assert told.reason.endswith(card.error or app.message)
