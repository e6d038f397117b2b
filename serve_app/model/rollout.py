"""How a changed model is rolled: new replica first, or old replica first. Pure: what is free goes in, an answer out.

Serve does the rolling; ``max_surge_percent`` is its option for it. Above 0 the old replicas serve until their
successors answer, and a new version that cannot start takes nothing away; but where the successor finds no room, the
update waits for as long as that takes. So it is asked for only where one more replica fits into what is free.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from serve_app.model.placement import Placement, total
from serve_app.planning.nodes import ACCELERATOR, Need, Node, matches

# Percent of the replicas, rounded up by Serve: one more at a time, for one is what we look for room for.
NEW_FIRST = 1
OLD_FIRST = 0
# Ray counts resources in steps of 1/10,000.
_LESS_THAN_RAY_COUNTS = 1e-5


@dataclass(frozen=True, slots=True)
class Rollout:
    """``max_surge_percent``: Serve's deployment option. ``why``: one line for the log."""

    max_surge_percent: int
    why: str


def rollout(where: Placement, free: Sequence[Node] | None) -> Rollout:
    """``free``: the nodes, with what nobody uses; None where the cluster could not be read.

    Free shares of several GPUs of one node look like one GPU here, as they do in Ray's own sums.
    """
    if free is None:
        return Rollout(OLD_FIRST, "updates stop the old replica first: what is free in the cluster is not known")
    asked = where.needs
    if room_for(where, free, most=1):
        return Rollout(NEW_FIRST, f"updates start the new replica first: {_words(asked)} fits into what is free")
    return Rollout(OLD_FIRST, f"updates stop the old replica first: there is no room for another {_words(asked)}")


def room_for(where: Placement, free: Sequence[Node], most: int = 64) -> int:
    """How many more replicas fit into what is ``free``, counted up to ``most``."""
    left = [dict(node.resources) for node in free]
    return next((count for count in range(most) if not _take(where.needs, free, left)), most)


def _take(needs: Sequence[Need], nodes: Sequence[Node], left: Sequence[dict[str, float]]) -> bool:
    """Whether ``needs`` fit into what the nodes have ``left``, which is less by them afterwards."""
    for need in needs:
        room = next((room for node, room in zip(nodes, left, strict=True) if _holds(node, room, need)), None)
        if room is None:
            return False
        for name, amount in need.resources.items():
            room[name] = room.get(name, 0.0) - amount
    return True


def _holds(node: Node, left: dict[str, float], need: Need) -> bool:
    return matches(need.labels, node.labels) and all(
        left.get(name, 0.0) >= amount - _LESS_THAN_RAY_COUNTS for name, amount in need.resources.items()
    )


def _words(needs: Sequence[Need]) -> str:
    amounts = {name: amount for name, amount in total([need.resources for need in needs]).items() if amount}
    words = ", ".join(f"{name} {amount:g}" for name, amount in amounts.items() if not name.startswith(ACCELERATOR))
    return f"replica ({words or 'no resources'}{'' if len(needs) == 1 else ' over several nodes'})"
