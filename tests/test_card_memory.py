"""The card: what it makes of the reports that replicas and gateways send and send again."""

import pytest

from serve_app.lease import EngineFacts, StartReport
from serve_app.model.card_memory import SILENT_NUMBERS_S, SILENT_REPLICA_S, CardMemory
from serve_app.scaling import EngineStats

OLD = EngineFacts(tasks=("generate",), paths=frozenset(), max_model_len=1)
NEW = EngineFacts(tasks=("embed",), paths=frozenset(), max_model_len=2)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def card(clock: Clock) -> CardMemory:
    return CardMemory(slots=256, clock=clock)


def test_a_failed_start_outlives_what_older_replicas_say_again(card: CardMemory) -> None:
    """Old replicas report at every health check; the newest start is what the card tells of."""
    old = StartReport("old", 1.0, facts=OLD, seconds=10)
    card.started(old)
    card.started(StartReport("new", 2.0, error="no such file"))
    card.started(old)
    told = card.view()
    assert (told.error, told.facts, told.start_s, told.alive) == ("no such file", OLD, 10, 1)


def test_a_later_start_that_succeeds_clears_the_error(card: CardMemory) -> None:
    """Also where the old replicas are still there and speak after it."""
    old = StartReport("old", 1.0, facts=OLD, seconds=10)
    for report in (old, StartReport("bad", 2.0, error="no"), StartReport("new", 3.0, facts=NEW, seconds=20), old):
        card.started(report)
    told = card.view()
    assert (told.error, told.facts, told.start_s, told.alive) == (None, NEW, 15, 2)


def test_how_far_a_start_is_shows_until_it_is_over(card: CardMemory, clock: Clock) -> None:
    """The newest line of any replica; what one that ended has said is forgotten soon, and a silent one's too."""
    card.loading("a", "downloading: 1 GB")
    clock.now += 1
    card.loading("b", "loading for 3 s")
    assert card.view().loading == "loading for 3 s"
    card.started(StartReport("b", 1.0, facts=NEW, seconds=20))
    assert card.view().loading == "downloading: 1 GB"
    clock.now += SILENT_NUMBERS_S
    assert card.view().loading == ""


def test_who_is_silent_is_not_alive(card: CardMemory, clock: Clock) -> None:
    """A replica that missed three reports is no longer counted; what it was is still known."""
    card.started(StartReport("gone", 1.0, facts=OLD, seconds=10))
    clock.now += SILENT_REPLICA_S
    told = card.view()
    assert (told.alive, told.facts) == (0, OLD)


def test_engines_and_gateways_are_summed_and_counted_once_each(card: CardMemory) -> None:
    """Two gateways that say their number again and again add nothing; nor do engines."""
    for _ in range(3):
        card.engine("a", EngineStats(running=10, waiting=3, kv_usage=0.5))
        card.engine("b", EngineStats(running=20, waiting=0, kv_usage=0.25))
        card.held("gateway-1", 7, asleep=False)
        card.held("gateway-2", 5, asleep=False)
    signals = card.signals()
    assert (signals.replicas, signals.running, signals.waiting, signals.kv_usage) == (2, 30, 3, 0.75)
    assert (signals.held, signals.queue, signals.requests, signals.slots) == (12, 15, 45, 256)


def test_numbers_of_the_dead_expire(card: CardMemory, clock: Clock) -> None:
    """A gateway or a replica that was killed says no zero at the end."""
    card.engine("a", EngineStats(running=10))
    card.held("gateway", 7, asleep=False)
    clock.now += SILENT_NUMBERS_S
    signals = card.signals()
    assert (signals.replicas, signals.requests) == (0, 0)


def test_a_wake_is_measured_from_the_first_request_to_the_answer(card: CardMemory, clock: Clock) -> None:
    """The median of the last wakes is the estimate, and it shrinks while the model wakes."""
    for replica, seconds in (("a", 20.0), ("b", 30.0), ("c", 26.0)):
        card.held("gateway", 1, asleep=True)
        clock.now += seconds / 2
        card.held("gateway", 4, asleep=False)  # by then it starts
        assert card.view().waking_for_s == seconds / 2
        clock.now += seconds / 2
        card.started(StartReport(replica, clock.now, facts=OLD, seconds=1))
        card.held("gateway", 0, asleep=False)
    told = card.view()
    assert (told.wake_s, told.start_s, told.waking_for_s, told.ready_in_s) == (26.0, 1, None, 26.0)
    card.held("gateway", 1, asleep=True)
    clock.now += 16
    assert card.view().ready_in_s == 10.0
    clock.now += 100
    assert card.view().ready_in_s == pytest.approx(2.6), "late: never zero or less"


def test_a_wake_that_nobody_waited_for_is_not_measured(card: CardMemory, clock: Clock) -> None:
    """The only client left: when the next one comes, the start is half over."""
    card.held("gateway", 1, asleep=True)
    clock.now += 10
    card.held("gateway", 0, asleep=False)
    clock.now += 10
    card.held("gateway", 1, asleep=False)
    card.started(StartReport("a", clock.now, facts=OLD, seconds=18))
    assert (card.view().wake_s, card.view().start_s) == (None, 18)
