"""What is free on one node while replicas are placed, in Ray's units. Pure."""

import math
from typing import NamedTuple

from serve_app.planning.nodes import Node

# Ray counts in steps of 1/10,000, so that shares add up without rounding.
UNIT = 10_000
ENOUGH = 10**9 * UNIT
# A limit of so many replicas per node, as Serve keeps it: each takes a part of a resource that every node has once.
PER_NODE = "replicas per node: "


class Demand(NamedTuple):
    """What has to be free on one node. ``gpu``: less than ``UNIT`` is a share of one GPU. ``rest``: other resources.

    ``ram_bytes``: of the node's own memory. ``nodes``: those that suit it, whatever is free on them.
    """

    gpu: int
    rest: tuple[tuple[str, int], ...]
    ram_bytes: int
    nodes: frozenset[int]


class Spot(NamedTuple):
    """Where one need lies. ``node``: its place in the sequence of nodes; ``gpus``: which of its GPUs, from 0;
    ``share``: of each of them, 1.0 for whole ones."""

    node: int
    gpus: tuple[int, ...]
    share: float


class Room:
    """What is free on node number ``at``. ``gpus``: of each GPU; ``whole``: how many of them are wholly free."""

    def __init__(self, at: int, node: Node) -> None:
        self.at = at
        self.gpu_bytes = node.gpu_bytes or 0
        self.gpus = [UNIT] * node.gpus
        self.whole = node.gpus
        self.left = {name: units(amount) for name, amount in node.resources.items() if name != "GPU"}
        self.ram = node.ram_bytes if node.ram_bytes is not None else ENOUGH
        self._fixed = (tuple(sorted(node.labels.items())), node.gpu_bytes, node.ram_bytes)

    def choices(self, demand: Demand) -> list[tuple[int, ...]]:
        """The GPUs that could serve ``demand``, the tightest fit first; without those that are as free as another."""
        if demand.ram_bytes > self.ram or any(self._left(name) < amount for name, amount in demand.rest):
            return []
        if not demand.gpu:
            return [()]
        if demand.gpu >= UNIT:
            count = demand.gpu // UNIT
            whole = [i for i, free in enumerate(self.gpus) if free == UNIT] if self.whole >= count else []
            return [tuple(whole[:count])] if whole else []
        by_free = {free: i for i, free in reversed(list(enumerate(self.gpus))) if free >= demand.gpu}
        return [(by_free[free],) for free in sorted(by_free)]

    def score(self, demand: Demand, spread: bool) -> tuple[int, ...] | None:
        """How good a place this is, lower is better; None: it does not fit. ``spread``: prefer what is most free."""
        if not (choices := self.choices(demand)):
            return None
        cpus = self._left("CPU")
        if not demand.gpu:
            # GPUs need CPUs too: what needs none goes elsewhere first.
            return (bool(self.gpus), -cpus if spread else cpus)
        if spread:
            return (-sum(self.gpus), -cpus)
        free = self.gpus[choices[0][0]] if demand.gpu < UNIT else 0
        return (self.gpu_bytes, free == UNIT, self.whole, free, cpus)

    def take(self, demand: Demand, gpus: tuple[int, ...]) -> Spot:
        self._change(demand, gpus, -1)
        return Spot(self.at, gpus, min(demand.gpu, UNIT) / UNIT)

    def give_back(self, demand: Demand, spot: Spot) -> None:
        self._change(demand, spot.gpus, 1)

    def state(self) -> tuple[object, ...]:
        """Equal for nodes on which the same fits."""
        return (self._fixed, self.ram, *sorted(self.gpus), *sorted(self.left.items()))

    def _change(self, demand: Demand, gpus: tuple[int, ...], sign: int) -> None:
        for name, amount in demand.rest:
            self.left[name] = self._left(name) + sign * amount
        self.ram += sign * demand.ram_bytes
        for i in gpus:
            before = self.gpus[i]
            self.gpus[i] += sign * min(demand.gpu, UNIT)
            self.whole += (self.gpus[i] == UNIT) - (before == UNIT)

    def _left(self, name: str) -> int:
        return self.left.get(name, UNIT if name.startswith(PER_NODE) else 0)


def units(amount: float) -> int:
    return ENOUGH if math.isinf(amount) else round(amount * UNIT)
