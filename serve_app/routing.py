"""How a gateway chooses among what it holds. Pure.

Serve's own router chooses the replica of a *new* lease (by queue length). Here: may a request reuse a lease that this
gateway already holds, or should it ask Serve for another?
"""

from collections.abc import Mapping, Sequence

# How many more requests than the least busy replica a replica may carry before an idle lease on it is passed over.
# One is noise; with two the difference is real.
SLACK = 2


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
