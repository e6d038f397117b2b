"""Where the replicas of a whole fleet fit. Pure: what they want and the nodes go in, a place for each comes out.

Ray's rules: what one need names is free together on one node; a share of a GPU lies on one physical GPU, several
shares may lie on the same; whole GPUs are wholly free ones; a replica of several needs (pipeline parallel) takes one
node where it can, else several. Ray knows nothing of GPU memory: that is added here.

The largest are placed first, each where it leaves the least behind (best fit, decreasing); where something finds no
place, those that fit on few nodes go first instead, and of a small fleet every way is tried.
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import NamedTuple

from serve_app.planning.nodes import Need, Node, matches
from serve_app.planning.room import ENOUGH, PER_NODE, UNIT, Demand, Room, Spot, units
from serve_app.planning.search import Item, Search

# Fleets of so many needs are small enough to try every way.
_FEW = 24


@dataclass(frozen=True, slots=True)
class Want:
    """``count`` equal replicas. ``needs``: what one takes; each has to fit on one node.

    ``gpu_bytes``: how large each of its GPUs must be; ``of_what``: what that is made of, in words. ``ram_bytes``: what
    one takes of its node's own memory. ``per_node``: how many may be on one node; None: any number. ``turn``: wants of
    a later turn are placed after all of an earlier one, and may have the name of one. ``standing``: replicas among the
    ``count`` that run already: for each the node of each need.
    """

    name: str
    needs: tuple[Need, ...]
    count: int
    gpu_bytes: int = 0
    of_what: str = ""
    ram_bytes: int = 0
    per_node: int | None = None
    turn: int = 0
    standing: tuple[tuple[int, ...], ...] = ()

    @property
    def gpus(self) -> float:
        """GPUs of one replica."""
        return sum(need.resources.get("GPU", 0.0) for need in self.needs)


class Placed(NamedTuple):
    """One replica, counted from 1 among those of its name, with one spot for each of its needs."""

    name: str
    replica: int
    spots: tuple[Spot, ...]


class Left(NamedTuple):
    """What is free on a node afterwards. ``gpus``: the free share of each GPU. ``node``: the same as a node, with the
    wholly free GPUs, or with the largest share where none is."""

    gpus: tuple[float, ...]
    node: Node


@dataclass(frozen=True, slots=True)
class Packing:
    """``missing``: replicas without a place, by name; ``left``: what is free afterwards, in the order of the nodes.

    ``proven``: nothing is missing, or every other way was tried and fails too.
    """

    placed: tuple[Placed, ...]
    missing: Mapping[str, int]
    left: tuple[Left, ...]
    proven: bool


def pack(wants: Sequence[Want], nodes: Sequence[Node], *, spread: bool = False) -> Packing:
    """A place for each replica. The same input gives the same answer.

    ``spread``: how Serve places unless it is told to pack, at its worst: small ones first, over as many nodes as
    there are.
    """
    fleet = _Fleet(wants, nodes)
    placed, missing, rooms = fleet.greedy(spread=spread)
    if missing and not spread:
        other = fleet.greedy(particular_first=True)
        if sum(other[1].values()) < sum(missing.values()):
            placed, missing, rooms = other
    proven = not missing
    if missing and not spread and sum(len(want.needs) * want.count for want in wants) <= _FEW:
        found, proven, left = fleet.every_way()
        if found is not None:
            placed, missing, rooms = found, {}, left
    lefts = (_left(room, node) for room, node in zip(rooms, nodes, strict=True))
    return Packing(tuple(placed), missing, tuple(lefts), proven)


def _left(room: Room, node: Node) -> Left:
    free = {name: room.left.get(name, 0) for name in node.resources}
    resources = {name: math.inf if amount > ENOUGH / 2 else amount / UNIT for name, amount in free.items()}
    ram = None if node.ram_bytes is None else room.ram
    return Left(
        tuple(share / UNIT for share in room.gpus),
        replace(
            node, resources=resources | {"GPU": float(room.whole or max(room.gpus, default=0) / UNIT)}, ram_bytes=ram
        ),
    )


def _demands(wants: Sequence[Want], nodes: Sequence[Node]) -> list[list[Demand]]:
    """The demands of one replica, per want."""
    # Nodes differ in few things that are fixed, and many needs suit the same nodes: both are looked at once.
    alike: dict[tuple[object, ...], list[int]] = {}
    for i, node in enumerate(nodes):
        key = (tuple(sorted(node.labels.items())), node.gpu_bytes, node.ram_bytes)
        alike.setdefault(key, []).append(i)
    sets: dict[tuple[bool, ...], frozenset[int]] = {}

    def suiting(want: Want, need: Need) -> frozenset[int]:
        which = tuple(suits(want, need, nodes[group[0]]) for group in alike.values())
        if which not in sets:
            chosen = (group for group, yes in zip(alike.values(), which, strict=True) if yes)
            sets[which] = frozenset(i for group in chosen for i in group)
        return sets[which]

    def demand(want: Want, place: int, need: Need) -> Demand:
        rest = {name: units(amount) for name, amount in need.resources.items() if name != "GPU" and amount}
        if want.per_node and place == 0:
            rest[f"{PER_NODE}{want.name}"] = UNIT // want.per_node
        ram = want.ram_bytes if place == 0 else 0
        gpu = units(need.resources.get("GPU", 0.0))
        return Demand(gpu, tuple(sorted(rest.items())), ram, suiting(want, need))

    return [[demand(want, place, need) for place, need in enumerate(want.needs)] for want in wants]


def suits(want: Want, need: Need, node: Node) -> bool:
    """Whether ``node`` has the labels and the memory for ``need``, whatever is free on it."""
    if not matches(need.labels, node.labels):
        return False
    if need.resources.get("GPU") and node.gpu_bytes is not None and node.gpu_bytes < want.gpu_bytes:
        return False
    return node.ram_bytes is None or want.ram_bytes <= node.ram_bytes


# --- All of them

_Found = tuple[list[Placed], dict[str, int], Sequence[Room]]


class _Fleet:
    """Several ways to place the same. Each begins with what runs already, which stays where it is."""

    def __init__(self, wants: Sequence[Want], nodes: Sequence[Node]) -> None:
        self._wants = wants
        self._nodes = nodes
        self._demands = _demands(wants, nodes)

    def greedy(self, *, spread: bool = False, particular_first: bool = False) -> _Found:
        """The replicas that found a place, how many of each name did not, and what is left.

        ``particular_first``: those that fit on few nodes come before the large ones.
        """
        placed, rest, rooms = self._standing()
        count = Counter(each.name for each in placed)
        missing: Counter[str] = Counter()
        first = {demand: i for i, own in reversed(list(enumerate(self._demands))) for demand in own}

        def order(i: int) -> tuple[float, ...]:
            demands = self._demands[i]
            largest = max(demands, key=lambda demand: demand.gpu)
            cpus = sum(amount for demand in demands for name, amount in demand.rest if name == "CPU")
            down = 1 if spread else -1
            size = (down * largest.gpu, len(largest.nodes))
            size = size[::-1] if particular_first else size
            gpus = sum(demand.gpu for demand in demands)
            return (self._wants[i].turn, *size, down * gpus, down * cpus, first[demands[0]], i)

        ordered = sorted(range(len(self._wants)), key=order)
        for _, alike in groupby(ordered, key=lambda i: (self._wants[i].turn, tuple(self._demands[i]))):
            group = list(alike)
            own = self._demands[group[0]]
            places = _one_need(own[0], rooms, spread) if len(own) == 1 else _several_needs(own, rooms)
            for i in group:
                name, found = self._wants[i].name, list(islice(places, rest[i]))
                placed += (Placed(name, number, spots) for number, spots in enumerate(found, count[name] + 1))
                count[name] += len(found)
                if len(found) < rest[i]:
                    missing[name] += rest[i] - len(found)
        return placed, dict(missing), rooms

    def every_way(self) -> tuple[list[Placed] | None, bool, Sequence[Room]]:
        """Places for all or None, whether that is proven, and what is left."""
        placed, rest, rooms = self._standing()
        items = (
            Item(i, replica, need, demand)
            for i, many in enumerate(rest)
            for replica in range(many)
            for need, demand in enumerate(self._demands[i])
        )
        search = Search(items, rooms)
        found = search.run()
        if found is None:
            return None, search.proven, rooms
        spots: dict[tuple[int, int], list[Spot]] = {}
        for item in sorted(found, key=lambda item: item[:3]):
            spots.setdefault((item.want, item.replica), []).append(found[item])
        count = Counter(each.name for each in placed)
        for (i, _), each in spots.items():
            count[self._wants[i].name] += 1
            placed.append(Placed(self._wants[i].name, count[self._wants[i].name], tuple(each)))
        return placed, True, rooms

    def _standing(self) -> tuple[list[Placed], list[int], Sequence[Room]]:
        """What runs already, how many replicas of each want are still to be placed, and what is left for them."""
        rooms = [Room(i, node) for i, node in enumerate(self._nodes)]
        placed: list[Placed] = []
        count: Counter[str] = Counter()
        rest = [want.count for want in self._wants]
        for i, want in enumerate(self._wants):
            for nodes in want.standing[: want.count]:
                spots = _stand(self._demands[i], [rooms[node] for node in nodes])
                if spots is not None:
                    count[want.name] += 1
                    rest[i] -= 1
                    placed.append(Placed(want.name, count[want.name], spots))
        return placed, rest, rooms


def _stand(demands: Sequence[Demand], rooms: Sequence[Room]) -> tuple[Spot, ...] | None:
    """One replica, each need in the given room; None where the rooms do not have that much.

    That it runs there counts for more than what is known of its labels and its memory.
    """
    taken: list[Spot] = []
    for demand, room in zip(demands, rooms, strict=False):
        if not (choices := room.choices(demand)):
            break
        taken.append(room.take(demand, choices[0]))
    if len(taken) == len(demands):
        return tuple(taken)
    for demand, room, spot in zip(demands, rooms, taken, strict=False):
        room.give_back(demand, spot)
    return None


def _one_need(demand: Demand, rooms: Sequence[Room], spread: bool) -> Iterator[tuple[Spot, ...]]:
    """Places for replicas of one need, each the best at its time, until there is none. Each is taken."""
    heap = [(score, i) for i in demand.nodes if (score := rooms[i].score(demand, spread)) is not None]
    heapq.heapify(heap)
    while heap:
        # Right although others are in the heap: between two places only the chosen node has changed.
        _, i = heapq.heappop(heap)
        spot = rooms[i].take(demand, rooms[i].choices(demand)[0])
        if (score := rooms[i].score(demand, spread)) is not None:
            heapq.heappush(heap, (score, i))
        yield (spot,)


def _several_needs(demands: Sequence[Demand], rooms: Sequence[Room]) -> Iterator[tuple[Spot, ...]]:
    """Places for replicas of several needs: on one node where one has room, else on as few as it takes."""
    every = range(len(demands))
    while True:
        offers = []
        for room in rooms:
            if taken := _take_all(demands, every, room):
                _give_back(demands, taken, rooms)
                # The node that takes the most; of several the one with the least left.
                offers.append((-len(taken), room.gpu_bytes, room.whole, room.at))
        spots: dict[int, Spot] = {}
        for *_, i in sorted(offers):
            spots |= _take_all(demands, [need for need in every if need not in spots], rooms[i])
            if len(spots) == len(demands):
                break
        else:
            return _give_back(demands, spots, rooms)
        yield tuple(spots[need] for need in every)


def _take_all(demands: Sequence[Demand], needs: Sequence[int], room: Room) -> dict[int, Spot]:
    """What ``room`` can take of the needs with these numbers, taken."""
    taken = {}
    for need in needs:
        demand = demands[need]
        if room.at in demand.nodes and (choices := room.choices(demand)):
            taken[need] = room.take(demand, choices[0])
    return taken


def _give_back(demands: Sequence[Demand], taken: Mapping[int, Spot], rooms: Sequence[Room]) -> None:
    for need, spot in taken.items():
        rooms[spot.node].give_back(demands[need], spot)
