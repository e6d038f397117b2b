"""The access log's line: one line of JSON whatever is in it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.gateway.access_line import FIELDS, LONGEST, Access, line

PLAIN: dict[str, Any] = {
    "at": 1767225600.12345678,
    "id": "r-1",
    "key": None,
    "route": "/v1/completions",
    "asked": "best",
    "model": "chat",
    "replica": "a1",
    "status": 200,
    "outcome": "ok",
    "reason": "ok",
    "moves": 0,
    "prompt_tokens": 4,
    "generated_tokens": None,
    "route_s": 0.0123,
    "queue_s": 0.00001,
    "cold_s": None,
    "engine_s": 1.2,
    "first_byte_s": None,
    "total_s": 1.23456789,
}


def test_a_line() -> None:
    """Every field, in the order of the docs, times to a tenth of a millisecond."""
    assert line(Access(**PLAIN)) == (
        '{"at":1767225600.1235,"id":"r-1","key":null,"route":"/v1/completions","asked":"best","model":"chat",'
        '"replica":"a1","status":200,"outcome":"ok","reason":"ok","moves":0,"prompt_tokens":4,"generated_tokens":null,'
        '"route_s":0.0123,"queue_s":0.0,"cold_s":null,"engine_s":1.2,"first_byte_s":null,"total_s":1.2346}'
    )


@pytest.mark.parametrize("name", ["id", "key", "asked", "replica"])
@given(
    text=st.text()
    | st.sampled_from(['x"}\n{"status":200', "\x1b[31m", "\u2028\x85\r\n", "\x00", "%s %(asctime)s", "\ud800"])
)
def test_nobody_can_begin_a_line_of_their_own(name: str, text: str) -> None:
    """Whatever a field holds, it is one line of printable ASCII, and says what it said."""
    told = line(Access(**PLAIN | {name: text}))
    assert told.isascii()
    assert told.isprintable()
    assert json.loads(told) == json.loads(line(Access(**PLAIN))) | {name: text[:LONGEST]}


def test_a_line_is_bounded() -> None:
    """However long the id is that a client makes up."""
    assert len(line(Access(**PLAIN | {"asked": "\U0001f30a" * 100_000}))) < 12 * LONGEST + 600


def test_the_fields() -> None:
    assert tuple(PLAIN) == FIELDS
