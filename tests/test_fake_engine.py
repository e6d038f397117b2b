"""The scripted engine refuses what an engine would refuse, so that a test sees the gateway's faults only."""

from typing import Any

import pytest

from tests.inprocess import model, yard


@pytest.mark.parametrize(
    "wrong",
    [
        {"messages": "hi"},
        {"messages": ["hi"]},
        {"stream_options": True},
        {"max_tokens": "4"},
        {"max_tokens": [4]},
        {"max_tokens": 10**40},
        {"max_completion_tokens": -1},
        {"fake": 7},
    ],
)
async def test_a_field_of_the_wrong_kind_is_refused(wrong: dict[str, Any]) -> None:
    """400 with the field's name, which the client gets to see."""
    async with yard(model("chat")) as y:
        answer = await y.client.post("/v1/chat/completions", json={"model": "chat"} | wrong)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(wrong)))
