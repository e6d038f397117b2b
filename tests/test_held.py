"""Requests that wait while no replica runs: how long, how many, what their clients see, and who is told."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import httpx

from serve_app.catalog import State
from serve_app.config import RequestLimits
from serve_app.gateway import relay
from serve_app.gateway.held import HeldReport
from tests.inprocess import FakeModel, Yard, model, yard
from tests.sse import events

CHAT = "/v1/chat/completions"
SIGNS = {"x-modelyard-keep-alive": "1"}


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "a b"}], **more}


async def sleeping(stack: AsyncExitStack, **limits: Any) -> tuple[Yard, FakeModel]:
    """A yard whose only model has no replica until ``replicas[0].restart()``."""
    y = await stack.enter_async_context(yard(model("m", limits=RequestLimits(**limits))))
    fake = y.models["m"]
    await fake.replicas[0].die()
    fake.state = State.ASLEEP
    return y, fake


async def until_waiting(fake: FakeModel, requests: int = 1) -> None:
    async with asyncio.timeout(5):
        while fake.pool is None or fake.pool.waiting < requests:
            await asyncio.sleep(0.01)


async def test_requests_wait_for_a_sleeping_model_and_one_call_wakes_it() -> None:
    """Longer than they would wait for a busy one; Serve gets one pending lease call, however many wait."""
    async with AsyncExitStack() as stack:
        y, fake = await sleeping(stack, wait_s=0.1, hold_s=20.0)
        waiting = [asyncio.create_task(y.client.post(CHAT, json=chat())) for _ in range(5)]
        await until_waiting(fake, 5)
        await asyncio.sleep(0.3)
        assert fake.streams == 1
        await fake.replicas[0].restart()
        assert [(await answer).status_code for answer in waiting] == [200] * 5
        await y.quiet()


async def test_beyond_either_bound_the_answer_is_503_and_says_when_to_come_back() -> None:
    """``hold_requests`` at once, ``hold_s`` in time; ``Retry-After`` is the model's own start time (here 7 s)."""
    async with AsyncExitStack() as stack:
        y, fake = await sleeping(stack, hold_requests=1, hold_s=0.5)
        first = asyncio.create_task(y.client.post(CHAT, json=chat()))
        await until_waiting(fake)
        refused = await y.client.post(CHAT, json=chat())
        assert not first.done(), "the second was refused at once"
        for answer in (refused, await first):
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
            assert "error" in answer.json()
        await y.quiet()


async def test_the_card_hears_how_many_wait_until_nobody_does() -> None:
    """Its number is part of the queue that scaling follows."""
    async with AsyncExitStack() as stack:
        y, fake = await sleeping(stack)
        waiting = [asyncio.create_task(y.client.post(CHAT, json=chat())) for _ in range(3)]
        async with asyncio.timeout(5):
            while 3 not in fake.held:
                await asyncio.sleep(0.01)
        await fake.replicas[0].restart()
        await asyncio.gather(*waiting)
        async with asyncio.timeout(5):
            while fake.held[-1] != 0:
                await asyncio.sleep(0.01)


async def test_a_request_that_finds_a_replica_tells_nobody() -> None:
    """Leases come in milliseconds: a call to the card for each request would cost more than they do."""
    async with yard(model("m")) as y:
        for _ in range(3):
            await y.client.post(CHAT, json=chat(max_tokens=1))
        await asyncio.sleep(0.2)
        assert set(y.models["m"].held) <= {0}


async def test_a_report_that_begins_while_the_last_one_ends_is_made() -> None:
    """Somebody comes in the moment in which zero is told."""
    told: list[int] = []
    waiting = 1

    async def tell(requests: int) -> None:
        nonlocal waiting
        told.append(requests)
        waiting = {(1,): 0, (1, 0): 2, (1, 0, 2): 0}.get(tuple(told), 0)

    report = HeldReport(lambda: waiting, tell)
    report.begin()
    async with asyncio.timeout(10):
        while told != [1, 0, 2, 0]:
            await asyncio.sleep(0.01)


