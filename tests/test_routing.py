"""Reusing an idle lease against asking Serve for a new one."""

from collections import Counter

from serve_app.routing import pick_idle


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
