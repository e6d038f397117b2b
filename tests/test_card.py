"""The card: what it makes of the reports that replicas send and send again."""

import sys

import pytest

from serve_app.lease import EngineFacts, StartReport
from serve_app.model.app import Card

OLD = EngineFacts(tasks=("generate",), paths=frozenset(), max_model_len=1)
NEW = EngineFacts(tasks=("embed",), paths=frozenset(), max_model_len=2)


@pytest.fixture
def card() -> Card:
    made: Card = Card.func_or_class(None)  # type: ignore[attr-defined]
    return made


async def test_a_failed_start_outlives_what_older_replicas_say_again(card: Card) -> None:
    """Old replicas report at every health check; the newest start is what the card tells of."""
    old = StartReport("old", 1.0, facts=OLD, seconds=10)
    await card.report(old)
    await card.report(StartReport("new", 2.0, error="no such file"))
    await card.report(old)
    told = await card.card()
    assert (told.error, told.facts, told.start_s, told.alive) == ("no such file", OLD, 10, 1)


async def test_a_later_start_that_succeeds_clears_the_error(card: Card) -> None:
    """Also where the old replicas are still there and speak after it."""
    old = StartReport("old", 1.0, facts=OLD, seconds=10)
    for report in (old, StartReport("bad", 2.0, error="no"), StartReport("new", 3.0, facts=NEW, seconds=20), old):
        await card.report(report)
    told = await card.card()
    assert (told.error, told.facts, told.start_s, told.alive) == (None, NEW, 15, 2)


async def test_who_is_silent_is_not_alive(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that missed three reports is no longer counted; what it was is still known."""
    await card.report(StartReport("gone", 1.0, facts=OLD, seconds=10))
    monkeypatch.setattr(sys.modules[Card.func_or_class.__module__], "SILENT_S", 0.0)  # type: ignore[attr-defined]
    told = await card.card()
    assert (told.alive, told.facts) == (0, OLD)