async def test_signs_of_life_for_a_stream_that_asked_for_them(monkeypatch: Any) -> None:
    """SSE comments while it waits, then the answer's own events in the same stream; the text is whole."""
    monkeypatch.setattr(relay, "FIRST_SIGN_S", 0.05)
    monkeypatch.setattr(relay, "SIGN_S", 0.05)
    async with AsyncExitStack() as stack:
        y, fake = await sleeping(stack)
        async with y.client.stream("POST", CHAT, json=chat(stream=True, max_tokens=3), headers=SIGNS) as answer:
            assert (answer.status_code, answer.headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
            parts = answer.aiter_text()
            assert (await anext(parts)).startswith(": m is starting, about 7 s left\n\n")
            await fake.replicas[0].restart()
            text = "".join([part async for part in parts])
        told = [part for part in text.split("\n\n") if not part.startswith(":")]
        answers = events("\n\n".join(told))
        assert "".join(a["choices"][0]["delta"].get("content", "") for a in answers) == "t0 t1 t2 "
        await y.quiet()


async def test_signs_of_life_for_all_where_the_model_says_so(monkeypatch: Any) -> None:
    """``limits.keep_alive``; an error after the first sign is an event, in the protocol of the route."""
    monkeypatch.setattr(relay, "FIRST_SIGN_S", 0.05)
    async with AsyncExitStack() as stack:
        y, _ = await sleeping(stack, keep_alive=True, hold_s=0.3)
        answer = await y.client.post(CHAT, json=chat(stream=True))
        assert (answer.status_code, answer.text.startswith(": m is starting")) == (200, True)
        [error] = events(answer.text.partition("\n\n")[2])
        assert "could take the request in time" in error["error"]["message"]
        messages = await y.client.post("/v1/messages", json=chat(stream=True, max_tokens=1))
        assert messages.text.partition("\n\n")[2].startswith("event: error\n")
        await y.quiet()


async def test_an_engine_error_after_a_sign_of_life_is_an_event(monkeypatch: Any) -> None:
    """The status line is long gone when the engine refuses the request."""
    monkeypatch.setattr(relay, "FIRST_SIGN_S", 0.05)
    async with AsyncExitStack() as stack:
        y, fake = await sleeping(stack)
        body = chat(stream=True, fake={"status": 400})
        asked = asyncio.create_task(y.client.post(CHAT, json=body, headers=SIGNS))
        await until_waiting(fake)
        await asyncio.sleep(0.2)
        await fake.replicas[0].restart()
        answer = await asked
        [error] = events("\n\n".join(p for p in answer.text.split("\n\n") if not p.startswith(":")))
        assert error["error"]["message"] == "the script says so"


async def test_nothing_is_committed_for_who_did_not_ask() -> None:
    """Without the header, and for answers that are no streams, status and error are as ever."""
    async with AsyncExitStack() as stack:
        y, _ = await sleeping(stack, hold_s=0.2)
        for body, headers in (
            (chat(stream=True), {}),
            (chat(), SIGNS),
            (chat(stream=True), {**SIGNS, **{"x-modelyard-keep-alive": "0"}}),
        ):
            answer = await y.client.post(CHAT, json=body, headers=headers)
            assert (answer.status_code, "retry-after" in answer.headers) == (503, True)


async def test_a_client_that_leaves_while_it_waits_leaves_nothing(monkeypatch: Any) -> None:
    """Before and after the first sign of life."""
    monkeypatch.setattr(relay, "FIRST_SIGN_S", 0.05)
    async with AsyncExitStack() as stack:
        y, fake = await sleeping(stack)
        for headers in ({}, SIGNS):
            asked = asyncio.create_task(y.client.post(CHAT, json=chat(stream=True), headers=headers))
            await until_waiting(fake)
            await asyncio.sleep(0.2)
            asked.cancel()
            async with asyncio.timeout(5):
                while fake.pool is None or fake.pool.waiting:
                    await asyncio.sleep(0.01)
        await fake.replicas[0].restart()
        assert isinstance(await y.client.post(CHAT, json=chat(max_tokens=1)), httpx.Response)
        await y.quiet()
