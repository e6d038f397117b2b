"""The scripted engine refuses what an engine would refuse, so that a test sees the gateway's faults only."""

from typing import Any

import httpx
import pytest

from serve_app.lease import ADAPTER_HEADER, ADAPTER_PATH_HEADER, LEASE_HEADER
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


async def test_an_adapter_shows_in_every_answer() -> None:
    """On the replica's own port: each token names the adapter, the base's name none; another route's answer says it; a
    path that ends in `broken` is refused as the engine does it; the report lists what is loaded."""
    async with yard(model("chat")) as y:
        replica = y.models["chat"].replicas[0]
        base = f"http://127.0.0.1:{replica.server.port}"
        lease = replica.gate.grant()
        async with httpx.AsyncClient(base_url=base, headers={LEASE_HEADER: lease.token.encode()}) as client:

            async def ask(path: str, name: str = "", folder: str = "/a") -> httpx.Response:
                headers = {ADAPTER_HEADER: name.encode(), ADAPTER_PATH_HEADER: folder.encode()} if name else {}
                body = {"model": "chat", "prompt": "hi", "max_tokens": 2}
                return await client.post(path, json=body, headers=headers)

            for name, text in (("left", "left:t0 left:t1 "), ("right", "right:t0 right:t1 "), ("", "t0 t1 ")):
                assert (await ask("/v1/completions", name)).json()["choices"][0]["text"] == text
            assert (await ask("/v1/messages", "left")).json()["adapter"] == "left"
            answer = await ask("/v1/completions", "wrong", "/a/broken")
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "adapter_unusable")
        assert replica.engine.report()["adapters"] == ["left", "right"]
        replica.gate.end(lease)
