"""A client that leaves: the engine stops working for it."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from tests.engine.ask import GENERATING, MESSAGES, RESPONSES, assert_answers, body
from tests.serve.cluster import Cluster, eventually

pytestmark = pytest.mark.engine
LONG = 1500  # tokens: minutes on a CPU
WITHIN_S = 5.0
_number = itertools.count()


def running(cluster: Cluster) -> int:
    return int(cluster.reports("chat")[0]["engine"]["running"])


async def until_running(cluster: Cluster, count: int) -> None:
    what = f"{count} requests run in the engine"
    await asyncio.to_thread(eventually, what, lambda: running(cluster) >= count, 30)


@asynccontextmanager
async def client_of(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    unlimited = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60, trust_env=False, limits=unlimited) as client:
        yield client


def assert_aborted(cluster: Cluster) -> None:
    eventually("the engine stopped", lambda: running(cluster) == 0, WITHIN_S)
    cluster.wait_quiet("chat")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", GENERATING)
def test_leaving_aborts_the_engines_request(engines: Cluster, path: str, stream: bool) -> None:
    """On each route, streaming or not: closing the connection ends the engine's work within seconds."""
    # The two routes without ignore_eos are held on by a prompt that asks for much.
    more = {} if path in (MESSAGES, RESPONSES) else {"ignore_eos": True}
    request = body(path, "Write a very long story about the sea.", LONG, stream=stream, **more)

    async def leave() -> None:
        async with client_of(engines) as client:
            asked = asyncio.create_task(client.post(path, json=request))
            await until_running(engines, 1)
            assert not asked.done()
            asked.cancel()

    engines.wait_quiet("chat")
    asyncio.run(leave())
    assert_aborted(engines)


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_before_the_first_token(engines: Cluster, stream: bool) -> None:
    """While the engine still reads a long prompt."""
    prompt = f"{next(_number)} " + "word " * 1500
    request = body("/v1/completions", prompt, 500, stream=stream, ignore_eos=True)

    async def leave() -> None:
        async with client_of(engines) as client, asyncio.timeout(30):
            asked = asyncio.create_task(client.post("/v1/completions", json=request))
            await until_running(engines, 1)
            asked.cancel()

    asyncio.run(leave())
    assert_aborted(engines)


def test_leaving_after_the_first_event(engines: Cluster) -> None:
    """In the middle of a stream."""
    request = body("/v1/completions", "The sea", LONG, stream=True, ignore_eos=True)
    with engines.client.stream("POST", "/v1/completions", json=request) as answer:
        chunks = answer.iter_raw()  # kept: letting go of it would close the connection
        next(chunks)
        assert running(engines) == 1
    assert_aborted(engines)


def test_leaving_while_queued(engines: Cluster) -> None:
    """28 requests where the engine runs 16 at once and the replica takes 24: the engine's queue and the gateway's own
    are left too, and nothing of it is done later."""
    request = body("/v1/completions", "The sea", LONG, ignore_eos=True)

    async def leave() -> None:
        async with client_of(engines) as client:
            asked = [asyncio.create_task(client.post("/v1/completions", json=request)) for _ in range(28)]
            # A full replica takes no further call, so its report cannot say that they are all there.
            await asyncio.wait(asked, timeout=3)
            assert not any(task.done() for task in asked)
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    asyncio.run(leave())
    assert_aborted(engines)
    assert_answers(engines.client)
