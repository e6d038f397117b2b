"""Who waits for a full model: in which order they are served, who is refused, and for how long they wait."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from serve_app import errors
from serve_app.admission import Ticket
from serve_app.catalog import State
from serve_app.config import RequestLimits
from serve_app.gateway.lease import Lease
from serve_app.gateway.leases import LeasePool
from serve_app.gateway.routes import RELAYED
from tests.inprocess import eventually, model, yard

CHAT = "/v1/chat/completions"
TIMEOUT = "x-modelyard-timeout-s"


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "a b"}], **more}


class Crowd:
    """Requests without a body, on a model with one place: ``served`` are the names of those that had a lease, in
    order."""

    def __init__(self, pool: LeasePool) -> None:
        self.pool = pool
        self.served: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def comes(self, name: str, ticket: Ticket) -> None:
        self.tasks[name] = asyncio.create_task(self._run(name, ticket))
        await asyncio.sleep(0)  # until it waits

    async def _run(self, name: str, ticket: Ticket) -> None:
        lease = await self.pool.acquire(asyncio.get_running_loop().time(), ticket)
        self.served.append(name)
        self.pool.release(lease)


@asynccontextmanager
async def full(**limits: Any) -> AsyncIterator[tuple[Crowd, Lease]]:
    """A model whose only place is taken by a lease."""
    async with yard(model("m", slots=1, limits=RequestLimits(**limits))) as y:
        pool = y.directory.pool(y.models["m"].entry())
        lease = await pool.acquire(asyncio.get_running_loop().time())
        yield Crowd(pool), lease
        await y.quiet()


async def test_one_key_does_not_wait_for_the_flood_of_another() -> None:
    """200 wait for one key; another's first request is served next."""
    async with full() as (crowd, lease):
        for n in range(200):
            await crowd.comes(f"a{n}", Ticket("a", tokens=100))
        await crowd.comes("b", Ticket("b", tokens=5000))
        crowd.pool.release(lease)
        await asyncio.gather(*crowd.tasks.values())
        assert "b" in crowd.served[:2]
        assert [name for name in crowd.served if name != "b"] == [f"a{n}" for n in range(200)]


async def test_without_tickets_the_order_is_that_of_arrival() -> None:
    """As for requests of one key."""
    async with full() as (crowd, lease):
        for n in range(20):
            await crowd.comes(str(n), Ticket())
        crowd.pool.release(lease)
        await asyncio.gather(*crowd.tasks.values())
        assert crowd.served == [str(n) for n in range(20)]


async def test_who_leaves_frees_its_place_at_once() -> None:
    """Cancelled while it waits: the next one is not refused, and nothing is served to who is gone."""
    async with full(max_waiting=2) as (crowd, lease):
        await crowd.comes("gone", Ticket("a"))
        await crowd.comes("stays", Ticket("a"))
        crowd.tasks["gone"].cancel()
        with pytest.raises(asyncio.CancelledError):
            await crowd.tasks.pop("gone")
        assert crowd.pool.waiting == 1
        await crowd.comes("next", Ticket("a"))
        crowd.pool.release(lease)
        await asyncio.gather(*crowd.tasks.values())
        assert crowd.served == ["stays", "next"]


async def test_who_waited_too_long_frees_its_place() -> None:
    """Its own limit is over; the queue is empty."""
    async with full() as (crowd, lease):
        with pytest.raises(errors.Unavailable) as late:
            await crowd.pool.acquire(asyncio.get_running_loop().time(), Ticket("a"), 0.05)
        assert late.value.retry_after_s
        assert crowd.pool.waiting == 0
        crowd.pool.release(lease)


async def test_a_full_queue_is_shared_between_keys() -> None:
    """The newest of the largest key gets the 429 that another key's newcomer would have had; its own newcomers do."""
    async with full(max_waiting=3) as (crowd, lease):
        for name in ("a0", "a1", "a2", "a3", "b0"):
            await crowd.comes(name, Ticket(name[0]))
        for name in ("a3", "a2"):
            with pytest.raises(errors.TooManyRequests) as refused:
                await crowd.tasks.pop(name)
            assert refused.value.retry_after_s
        crowd.pool.release(lease)
        await asyncio.gather(*crowd.tasks.values())
        assert sorted(crowd.served) == ["a0", "a1", "b0"]


