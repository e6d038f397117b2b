"""What the gateway guesses of a request's cost, and how the request begins."""

import json
from typing import Any

import pytest

from serve_app.gateway.fields import (
    BYTES_PER_TOKEN,
    MAX_ANSWERS,
    SESSION_HEADER,
    USUAL_ANSWER_TOKENS,
    Fields,
    parse,
    prefix_of,
    ticket_of,
)
from serve_app.gateway.routes import BY_PATH
from serve_app.prefixes import NOTHING, Prefix, of_session

CHAT = "/v1/chat/completions"


def answer_tokens(path: str = CHAT, **fields: Any) -> int:
    body = json.dumps({"model": "m", **fields}).encode()
    return ticket_of(BY_PATH[path], parse(body), len(body), None).tokens - len(body) // BYTES_PER_TOKEN


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
def test_the_longest_answer_counts(name: str) -> None:
    """Whatever the protocol calls it; each of ``n`` answers."""
    assert answer_tokens(**{name: 1000}) == 1000
    assert answer_tokens(**{name: 1000}, n=3) == 3000


@pytest.mark.parametrize("nonsense", ["7", True, -1, 0, 1.5, None, [7], {"a": 7}])
def test_nonsense_counts_as_absent(nonsense: Any) -> None:
    """The engine refuses it in its own words."""
    assert answer_tokens(max_tokens=nonsense) == USUAL_ANSWER_TOKENS
    assert answer_tokens(max_tokens=10, n=nonsense) == 10


def test_a_number_of_answers_is_bounded() -> None:
    """A request that will be refused must not keep its key waiting for hours."""
    assert answer_tokens(max_tokens=1, n=10**9) == MAX_ANSWERS


def test_where_nothing_is_generated_the_body_counts() -> None:
    """Embeddings and the like."""
    assert answer_tokens("/v1/embeddings", max_tokens=1000) == 0
    assert ticket_of(BY_PATH["/v1/audio/transcriptions"], Fields(), 28, None).tokens == 7
    assert ticket_of(BY_PATH["/v1/embeddings"], Fields(), 0, None).tokens == 1


@pytest.mark.parametrize("size", [100, 1_000_000])
def test_no_answer_costs_more_than_the_context(size: int) -> None:
    """An image is many bytes and few tokens; a limit may be far above what fits."""
    body = json.dumps({"model": "m", "prompt": "x" * size, "max_tokens": 10**9}).encode()
    assert ticket_of(BY_PATH[CHAT], parse(body), len(body), 8192).tokens == 8192


def prefix(path: str = CHAT, session: bytes | None = None, indent: int | None = None, **body: Any) -> Prefix:
    headers = {} if session is None else {SESSION_HEADER: session}
    return prefix_of(BY_PATH[path], headers, parse(json.dumps({"model": "m", **body}, indent=indent).encode()))


TURNS = [{"role": role, "content": "Hello " * 200} for role in ("system", "user", "assistant", "user")]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize(
    ("path", "field"), [(CHAT, "messages"), ("/v1/messages", "messages"), ("/v1/responses", "input")]
)
def test_the_next_turn_begins_as_the_one_before(path: str, field: str, indent: int | None) -> None:
    """Whatever else the body says, before or behind the messages."""
    one = prefix(path, indent=indent, **{field: TURNS[:2]}, max_tokens=1, system="Be brief.")
    two = prefix(path, indent=indent, system="Be brief.", **{field: TURNS}, stream=True)
    assert len(two.hashes) > len(one.hashes) > 2
    assert two.hashes[: len(one.hashes)] == one.hashes


def test_other_texts_have_other_prefixes() -> None:
    """From the first difference on: a system prompt of its own, another first message, a prompt of tokens."""
    found = [
        prefix(messages=TURNS[:1]),
        prefix(messages=TURNS[1:2]),
        prefix(messages=TURNS[:1], system="Be brief."),
        prefix("/v1/completions", prompt="Hello " * 200),
        prefix("/v1/completions", prompt=[1, 2, 3] * 200),
        prefix("/v1/responses", input="Hello", instructions="Be verbose."),
    ]
    assert len({p.hashes[0] for p in found}) == len(found)
    assert len(prefix("/v1/completions", prompt=[1, 2, 3] * 200).hashes) < 10


def test_a_session_is_worth_more_than_the_text() -> None:
    """Its requests belong together even where their texts do not."""
    assert prefix(session=b"s1", messages=TURNS) == prefix(session=b"s1", messages=[]) == of_session(b"s1")


@pytest.mark.parametrize("messages", [b"7", b"[{}]", b"[{} , 7]", b"[[[]]]", b'"' + b"a" * 100 + b'"'])
def test_messages_that_make_no_sense_have_some_prefix_or_none(messages: bytes) -> None:
    """The engine refuses them in its own words; here they only must not fail."""
    assert len(prefix_of(BY_PATH[CHAT], {}, parse(b'{"messages": ' + messages + b"}")).hashes) <= 2


def test_where_nothing_is_generated_there_is_no_prefix() -> None:
    """An engine keeps no cache for embeddings and the like, and a file is not JSON."""
    assert prefix("/v1/embeddings", b"s1", input="Hello") == NOTHING
    assert prefix_of(BY_PATH["/v1/audio/transcriptions"], {}, Fields()) == NOTHING
