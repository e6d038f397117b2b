"""Adapters as clients meet them: ids of their own at the gateway, answered by their base's replicas."""

import asyncio
from typing import Any

from serve_app.catalog import State
from serve_app.config import FakeScript, GatewaySettings, Name
from tests.inprocess import Yard, eventually, model, yard
from tests.sse import joined

CHAT = "/v1/chat/completions"
ADAPTERS = {"sql": "/adapters/sql", "org/poet": "/adapters/poet", "bad": "/adapters/broken"}


def chat(asked: str, **more: Any) -> dict[str, Any]:
    return {"model": asked, "messages": [{"role": "user", "content": "a b"}], "max_tokens": 3, **more}


def loaded(y: Yard) -> dict[str, list[str]]:
    """By replica."""
    return {r.name: r.engine.report()["adapters"] for r in y.models["base"].replicas}


async def test_each_id_is_answered_by_its_own_weights() -> None:
    """Stream and whole answer, by the adapter's name or the base's, and as the id that was asked for."""
    async with yard(model("base", adapters=ADAPTERS)) as y:
        for asked, expected in (
            ("sql", "sql:t0 sql:t1 sql:t2 "),
            ("base", "t0 t1 t2 "),
            ("org/poet", "org/poet:t0 org/poet:t1 org/poet:t2 "),
        ):
            whole = (await y.client.post(CHAT, json=chat(asked))).json()
            assert (whole["choices"][0]["message"]["content"], whole["model"]) == (expected, asked)
            assert joined((await y.client.post(CHAT, json=chat(asked, stream=True))).text) == expected
        assert loaded(y) == {"base-0": ["org/poet", "sql"]}
        tokens = await y.client.post("/tokenize", json={"model": "sql", "prompt": "a"})
        assert tokens.status_code == 200
        await y.quiet()


async def test_they_are_listed_with_their_base() -> None:
    """Nobody is told where they lie."""
    async with yard(model("base", adapters=ADAPTERS, also_known_as=("org/base",))) as y:
        listed = {m["id"]: (m["root"], m["parent"]) for m in (await y.client.get("/v1/models")).json()["data"]}
        assert listed == {
            "base": ("base", None),
            "org/base": ("base", None),
            "sql": ("sql", "base"),
            "org/poet": ("org/poet", "base"),
            "bad": ("bad", "base"),
        }
        for path in ("/v1/models", "/v1/models/org/poet", "/ready", "/ready?model=sql"):
            answer = await y.client.get(path)
            assert answer.status_code == 200
            assert "/adapters" not in answer.text
        assert set((await y.client.get("/ready?model=base")).json()["model"]["adapters"]) == set(ADAPTERS)


async def test_a_broken_one_is_the_clients_400_and_nobody_elses() -> None:
    """In both protocols; not asked of another replica, nor of a fallback; base and others answer on."""
    async with yard(model("base", adapters=ADAPTERS, replicas=2), model("other")) as y:
        y.relay.settings = GatewaySettings(names={"smart": Name(to="bad", fallback=("other",))})
        for asked in ("bad", "smart"):
            for stream in (True, False):
                answer = await y.client.post(CHAT, json=chat(asked, stream=stream))
                assert (answer.status_code, answer.json()["error"]["code"]) == (400, "adapter_unusable")
                assert "/adapters" not in answer.text
        anthropic = await y.client.post("/v1/messages", json=chat("bad"))
        assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (400, "invalid_request_error")
        for asked in ("base", "sql"):
            assert (await y.client.post(CHAT, json=chat(asked))).status_code == 200
        await y.quiet()


async def test_names_lead_to_adapters() -> None:
    """An alias, shares between an adapter and its base, and a fallback to one."""
    async with yard(model("base", adapters=ADAPTERS), model("gone", replicas=0)) as y:
        y.relay.settings = GatewaySettings(
            names={
                "alias": Name(to="sql"),
                "canary": Name(to={"base": 1, "sql": 1}),
                "safe": Name(to="gone", fallback=("org/poet",)),
            }
        )

        async def text(asked: str, **more: Any) -> str:
            answer = await y.client.post(CHAT, json=chat(asked, **more), headers={"x-modelyard-timeout-s": "0.2"})
            assert answer.status_code == 200, answer.text
            return str(answer.json()["choices"][0]["message"]["content"])

        assert await text("alias") == "sql:t0 sql:t1 sql:t2 "
        drawn = {await text("canary", user=f"user-{i}") for i in range(30)}
        assert drawn == {"t0 t1 t2 ", "sql:t0 sql:t1 sql:t2 "}
        assert await text("safe") == "org/poet:t0 org/poet:t1 org/poet:t2 "
        await y.quiet()


async def test_requests_go_where_their_adapter_is() -> None:
    """Of three replicas each adapter is loaded into one, whatever its requests say, while that has room."""
    fake = model("base", adapters=ADAPTERS, replicas=3)
    fake.watch.update("base", [replica.name for replica in fake.replicas])
    async with yard(fake) as y:
        for number in range(12):
            for asked in ("sql", "org/poet"):
                body = chat(asked) | {"messages": [{"role": "user", "content": f"{number} " * 900}]}
                assert (await y.client.post(CHAT, json=body)).status_code == 200
        holders = sorted(adapter for adapters in loaded(y).values() for adapter in adapters)
        assert holders == ["org/poet", "sql"]
        await y.quiet()


async def test_a_stream_moves_with_its_adapter() -> None:
    """Its replica dies: the other one loads the adapter and goes on, token by token."""
    script = FakeScript(token_interval_s=0.02)
    async with yard(model("base", adapters=ADAPTERS, replicas=2, script=script)) as y:
        async with y.client.stream("POST", CHAT, json=chat("sql", stream=True, max_tokens=30)) as answer:
            parts = answer.aiter_text()
            text = await anext(parts)
            busy = next(r for r in y.models["base"].replicas if r.gate.busy)
            await busy.die()
            text += "".join([part async for part in parts])
        assert joined(text) == "".join(f"sql:t{i} " for i in range(30))
        assert sum("sql" in adapters for adapters in loaded(y).values()) == 2


async def test_adapters_come_and_go_live() -> None:
    """One that is taken away is unknown, and its id may then be another model's; a new path is other weights."""
    async with yard(model("base", adapters={"sql": "/adapters/broken"})) as y:
        assert (await y.client.post(CHAT, json=chat("sql"))).status_code == 400
        y.models["base"].adapters = {"sql": "/adapters/sql-2"}
        assert (await y.client.post(CHAT, json=chat("sql"))).status_code == 200
        y.models["base"].adapters = {}
        assert (await y.client.post(CHAT, json=chat("sql"))).status_code == 404
        await y.quiet()


async def test_a_request_for_an_adapter_wakes_its_base() -> None:
    """It waits in the base's queue, is held for the base as its scaling sees it, and is answered once that is up."""
    fake = model("base", adapters=ADAPTERS)
    async with yard(fake) as y:
        await fake.replicas[0].die()
        fake.state = State.ASLEEP
        asking = asyncio.create_task(y.client.post(CHAT, json=chat("sql")))
        await eventually(lambda: 1 in fake.held)
        await fake.replicas[0].restart()
        fake.state = None
        answer = await asking
        assert answer.json()["choices"][0]["message"]["content"] == "sql:t0 sql:t1 sql:t2 "
        await y.quiet()
