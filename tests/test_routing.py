"""Reusing an idle lease against asking Serve for a new one, and the strategies that rank replicas."""

import statistics
from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.prefixes import NOTHING, Prefix
from serve_app.routing import STRATEGIES, Asked, Ranking, longest_prefix, pick_idle, round_robin


def test_nothing_idle_means_a_new_lease() -> None:
    """Without an idle lease there is nothing to reuse."""
    assert pick_idle([], {"a": 3}, 2) is None


def test_the_least_busy_replica_is_reused() -> None:
    """Of several idle leases the one on the replica with the fewest requests is taken."""
    assert pick_idle(["a", "b", "a"], {"a": 2, "b": 1}, 2) == 1


def test_an_unused_replica_is_not_starved() -> None:
    """A replica that this gateway holds no lease on counts as idle, so load spreads to it."""
    assert pick_idle(["a"], {"a": 2}, 2) is None
    assert pick_idle(["a"], {"a": 2}, 1) == 0


def test_a_difference_of_one_is_noise() -> None:
    """A lease at hand is worth more than a difference of one request."""
    assert pick_idle(["a"], {"a": 1}, 2) == 0


def test_load_stays_even() -> None:
    """Requests that come and go over pooled leases never pile up on one replica by more than the slack."""
    in_use: Counter[str] = Counter()
    idle = ["a"] * 8 + ["b"] * 8
    for _ in range(16):
        at = pick_idle(idle, in_use, 2)
        assert at is not None
        in_use[idle.pop(at)] += 1
        assert abs(in_use["a"] - in_use["b"]) <= 1


replicas = st.dictionaries(st.text("abcdefgh", min_size=1, max_size=3), st.integers(0, 40), min_size=1, max_size=16)
one_prefix = st.lists(st.integers(0, 9), max_size=5).map(lambda h: Prefix(tuple(h), tuple(range(1, len(h) + 1))))


def full(load: int, loads: Mapping[str, int]) -> bool:
    """Above 1.25 times the mean, and by more than the one request that is noise."""
    mean = statistics.fmean(loads.values())
    return load > max(1.25 * mean, mean + 1)


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(st.lists(st.tuples(replicas, one_prefix), max_size=20))
def test_every_strategy_ranks_every_replica_once(strategy: str, requests: list[tuple[dict[str, int], Prefix]]) -> None:
    """Whatever went before, whoever came and left: a permutation of the replicas that run."""
    ranking = Ranking(strategy)
    assert ranking.rank({}) == []
    for loads, prefix in requests:
        order = ranking.rank(loads, prefix)
        assert sorted(order) == sorted(loads)
        ranking.given(order[-1], prefix.hashes, loads)


@given(replicas, st.data())
def test_no_prefix_is_worth_more_than_the_bound(loads: dict[str, int], data: st.DataObject) -> None:
    """The first choice is not full, whatever it has seen, and who is full comes after all others."""
    held = data.draw(st.dictionaries(st.sampled_from(sorted(loads)), st.floats(0, 1)))
    order = longest_prefix(Asked(loads, held, data.draw(st.integers(0, 99))))
    are_full = [full(loads[replica], loads) for replica in order]
    assert not are_full[0]
    assert are_full == sorted(are_full)


@given(st.lists(st.tuples(one_prefix, st.integers(0, 30)), min_size=1, max_size=60), st.integers(1, 6))
def test_load_stays_under_the_bound(requests: list[tuple[Prefix, int]], members: int) -> None:
    """Requests that come and go: whoever is full gets none, so nobody is ever more than one above the bound."""
    ranking = Ranking("prefix")
    loads = {f"r{i}": 0 for i in range(members)}
    for prefix, leaving in requests:
        best = ranking.rank(loads, prefix)[0]
        ranking.given(best, prefix.hashes, loads)
        assert not full(loads[best], loads)
        loads[best] += 1
        if loads[done := f"r{leaving % members}"]:
            loads[done] -= 1


