"""Who is next, who has to go, and that nothing is left: the queue in front of a full model."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.admission import TURN_AFTER, FairQueue, Ticket

KEYS = st.sampled_from("abcd")
TOKENS = st.integers(1, 50)
TICKETS = st.builds(Ticket, KEYS, st.integers(-1, 2), TOKENS, st.booleans())
ONE_CLASS = st.builds(Ticket, KEYS, st.just(0), TOKENS)


@dataclass
class Played:
    """A queue, and what a plain list knows of it. ``served`` holds for each pop who waited before it and who was
    popped; ``first`` are those that were popped first after the queue had been empty."""

    queue: FairQueue[int] = field(default_factory=FairQueue)
    tickets: dict[int, Ticket] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)
    served: list[tuple[list[int], int]] = field(default_factory=list)
    first: set[int] = field(default_factory=set)
    was_empty: bool = True

    def push(self, ticket: Ticket) -> None:
        item = len(self.tickets)
        self.tickets[item] = ticket
        self.waiting.append(item)
        self.queue.push(ticket, item)

    def pop(self) -> None:
        before = list(self.waiting)
        item = self.queue.pop()
        assert (item is None) == (not before), "work-conserving"
        if item is not None:
            self.waiting.remove(item)  # fails for what was popped before, removed, or never there
            self.served.append((before, item))
            if self.was_empty:
                self.first.add(item)
            self.was_empty = not self.waiting

    def remove(self, at: int) -> None:
        if self.waiting:
            item = self.waiting.pop(at % len(self.waiting))
            self.queue.remove(item)
            self.removed.append(item)
            self.was_empty |= not self.waiting

    @property
    def order(self) -> list[int]:
        return [item for _, item in self.served]


def played(tickets: st.SearchStrategy[Ticket]) -> st.SearchStrategy[Played]:
    """Requests that come, are served and give up, in any order."""
    steps = st.lists(
        st.one_of(
            st.tuples(st.just("push"), tickets),
            st.tuples(st.just("push"), tickets),
            st.tuples(st.just("pop"), st.none()),
            st.tuples(st.just("remove"), st.integers(0, 99)),
        ),
        max_size=200,
    )

    def play(steps: list[tuple[str, Ticket | int | None]]) -> Played:
        game = Played()
        for step in steps:
            match step:
                case "push", Ticket() as ticket:
                    game.push(ticket)
                case "remove", int(at):
                    game.remove(at)
                case _:
                    game.pop()
        return game

    return steps.map(play)


def drain(game: Played) -> None:
    while game.waiting:
        game.pop()


def holds_nothing(queue: FairQueue[int]) -> bool:
    return (len(queue), list(queue), queue.pop(), vars(queue)) == (0, [], None, vars(FairQueue()))


@given(played(TICKETS))
def test_each_is_served_once_or_gave_up_and_nothing_is_left(game: Played) -> None:
    """A pop gives somebody whenever somebody waits; nobody comes twice; the empty queue is as a new one."""
    assert list(game.queue) == game.waiting
    assert len(game.queue) == len(game.waiting)
    drain(game)
    assert sorted(game.order + game.removed) == list(range(len(game.tickets)))
    assert holds_nothing(game.queue)


@given(played(TICKETS))
def test_a_key_is_served_in_order_of_arrival(game: Played) -> None:
    """Within its class."""
    drain(game)
    lines = defaultdict(list)
    for item in game.order:
        lines[game.tickets[item].key, game.tickets[item].rank].append(item)
    assert all(line == sorted(line) for line in lines.values())


@given(played(TICKETS))
def test_the_best_class_is_next_but_for_a_turn_of_one_that_was_passed_over(game: Played) -> None:
    """And who was admitted is before all."""
    drain(game)
    passed_over: Counter[tuple[bool, int]] = Counter()
    for before, item in game.served:
        ranks = {game.tickets[other].rank for other in before}
        mine = game.tickets[item].rank
        if mine != min(ranks):
            assert min(ranks)[0], "nothing comes before who was admitted"
            assert passed_over[mine] >= TURN_AFTER
        passed_over = Counter({rank: passed_over[rank] + mine[0] for rank in ranks if rank != mine})


@given(played(st.builds(Ticket, KEYS, st.integers(-1, 5), TOKENS)))
def test_no_class_starves(game: Played) -> None:
    """Of C classes that wait, each is served within TURN_AFTER + C pops."""
    drain(game)
    waits: Counter[int] = Counter()
    for before, item in game.served:
        classes = {game.tickets[other].priority for other in before}
        waits = Counter({each: waits[each] + 1 for each in classes})
        assert max(waits.values()) <= TURN_AFTER + 7
        del waits[game.tickets[item].priority]


def test_a_lower_class_gets_its_turns_under_a_flood() -> None:
    """One of nine."""
    game = Played()
    for _ in range(10 * TURN_AFTER):
        game.push(Ticket("a", 0))
    for _ in range(5):
        game.push(Ticket("b", 1))
    drain(game)
    at = [n for n, item in enumerate(game.order) if game.tickets[item].key == "b"]
    assert at == [(TURN_AFTER + 1) * (n + 1) - 1 for n in range(5)]


def test_the_admitted_are_before_all_and_pass_nobody_over() -> None:
    """More of them than a class may be passed over: all are served first, and then the best class is next."""
    game = Played()
    game.push(Ticket("a", 1))
    game.push(Ticket("a", 0))
    for _ in range(2 * TURN_AFTER):
        game.push(Ticket("a", 5).first())
    drain(game)
    assert game.order == [*range(2, 2 + 2 * TURN_AFTER), 1, 0]


def test_not_even_a_class_whose_turn_it_is_comes_before_the_admitted() -> None:
    """Passed over often enough, it still waits for one that was admitted."""
    game = Played()
    game.push(Ticket("a", 1))
    for _ in range(TURN_AFTER + 1):
        game.push(Ticket("a", 0))
    for _ in range(TURN_AFTER):
        game.pop()
    game.push(Ticket("a").first())
    drain(game)
    assert game.order == [*range(1, TURN_AFTER + 1), TURN_AFTER + 2, 0, TURN_AFTER + 1]


@given(played(ONE_CLASS))
def test_while_a_key_waits_no_other_is_served_much_more(game: Played) -> None:
    """Than one largest request of each, in tokens, over every stretch of time: so while two keys wait, what they are
    served differs by no more than that, and neither waits for ever."""
    drain(game)
    largest = {key: max((t.tokens for t in game.tickets.values() if t.key == key), default=0) for key in "abcd"}
    for waiting, other in permutations("abcd", 2):
        # The other's lead; its rise over any stretch is the lead now less the lowest since the stretch began.
        lead = lowest = 0
        for before, item in game.served:
            waits = waiting in {game.tickets[each].key for each in before}
            if not waits or item in game.first:
                lead = lowest = 0
            if waits:
                served = game.tickets[item]
                lead += served.tokens * ((served.key == other) - (served.key == waiting))
                lowest = min(lowest, lead)
                assert lead - lowest <= largest[waiting] + largest[other]


@given(st.integers(0, 999), TOKENS, TOKENS)
def test_a_flood_of_one_key_does_not_delay_anothers_first(served: int, flood: int, first: int) -> None:
    """A thousand wait, some were served: whoever comes anew is next, whatever its size."""
    queue: FairQueue[int] = FairQueue()
    for item in range(1000):
        queue.push(Ticket("a", tokens=flood), item)
    for _ in range(served):
        queue.pop()
    queue.push(Ticket("b", tokens=first), 1000)
    assert 1000 in (queue.pop(), queue.pop() if not served else None)


def test_an_idle_key_saves_nothing_up() -> None:
    """One that comes back after long gets every second turn, not all that it missed."""
    game = Played()
    for _ in range(100):
        game.push(Ticket("a", tokens=10))
    game.push(Ticket("b", tokens=10))
    for _ in range(50):
        game.pop()
    for _ in range(10):
        game.push(Ticket("b", tokens=10))
    drain(game)
    assert "".join(game.tickets[item].key for item in game.order[50:60]) == "bababababa"


def test_one_at_a_time_is_not_ahead_of_its_share() -> None:
    """A key that waits with one large request at a time pays for the last one before its next is served."""
    game = Played()
    for _ in range(100):
        game.push(Ticket("a", tokens=10))
    for _ in range(3):
        game.push(Ticket("b", tokens=50))
        while game.tickets[game.waiting[-1]].key == "b":
            game.pop()
    gaps = "".join(game.tickets[item].key for item in game.order).split("b")
    assert [len(gap) for gap in gaps] == [1, 4, 5, 0]


def test_keys_are_forgotten_while_others_wait() -> None:
    """A queue that never empties does not collect the keys that once were in it."""
    queue: FairQueue[int] = FairQueue()
    queue.push(Ticket("flood"), -1)
    for n in range(1000):
        queue.push(Ticket("flood"), -n - 2)
        queue.push(Ticket(f"key-{n}"), n)
        queue.pop()
        queue.pop()
    [found] = queue._classes.values()
    assert len(found.items) < 5
    assert len(found._heap) == len(found.items)


def full(**waiting: int) -> FairQueue[str]:
    """Items are called by key, class and number: ``a1`` waiting 3 are a1-0, a1-1, a1-2."""
    queue: FairQueue[str] = FairQueue()
    for place, number in waiting.items():
        for n in range(number):
            queue.push(Ticket(place[0], int(place[1])), f"{place}-{n}")
    return queue


@pytest.mark.parametrize(
    ("waiting", "newcomer", "goes"),
    [
        ({"a1": 3}, Ticket("b", 1), "a1-2"),  # the newest of the largest
        ({"a1": 3, "b1": 2}, Ticket("b", 1), "a1-2"),
        ({"a1": 3, "b1": 3}, Ticket("b", 1), None),  # not fewer
        ({"a1": 3}, Ticket("a", 1), None),  # its own
        ({"a1": 3, "b1": 1}, Ticket("c", 2), None),  # better classes are left alone
        ({"a0": 3, "b1": 1}, Ticket("c", 1), "b1-0"),
        ({"a1": 2, "a2": 2, "b1": 3}, Ticket("c", 1), "a2-1"),  # counted together, taken from the lowest class
        ({"a1": 2, "b0": 1, "b1": 1}, Ticket("b", 1), None),  # what it has in better classes counts too
        ({"a1": 2, "a2": 2}, Ticket("a", 1), "a2-1"),  # its own, of a lower class
        ({"a1": 2, "b2": 1}, Ticket("a", 1), None),  # which nobody else has to give
        ({}, Ticket("a", 1), None),
    ],
)
def test_who_goes_for_a_newcomer(waiting: dict[str, int], newcomer: Ticket, goes: str | None) -> None:
    """The largest key in the newcomer's class and below pays, with its newest, where it has more than the newcomer."""
    queue = full(**waiting)
    before = list(queue)
    assert queue.evict_for(newcomer) == goes
    assert list(queue) == [item for item in before if item != goes]


