"""Prefixes of requests, and the memory of who has seen them."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.prefixes import (
    MOST_BLOCKS,
    NOTHING,
    SILENT_GATEWAY_S,
    Exchange,
    Memory,
    Prefix,
    of_adapter,
    of_session,
    of_text,
)

texts = st.lists(st.binary(max_size=5000), max_size=6)
sizes = st.integers(0, 200_000)


def common(one: Prefix, other: Prefix) -> int:
    """Blocks that both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one.hashes, other.hashes, strict=False)) if a != b), len(one.hashes))


@given(texts, texts)
def test_a_later_turn_begins_with_all_blocks_of_the_turn_before(before: list[bytes], more: list[bytes]) -> None:
    """The messages of a chat stay the same, whatever their lengths, and more are appended."""
    one, two = of_text(before), of_text(before + more)
    assert two.hashes[: len(one.hashes)] == one.hashes
    assert two.ends[: len(one.ends)] == one.ends


@given(sizes, sizes)
def test_a_common_beginning_has_common_blocks_and_nothing_more(shared: int, more: int) -> None:
    """Two prompts that part somewhere share the blocks before that place, and none that covers it."""
    one, two = of_text([b"s" * shared + b"1" * more]), of_text([b"s" * shared + b"2" * more])
    if more:
        assert common(one, two) == sum(end <= shared for end in one.ends)
    else:
        assert one == two


@given(sizes)
def test_blocks_are_few_and_cover_the_beginning(size: int) -> None:
    """However long the text, a bounded number of blocks, growing, from the first byte on."""
    found = of_text([b"x" * size])
    assert len(found.hashes) == len(set(found.hashes)) <= MOST_BLOCKS
    assert list(found.ends) == sorted(set(found.ends))
    if size <= 255 * 1024:
        assert (found.ends[-1] if found.ends else 0) == size


def test_hashes_are_the_same_in_every_process() -> None:
    """Gateways can tell them each other: Python's own hashes differ."""
    code = "from serve_app.prefixes import *; print(of_text([b'hello']).hashes, of_session(b'hello').hashes)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.strip() == f"{of_text([b'hello']).hashes} {of_session(b'hello').hashes}"


def test_a_session_is_a_prefix_of_its_own() -> None:
    """Its name is no text: a prompt that reads like it is another one."""
    assert of_session(b"a") == of_session(b"a")
    assert len({of_session(b"a"), of_session(b"b"), of_text([b"a"])}) == 3


def test_hashes_and_ends_belong_together() -> None:
    """A prefix that another process told wrongly is refused."""
    with pytest.raises(ValueError, match="2 hashes, but 1 ends"):
        Prefix((1, 2), (10,))


def test_a_replica_holds_what_it_was_given() -> None:
    """Up to where it parts from what is asked now, as a share of that."""
    memory = Memory()
    memory.remember((1, 2, 3), "a", "ab")
    memory.remember((1, 5), "b", "ab")
    assert memory.held(Prefix((1, 2, 3, 4), (10, 20, 40, 80))) == {"a": 0.5, "b": 0.125}
    assert memory.held(Prefix((2, 3), (10, 20))) == {"a": 1.0}
    assert memory.held(Prefix((9, 1), (10, 20))) == {}
    assert memory.held(NOTHING) == {}


def test_a_replica_that_left_is_forgotten_where_it_matters() -> None:
    """With the next request that has a block of its."""
    memory = Memory()
    memory.remember((1, 2), "a", "ab")
    memory.remember((1,), "b", "b")
    assert memory.held(Prefix((1,), (10,))) == {"b": 1.0}


@given(st.lists(st.tuples(st.lists(st.integers(0, 60), max_size=8), st.sampled_from("abc"))), st.integers(1, 20))
def test_the_memory_stays_bounded(given: list[tuple[list[int], str]], most: int) -> None:
    """In blocks, and in replicas per block: those that run."""
    memory = Memory(most)
    for hashes, replica in given:
        memory.remember(hashes, replica, "abc")
        assert len(memory) <= most
        assert set(memory.held(Prefix(tuple(hashes), tuple(range(1, len(hashes) + 1))))) <= set("abc")


def test_what_was_not_used_for_longest_is_forgotten_first() -> None:
    """And of one text the end before its beginning, without which it is of no use."""
    memory = Memory(most=4)
    memory.remember((1, 2), "a", "a")
    memory.remember((3, 4), "a", "a")
    memory.remember((1,), "a", "a")
    memory.remember((5,), "a", "a")
    assert memory.held(Prefix((1, 2), (10, 20))) == {"a": 0.5}
    assert memory.held(Prefix((3, 4), (10, 20))) == {"a": 1.0}


def test_an_adapter_makes_another_prefix() -> None:
    """The same text under another adapter, or under none, shares nothing, as in an engine's cache. The adapter
    alone is half of what counts, and the longest text decides among those that have it."""
    text, longer = of_text([b"a" * 300]), of_text([b"a" * 300, b"b" * 300])
    one = of_adapter("one", text)
    assert not {*one.hashes} & ({*text.hashes} | {*of_adapter("two", text).hashes})
    assert common(one, of_adapter("one", longer)) == len(one.hashes)
    memory = Memory()
    memory.remember(one.hashes, "a", "ab")
    memory.remember(of_adapter("one", longer).hashes, "b", "ab")
    held = memory.held(of_adapter("one", longer))
    assert held["b"] == 1 > held["a"] > 0.5
    assert memory.held(of_adapter("one", of_text([b"other"]))) == {"a": 0.5, "b": 0.5}
    assert memory.held(of_adapter("one", NOTHING)) == {"a": 1, "b": 1}


# --- What gateways tell each other


def news(*blocks: int) -> list[tuple[str, tuple[int, ...]]]:
    return [("r", (block,)) for block in blocks]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), max_size=40))
def test_everybody_hears_everything_of_the_others_once(calls: list[tuple[str, int]]) -> None:
    """In order, however the calls interleave, and never its own."""
    exchange, upto = Exchange(), dict.fromkeys("abc", 0)
    told: list[tuple[str, int]] = []
    heard: dict[str, list[int]] = {name: [] for name in "abc"}
    for name, count in [*calls, *((name, 0) for name in "abc")]:
        blocks = range(len(told), len(told) + count)
        passed = exchange.swap(name, news(*blocks), upto[name], 0.0)
        told += [(name, block) for block in blocks]
        upto[name] = passed.upto
        heard[name] += [hashes[0] for _, hashes in passed.news]
    for name in "abc":
        assert heard[name] == [block for teller, block in told if teller != name]


def test_what_is_passed_on_is_bounded() -> None:
    """Who comes late hears the newest; who was told by another exchange hears all that this one has."""
    exchange = Exchange(most=3)
    exchange.swap("a", news(*range(10)), 0, 0.0)
    assert exchange.swap("b", [], 0, 0.0).news == tuple(news(7, 8, 9))
    assert exchange.swap("c", [], 9, 0.0).news == tuple(news(9))
    assert exchange.swap("d", [], 10, 0.0).news == ()
    assert exchange.swap("e", [], 99, 0.0).news == tuple(news(7, 8, 9))


def test_a_gateway_is_alone_when_the_others_are_silent() -> None:
    """Then it need not tell anybody."""
    exchange = Exchange()
    assert exchange.swap("a", [], 0, 0.0).alone
    assert not exchange.swap("b", [], 0, 1.0).alone
    assert not exchange.swap("a", [], 0, 2.0).alone
    assert exchange.swap("a", [], 0, 2.0 + SILENT_GATEWAY_S).alone