@given(replicas, one_prefix.filter(lambda p: len(p.hashes) > 0), st.data())
def test_the_same_prefix_goes_to_the_same_replica_while_it_has_room(
    loads: dict[str, int], prefix: Prefix, data: st.DataObject
) -> None:
    """Also where another replica carries less, and has seen other texts."""
    ranking = Ranking("prefix")
    home = data.draw(st.sampled_from(sorted(loads)))
    for replica in loads:
        ranking.given(replica, (100,), loads)
    ranking.given(home, prefix.hashes, loads)
    assert (ranking.rank(loads, prefix)[0] == home) == (not full(loads[home], loads))


@given(replicas, st.dictionaries(st.integers(0, 99), st.text("abcdefgh", min_size=1, max_size=3)), st.data())
def test_a_replica_that_leaves_moves_only_its_own_prefixes(
    loads: dict[str, int], homes: dict[int, str], data: st.DataObject
) -> None:
    """All others stay where they are."""
    ranking = Ranking("prefix")
    loads = dict.fromkeys((*loads, *homes.values()), 1)
    for block, home in homes.items():
        ranking.given(home, (block,), loads)
    gone = data.draw(st.sampled_from(sorted(loads)))
    left = {replica: n for replica, n in loads.items() if replica != gone}
    for block, home in homes.items():
        order = ranking.rank(left, Prefix((block,), (1,)))
        assert home == gone or order[0] == home


def test_a_new_conversation_is_not_drawn_to_a_system_prompt() -> None:
    """A short beginning that one replica has seen does not count; half of the request does."""
    loads = {"a": 1, "b": 0}
    assert longest_prefix(Asked(loads, {"a": 0.2}))[0] == "b"
    assert longest_prefix(Asked(loads, {"a": 0.5}))[0] == "a"
    assert longest_prefix(Asked(loads, {"a": 0.5, "b": 0.6}))[0] == "b"


def test_a_full_home_gives_its_overflow_to_the_next_that_has_seen_most() -> None:
    """Then the requests' prefix has two homes, and the less loaded one is preferred."""
    ranking = Ranking("prefix")
    loads, prefix = {"a": 3, "b": 0, "c": 0}, Prefix((1,), (1,))
    ranking.given("a", prefix.hashes, loads)
    second = ranking.rank(loads, prefix)[0]
    assert second != "a"
    ranking.given(second, prefix.hashes, loads)
    assert ranking.rank({"a": 1, "b": 1, "c": 0} | {second: 0}, prefix)[0] == second
    assert ranking.rank({"a": 0, "b": 1, "c": 1}, prefix)[0] == "a"


def test_equals_get_their_turns() -> None:
    """Without load and without a prefix no replica is first more often than another; round robin heeds no load."""
    for strategy in STRATEGIES:
        ranking = Ranking(strategy)
        assert Counter(ranking.rank({"a": 0, "b": 0, "c": 0})[0] for _ in range(30)) == {"a": 10, "b": 10, "c": 10}
    assert [round_robin(Asked({"a": 9, "b": 0}, turn=turn))[0] for turn in range(4)] == ["a", "b", "a", "b"]


def test_an_unknown_strategy_says_which_there_are() -> None:
    """When it is made, not with the first request."""
    with pytest.raises(ValueError, match=r"'prefixes'; there are least_loaded, round_robin, prefix"):
        Ranking("prefixes")


def test_what_is_worth_a_lease_of_its_own() -> None:
    """A replica that has seen enough of it; a long text that nobody has seen, in turn among equals; not a short one,
    and nothing where replicas are all the same to the strategy."""
    loads = {"a": 1, "b": 1}
    short, long = Prefix((1,), (1,)), Prefix(tuple(range(10, 20)), tuple(range(1, 11)))
    ranking = Ranking("prefix")
    assert ranking.preferred(loads, short) is None
    assert {ranking.preferred(loads, long) for _ in range(2)} == {"a", "b"}
    assert ranking.preferred({"a": 0}, long) is None
    ranking.given("b", short.hashes, loads)
    assert [ranking.preferred(loads, short) for _ in range(2)] == ["b", "b"]
    assert ranking.preferred({"a": 0, "b": 9}, short) == "a"
    assert Ranking("least_loaded").preferred(loads, long) is None
    turns = Ranking("round_robin")
    assert [turns.preferred(loads, NOTHING) for _ in range(4)] == ["a", "b", "a", "b"]
