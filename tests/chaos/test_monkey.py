"""The schedule of faults."""

from itertools import islice
from random import Random

from tests.chaos.monkey import ALL, GATEWAY_KILLS, KILL_GATEWAY, SCALE, SCALE_DOWN, SCALE_UP, schedule


def test_a_round_holds_every_kind() -> None:
    """Each once, scaling down right before scaling up; the same order for the same seed."""
    first = list(islice(schedule(Random("1"), ALL), len(ALL) + 1))
    assert sorted(first) == sorted({*ALL, SCALE_DOWN, SCALE_UP} - {SCALE})
    assert first[first.index(SCALE_DOWN) + 1] == SCALE_UP
    assert first == list(islice(schedule(Random("1"), ALL), len(ALL) + 1))


def test_gateways_are_killed_seldom() -> None:
    """However long the run: each kill takes the answers on that gateway along."""
    for seed in range(20):
        assert list(islice(schedule(Random(seed), ALL), 100)).count(KILL_GATEWAY) == GATEWAY_KILLS