def test_the_admitted_are_not_evicted() -> None:
    """They may have begun their answers."""
    queue: FairQueue[int] = FairQueue()
    for n in range(3):
        queue.push(Ticket("a").first(), n)
    assert queue.evict_for(Ticket("b")) is None


@given(st.lists(TICKETS, max_size=60), st.integers(1, 10))
def test_no_key_can_shut_others_out(comers: list[Ticket], bound: int) -> None:
    """A newcomer that is refused has as many waiting as any key in its class and below."""
    queue: FairQueue[int] = FairQueue()
    tickets: dict[int, Ticket] = {}
    for item, ticket in enumerate(comers):
        if len(queue) >= bound and not ticket.admitted:
            evicted = queue.evict_for(ticket)
            if evicted is None:
                below = Counter(t.key for t in tickets.values() if t.rank >= ticket.rank)
                own = sum(t.key == ticket.key for t in tickets.values())
                assert max(below.values(), default=0) <= own
                continue
            gone = tickets.pop(evicted)
            assert gone.rank >= ticket.rank
        tickets[item] = ticket
        queue.push(ticket, item)
    assert list(queue) == list(tickets)
    queue.clear()
    assert holds_nothing(queue)


def test_a_ticket_costs_something() -> None:
    """A key whose requests were free would be served for ever."""
    with pytest.raises(ValueError, match="at least 1"):
        Ticket(tokens=0)


def test_an_item_waits_once() -> None:
    """A second ticket would lose the first."""
    queue = full(a1=1)
    with pytest.raises(ValueError, match="waits already"):
        queue.push(Ticket("b"), "a1-0")
