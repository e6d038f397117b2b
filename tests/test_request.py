"""What the gateway guesses of a request's cost."""

import json
from typing import Any

import pytest

from serve_app.gateway.request import BYTES_PER_TOKEN, CHEAP_BYTES, MAX_ANSWERS, USUAL_ANSWER_TOKENS, ticket_of

CHAT = "/v1/chat/completions"


def answer_tokens(path: str = CHAT, **fields: Any) -> int:
    body = json.dumps({"model": "m", **fields}).encode()
    return ticket_of(path, body, None).tokens - len(body) // BYTES_PER_TOKEN


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
    assert ticket_of("/v1/audio/transcriptions", b"no JSON at all" * 2, None).tokens == 7
    assert ticket_of("/v1/embeddings", b"", None).tokens == 1


@pytest.mark.parametrize("size", [100, CHEAP_BYTES, 10 * CHEAP_BYTES])
def test_no_answer_costs_more_than_the_context(size: int) -> None:
    """An image is many bytes and few tokens; a limit may be far above what fits."""
    body = json.dumps({"model": "m", "prompt": "x" * size, "max_tokens": 10**9}).encode()
    assert ticket_of(CHAT, body, 8192).tokens == 8192
