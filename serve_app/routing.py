"""How a gateway chooses among what it holds, and which replica it would choose for a request. Pure.

Serve's own router chooses the replica of a *new* lease (by queue length). Here: may a request reuse a lease that this
gateway already holds, or should it ask Serve for another?
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from serve_app.prefixes import NOTHING, Memory, Prefix

# How many more requests than the least busy replica a replica may carry before an idle lease on it is passed over.
# One is noise; with two the difference is real.
SLACK = 2
# A replica above this multiple of the mean load gets no request for its prefix' sake, unless the request would still
# leave it within SLACK of the mean: where there are few, one more is a multiple.
OVER_MEAN = 1.25
# A replica that has seen less of a request than this is no better than any other: all have seen a system prompt, and
# whoever has seen it first must not get every new conversation.
ENOUGH = 0.25
# A longer request that nobody has seen is probably one of a conversation, which will stay where it begins: it goes to
# the best replica even if that costs a lease of its own, else all would begin where the last request has just ended.
SHORT_BLOCKS = 4


def pick_idle(idle: Sequence[str], in_use: Mapping[str, int], replicas: int) -> int | None:
    """The index in ``idle`` of the lease to reuse, or None to ask Serve for a new one.

    ``idle``: the replica of each idle lease, oldest first. ``in_use``: requests under way per replica, from this
    gateway. ``replicas``: how many replicas Serve says are running; one without any lease here counts as unused.
    """
    if not idle:
        return None
    best = min(range(len(idle)), key=lambda i: in_use.get(idle[i], 0))
    known = set(idle) | {replica for replica, n in in_use.items() if n}
    least = 0 if len(known) < replicas else min(in_use.get(replica, 0) for replica in known)
    return best if in_use.get(idle[best], 0) - least < SLACK else None


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. ``loads``: what each running replica of its model carries now, in requests. ``held``: the share of
    the request's prefix that a replica has seen. ``turn``: the number of the request."""

    loads: Mapping[str, int]
    held: Mapping[str, float] = field(default_factory=dict)
    turn: int = 0


def round_robin(asked: Asked) -> list[str]:
    """Each in turn, whatever it carries."""
    names = sorted(asked.loads)
    first = asked.turn % len(names) if names else 0
    return names[first:] + names[:first]


def least_loaded(asked: Asked) -> list[str]:
    """Who carries least; among equals each in turn."""
    return sorted(round_robin(asked), key=lambda replica: asked.loads[replica])


def longest_prefix(asked: Asked) -> list[str]:
    """Who has seen most of the request, as long as it has room; among equals the least loaded."""

    def seen(replica: str) -> float:
        share = asked.held.get(replica, 0.0)
        return share if share >= ENOUGH else 0.0

    by_load = least_loaded(asked)
    mean = sum(asked.loads.values()) / max(1, len(by_load))
    with_room = [replica for replica in by_load if has_room(asked.loads[replica], mean)]
    return sorted(with_room, key=seen, reverse=True) + by_load[len(with_room) :]


def has_room(load: int, mean: float) -> bool:
    """Whether a replica with ``load`` may get a request for what it has seen. The least loaded one always may."""
    return load <= OVER_MEAN * mean or load + 1 <= mean + SLACK


Strategy = Callable[[Asked], list[str]]
# Each returns all replicas of ``loads``, the best first.
STRATEGIES: Mapping[str, Strategy] = {
    "least_loaded": least_loaded,
    "round_robin": round_robin,
    "prefix": longest_prefix,
}


class Ranking:
    """One model's, in one gateway: a strategy by name, and what it has to remember between requests."""

    def __init__(self, strategy: str) -> None:
        if strategy not in STRATEGIES:
            raise ValueError(f"unknown strategy {strategy!r}; there are {', '.join(STRATEGIES)}")
        self.name = strategy
        self._strategy = STRATEGIES[strategy]
        self._memory = Memory()
        self._turn = -1

    def rank(self, loads: Mapping[str, int], prefix: Prefix = NOTHING) -> list[str]:
        """The replicas of ``loads``, the best for this request first."""
        self._turn += 1
        return self._strategy(Asked(loads, self._memory.held(prefix), self._turn))

    def preferred(self, loads: Mapping[str, int], prefix: Prefix) -> str | None:
        """The replica that is worth a way of its own for this request; None: whoever is least busy will do."""
        if self.name == "least_loaded" or len(loads) < 2:
            return None
        if self.name == "prefix":
            known = max(self._memory.held(prefix).values(), default=0.0) >= ENOUGH
            if not known and len(prefix.hashes) <= SHORT_BLOCKS:
                return None
        return self.rank(loads, prefix)[0]

    def given(self, replica: str, hashes: Sequence[int], running: Collection[str]) -> None:
        """``replica`` got a request with this prefix, from this gateway or, as told, from another one."""
        self._memory.remember(hashes, replica, running)
