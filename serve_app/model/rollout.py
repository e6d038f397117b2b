"""How a changed model is rolled: new replica first, or old replica first. Pure: what is free goes in, an answer out.

Serve does the rolling; ``max_surge_percent`` is its option for it. Above 0 the old replicas serve until their
successors answer, and a new version that cannot start takes nothing away; but where the successor finds no room, the
update waits for as long as that takes. So it is asked for only where one more replica fits into what is free.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from serve_app.model.placement import Placement

# Percent of the replicas, rounded up by Serve: one more at a time, for one is what we look for room for.
NEW_FIRST = 1
OLD_FIRST = 0
# Ray counts resources in steps of 1/10,000.
_LESS_THAN_RAY_COUNTS = 1e-5

Bundle = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Rollout:
    """``max_surge_percent``: Serve's deployment option. ``why``: one line for the log."""

    max_surge_percent: int
    why: str


def rollout(where: Placement, free: Mapping[str, Bundle] | None) -> Rollout:
    """``free``: what nobody uses, by node and Ray resource name; None where the cluster could not be read.

    Free shares of several GPUs of one node look like one GPU here, as they do in Ray's own sums.
    """
    if free is None:
        return Rollout(OLD_FIRST, "updates stop the old replica first: what is free in the cluster is not known")
    asked = _asked(where)
    if room_for(where, free, most=1):
        return Rollout(NEW_FIRST, f"updates start the new replica first: {_words(asked)} fits into what is free")
    return Rollout(OLD_FIRST, f"updates stop the old replica first: there is no room for another {_words(asked)}")


def room_for(where: Placement, free: Mapping[str, Bundle], most: int = 64) -> int:
    """How many more replicas fit into what is ``free``, counted up to ``most``."""
    asked = _asked(where)
    nodes = [dict(node) for node in free.values()]
    return next((count for count in range(most) if not _take(asked, nodes)), most)


def _asked(where: Placement) -> list[Bundle]:
    """What one replica takes; each element has to fit on one node."""
    if where.bundles is None:
        actor = where.actor_options
        kind = {f"accelerator_type:{actor['accelerator_type']}": 0.001} if "accelerator_type" in actor else {}
        return [{"CPU": actor["num_cpus"], "GPU": actor["num_gpus"]} | actor.get("resources", {}) | kind]
    if where.strategy == "STRICT_PACK":
        return [_sum(where.bundles)]
    return list(where.bundles)


def _take(bundles: Sequence[Bundle], nodes: Sequence[dict[str, float]]) -> bool:
    """Whether ``bundles`` fit into what ``nodes`` have left, which is less by them afterwards."""
    for bundle in bundles:
        node = next((node for node in nodes if _holds(node, bundle)), None)
        if node is None:
            return False
        for name, amount in bundle.items():
            node[name] = node.get(name, 0.0) - amount
    return True


def _holds(node: Bundle, bundle: Bundle) -> bool:
    return all(node.get(name, 0.0) >= amount - _LESS_THAN_RAY_COUNTS for name, amount in bundle.items())


def _sum(bundles: Sequence[Bundle]) -> dict[str, float]:
    names = dict.fromkeys(name for bundle in bundles for name in bundle)
    return {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in names}


def _words(bundles: Sequence[Bundle]) -> str:
    total = {name: amount for name, amount in _sum(bundles).items() if amount}
    words = ", ".join(
        f"{name} {amount:g}" for name, amount in total.items() if not name.startswith("accelerator_type:")
    )
    return f"replica ({words or 'no resources'}{'' if len(bundles) == 1 else ' over several nodes'})"