async def test_the_queue_of_a_sleeping_model_is_shared_likewise() -> None:
    """There the answer is 503, with the time until the model is there (7 s here)."""
    async with yard(model("m", limits=RequestLimits(hold_requests=2))) as y:
        fake = y.models["m"]
        await fake.replicas[0].die()
        fake.state = State.ASLEEP
        crowd = Crowd(y.directory.pool(fake.entry()))
        for name in ("a0", "a1", "b0"):
            await crowd.comes(name, Ticket(name[0]))
        with pytest.raises(errors.Unavailable) as refused:
            await crowd.tasks.pop("a1")
        assert refused.value.retry_after_s == 7
        await fake.replicas[0].restart()
        await asyncio.gather(*crowd.tasks.values())
        assert crowd.served == ["a0", "b0"]
        await y.quiet()


async def test_who_was_admitted_goes_first_and_is_never_refused() -> None:
    """However many wait, and of whatever class."""
    async with full(max_waiting=1) as (crowd, lease):
        await crowd.comes("newcomer", Ticket("a", priority=-5))
        await crowd.comes("moved", Ticket("a", priority=5).first())
        crowd.pool.release(lease)
        await asyncio.gather(*crowd.tasks.values())
        assert crowd.served == ["moved", "newcomer"]


async def test_requests_of_a_lost_replica_are_asked_again_before_newcomers() -> None:
    """Two replicas with one place each, both taken, two more wait: one replica dies, and its request is not third."""
    async with yard(model("m", replicas=2, slots=1)) as y:
        done: list[str] = []

        def at_work_and_waiting() -> tuple[int, int]:
            pool = y.directory.report().get("m", {"in_use": 0, "waiting": 0})
            return pool["in_use"], pool["waiting"]

        async def ask(name: str) -> None:
            answer = await y.client.post(CHAT, json=chat(max_tokens=2, fake={"first_token_s": 1.0}))
            assert answer.status_code == 200
            done.append(name)

        asked = []
        for name in ("first", "first", "newcomer", "newcomer"):
            asked.append(asyncio.create_task(ask(name)))
            await eventually(lambda: sum(at_work_and_waiting()) == len(asked))
        assert at_work_and_waiting() == (2, 2)
        await y.models["m"].replicas[0].die()
        await asyncio.gather(*asked)
        assert done == ["first", "first", "newcomer", "newcomer"]
        await y.quiet()


async def test_a_client_may_wait_for_less_long_but_not_longer() -> None:
    """503 with Retry-After once its own time is over, or the model's, whichever is first; also on /generate."""
    async with AsyncExitStack() as stack:
        y = await stack.enter_async_context(yard(model("m", slots=1, limits=RequestLimits(wait_s=1.0))))
        running = asyncio.create_task(y.client.post(CHAT, json=chat(fake={"hang": 0})))
        await asyncio.sleep(0.1)
        loop = asyncio.get_running_loop()
        plain = {"model_name": "m", "prompt": "x"}
        for path, body, given, least, most in (
            (CHAT, chat(), "0.1", 0.1, 0.9),
            (CHAT, chat(stream=True), "0.1", 0.1, 0.9),
            ("/generate", plain, "1e-1", 0.1, 0.9),
            (CHAT, chat(), "100", 1.0, 10),
        ):
            began = loop.time()
            late = await y.client.post(path, json=body, headers={TIMEOUT: given})
            assert (late.status_code, late.json()["error"]["code"]) == (503, "model_unavailable")
            assert int(late.headers["retry-after"]) >= 1
            assert least <= loop.time() - began < most
        running.cancel()
        await asyncio.wait([running])
        await y.quiet()


async def test_a_time_that_suffices_changes_nothing() -> None:
    """It bounds the wait for a replica, not the answer."""
    async with yard(model("m")) as y:
        body = chat(max_tokens=2, fake={"first_token_s": 0.5})
        assert (await y.client.post(CHAT, json=body, headers={TIMEOUT: "0.2"})).status_code == 200


@pytest.mark.parametrize("given", ["0", "-1", "nan", "inf", "1e999", "soon", "", "1_0", "0x10", "5 s"])
async def test_a_time_that_is_none_is_refused(given: str) -> None:
    """400 that names the header, in the protocol of the route."""
    async with yard(model("m")) as y:
        answer = await y.client.post(CHAT, json=chat(), headers={TIMEOUT: given})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, TIMEOUT)
        assert y.models["m"].streams == 0


async def test_every_json_route_looks_at_the_time() -> None:
    """Whatever the answer would be."""
    async with yard(model("m")) as y:
        y.models["m"].replicas[0].facts = None  # a model of which nothing is known can do anything
        for route in RELAYED:
            if route.body == "json":
                answer = await y.client.post(route.path, json=chat(), headers={TIMEOUT: "x"})
                assert (answer.status_code, TIMEOUT in answer.text) == (400, True), route.path
        answer = await y.client.post("/generate", json={"model_name": "m", "prompt": "x"}, headers={TIMEOUT: "x"})
        assert (answer.status_code, TIMEOUT in answer.text) == (400, True)
