"""Every way to place a small fleet, tried one after the other. Pure."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from serve_app.planning.room import Demand, Room, Spot

# How many placements may be tried: all of a fleet that fits on a screen, in a fraction of a second.
TRIES = 20_000


class Item(NamedTuple):
    """One need of one replica, by numbers. Each counts for itself: a replica may lie on several nodes."""

    want: int
    replica: int
    need: int
    demand: Demand


class Search:
    """``proven``, after ``run``: whether every way was tried, or one was found. ``rooms`` are then as that way left
    them."""

    def __init__(self, items: Iterable[Item], rooms: Sequence[Room]) -> None:
        self.rooms = rooms
        self.proven = True
        self._items = sorted(items, key=lambda item: (-item.demand.gpu, len(item.demand.nodes), item[:3]))
        self._spots: dict[Item, Spot] = {}
        self._tries = 0

    def run(self) -> dict[Item, Spot] | None:
        """A place for every item, or None."""
        return self._spots if not self._hopeless() and self._place(0) else None

    def _hopeless(self) -> bool:
        """Whether it can be seen without trying: something fits nowhere, or there are too few GPUs."""
        if sum(item.demand.gpu for item in self._items) > sum(sum(room.gpus) for room in self.rooms):
            return True
        return not all(any(self.rooms[i].choices(item.demand) for i in item.demand.nodes) for item in self._items)

    def _place(self, at: int) -> bool:
        if at == len(self._items):
            return True
        item = self._items[at]
        seen = set()
        for i in sorted(item.demand.nodes):
            room = self.rooms[i]
            if (state := room.state()) in seen:
                continue
            seen.add(state)
            for gpus in room.choices(item.demand):
                self._tries += 1
                if self._tries > TRIES:
                    self.proven = False
                    return False
                self._spots[item] = room.take(item.demand, gpus)
                if self._place(at + 1):
                    return True
                room.give_back(item.demand, self._spots.pop(item))
        return False
