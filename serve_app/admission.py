"""Who of those that wait for a full model is next, and who has to go when too many wait. Pure: no clock, no event loop.

Between classes: the lowest ``priority`` number that waits is next. So that none waits for ever, a class that was
passed over ``TURN_AFTER`` times gets one turn: of C classes that wait, each is served at least once in
``TURN_AFTER + C`` pops.

Within a class: start-time fair queueing (Goyal, Vin, Cheng: "Start-time Fair Queuing", SIGCOMM 1996). A key's next
request has a start tag: what its key was served before, in tokens, but never less than the tag that was served last.
The lowest tag is next. So

* while a key waits, no other is served more than it, but for one largest request of each: so no key waits for ever,
  and while two wait, what they are served differs by no more than that;
* a key that comes anew is next but for others that came anew too, however many requests of one key wait;
* a key that asked for nothing saves up nothing, and one that was just served queues behind those that were not.

Within a key: order of arrival.
"""

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush, heapreplace
from itertools import count
from typing import Generic, TypeVar

# A class may be passed over so often before it gets a turn.
TURN_AFTER = 8

T = TypeVar("T", bound=Hashable)
Rank = tuple[bool, int]


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request's place. ``key``: whose it is. ``priority``: its class; lower is sooner, as in vLLM. ``tokens``: what
    it will probably cost, at least 1. ``admitted``: a replica had it before and was lost, or is leaving."""

    key: str = ""
    priority: int = 0
    tokens: int = 1
    admitted: bool = False

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"tokens must be at least 1, is {self.tokens}")

    def first(self) -> "Ticket":
        """The same before all that no replica had yet: each admitted request moves only so often, so nobody starves."""
        return self if self.admitted else replace(self, admitted=True)

    @property
    def rank(self) -> Rank:
        return not self.admitted, self.priority


class FairQueue(Generic[T]):
    """Items with tickets; each item is in it once. ``pop`` and ``push`` take O(log keys) steps, ``remove`` O(1).

    An empty queue holds nothing; a key is forgotten when the others have caught up with it.
    """

    def __init__(self) -> None:
        self._tickets: dict[T, Ticket] = {}
        self._ranks: list[Rank] = []  # of the classes, sorted: a handful, so inserting is cheap
        self._classes: OrderedDict[Rank, _Class[T]] = OrderedDict()  # whose last turn was longest ago first
        self._pops = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[T]:
        """In order of arrival."""
        return iter(self._tickets)

    def push(self, ticket: Ticket, item: T) -> None:
        if item in self._tickets:
            raise ValueError(f"{item!r} waits already")
        if ticket.rank not in self._classes:
            insort(self._ranks, ticket.rank)
            self._classes[ticket.rank] = _Class(self._pops)
        self._tickets[item] = ticket
        self._classes[ticket.rank].push(ticket, item)

    def pop(self) -> T | None:
        """Who is next; None where nobody waits."""
        if not self._tickets:
            return None
        rank = self._turn()
        if rank[0]:  # who goes first by being admitted passes nobody over
            self._pops += 1
        self._classes[rank].last_turn = self._pops
        self._classes.move_to_end(rank)
        item = self._classes[rank].pop()
        self._forget(item)
        return item

    def remove(self, item: T) -> None:
        """Its request gave up. Nothing happens where it does not wait."""
        if (ticket := self._tickets.get(item)) is not None:
            self._classes[ticket.rank].remove(ticket, item)
            self._forget(item)

    def evict_for(self, ticket: Ticket) -> T | None:
        """The queue is full: who leaves it for a newcomer with ``ticket``, removed; None: nobody, refuse the newcomer.

        The key that has most waiting in the newcomer's class and below gives up its newest request of its lowest class
        there, if that is more than the newcomer's own key has in all. Else the newcomer's own key may give up one of a
        lower class. Who was admitted stays. One step per waiting key.
        """
        below = self._ranks[bisect_left(self._ranks, (True, ticket.priority)) :]
        waiting: Counter[str] = Counter()
        for rank in below:
            waiting.update({key: len(items) for key, items in self._classes[rank].items.items()})
        own = sum(len(found.items.get(ticket.key, ())) for found in self._classes.values())
        largest = max(waiting, key=waiting.__getitem__, default=ticket.key)
        if waiting[largest] <= own:
            largest, below = ticket.key, [rank for rank in below if rank > ticket.rank]
        for rank in reversed(below):
            if items := self._classes[rank].items.get(largest):
                newest = next(reversed(items))
                self.remove(newest)
                return newest
        return None

    def clear(self) -> None:
        self._tickets.clear()
        self._ranks.clear()
        self._classes.clear()
        self._pops = 0

    def _turn(self) -> Rank:
        best = self._ranks[0]
        longest = next(iter(self._classes))
        passed_over = self._pops - self._classes[longest].last_turn
        return longest if best[0] and passed_over >= TURN_AFTER else best

    def _forget(self, item: T) -> None:
        rank = self._tickets.pop(item).rank
        if not self._classes[rank].size:
            del self._classes[rank]
            del self._ranks[bisect_left(self._ranks, rank)]
        if not self._tickets:
            self._pops = 0


class _Class(Generic[T]):
    """The waiting of one class.

    Each key that it knows has one entry in the heap, with the start tag of its next request, waiting or not yet come.
    One without requests goes when it is the lowest: its tag is then what a key that comes anew gets, or less.
    """

    def __init__(self, last_turn: int) -> None:
        self.last_turn = last_turn
        self.size = 0
        self.items: dict[str, OrderedDict[T, Ticket]] = {}
        self._heap: list[tuple[int, int, str]] = []
        self._arrivals = count()  # among equal tags
        self._now = 0  # the tag that was served last

    def push(self, ticket: Ticket, item: T) -> None:
        if ticket.key not in self.items:
            self.items[ticket.key] = OrderedDict()
            heappush(self._heap, (self._now, next(self._arrivals), ticket.key))
        self.items[ticket.key][item] = ticket
        self.size += 1

    def pop(self) -> T:
        while not self.items[self._heap[0][2]]:
            del self.items[heappop(self._heap)[2]]
        self._now, _, key = self._heap[0]
        item, ticket = self.items[key].popitem(last=False)
        heapreplace(self._heap, (self._now + ticket.tokens, next(self._arrivals), key))
        self.size -= 1
        return item

    def remove(self, ticket: Ticket, item: T) -> None:
        del self.items[ticket.key][item]
        self.size -= 1
