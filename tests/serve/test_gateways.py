"""Gateways that die: what breaks, what does not, and that nothing hangs."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from typing import Any

import httpx
import psutil
import pytest

from serve_app.config import CARD_DEPLOYMENT
from tests.chaos.processes import lives
from tests.serve.cluster import Cluster, both_proxies, eventually, fake_app, two_gateways

pytestmark = pytest.mark.serve
CHAT = "/v1/chat/completions"
# Bounds a hang, no more: what is said to be prompt takes a fraction of a second.
PATIENCE_S = 30
SHARED = fake_app("shared", engine={"max_num_seqs": 256}, token_interval_s=0.05)


def chat(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "x"}], **more}


def sockets(pid: int) -> int:
    return len(psutil.Process(pid).net_connections("tcp"))


async def kill(pid: int) -> None:
    """SIGKILL, and wait until the process is gone."""
    process = psutil.Process(pid)
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        while lives(process):
            await asyncio.sleep(0.005)


class Reader:
    """Reads an open stream to its end. ``chunks``: how many came; ``task`` is done once it broke or ended."""

    def __init__(self, stream: AsyncIterator[bytes]) -> None:
        self.chunks = 0
        self.task = asyncio.create_task(self._read(stream))

    async def _read(self, stream: AsyncIterator[bytes]) -> None:
        with suppress(httpx.TransportError):
            async for _ in stream:
                self.chunks += 1

    async def goes_on(self) -> bool:
        """Whether more comes, or else the stream has broken. Neither within 30 s: it hangs."""
        seen = self.chunks
        async with asyncio.timeout(PATIENCE_S):
            while self.chunks < seen + 5 and not self.task.done():
                await asyncio.sleep(0.01)
        return not self.task.done()


async def in_one_packet(cluster: Cluster, body: dict[str, Any]) -> int:
    """The status of a request whose head and body are one write; 0 where the connection broke."""
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.http_port)
    try:
        writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        answer = await reader.read()
    except OSError:
        return 0
    finally:
        writer.close()
    return int(answer.split()[1]) if answer else 0


@both_proxies
async def test_one_of_two_gateways_dies(yard_cluster: Cluster) -> None:
    """kill -9 under load. Its own streams break, at once; the other's go on; no request hangs; every request that is
    sent after its death succeeds, also in the moment in which its successor comes; the model is quiet afterwards.
    HAProxy sends a request that came in one packet, and has no byte of its answer yet, to the other gateway."""
    yard_cluster.deploy(SHARED)
    with two_gateways(yard_cluster):
        before = yard_cluster.gateway_pids()
        at_rest = {pid: sockets(pid) for pid in before.values()}
        async with AsyncExitStack() as stack:
            client = httpx.AsyncClient(base_url=yard_cluster.url, timeout=600, trust_env=False)
            await stack.enter_async_context(client)
            streams: list[Reader] = []
            whole, packed = [], []
            async with asyncio.timeout(PATIENCE_S):
                # A stream costs a gateway two sockets. Both have several: the proxy knows both.
                while any(sockets(pid) < count + 6 for pid, count in at_rest.items()):
                    body = chat("shared", stream=True, max_tokens=1_000_000)
                    answer = await stack.enter_async_context(client.stream("POST", CHAT, json=body))
                    streams.append(Reader(answer.aiter_raw()))
            for _ in range(8):
                thinking = chat("shared", max_tokens=1, fake={"first_token_s": 5})
                whole.append(asyncio.create_task(client.post(CHAT, json=thinking)))
                packed.append(asyncio.create_task(in_one_packet(yard_cluster, thinking)))
            await asyncio.sleep(0.5)  # they are on their way to a replica
            victim = next(iter(before.values()))
            await kill(victim)

            codes = [await _code(yard_cluster) for _ in range(30)]
            assert set(codes) == {200}
            went_on = await asyncio.gather(*(stream.goes_on() for stream in streams))
            assert set(went_on) == {True, False}
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(*whole, return_exceptions=True)
                kept = await asyncio.gather(*packed)
            assert set(kept) == {200} if yard_cluster.haproxy else 200 in kept

            codes = []
            back = asyncio.create_task(asyncio.to_thread(_two_other, yard_cluster, victim))
            while not back.done():
                codes.append(await _code(yard_cluster))
            await back
            codes += [await _code(yard_cluster) for _ in range(30)]
            assert set(codes) == {200}
        await asyncio.gather(*(stream.task for stream in streams))
        await asyncio.to_thread(yard_cluster.wait_quiet, "shared")


@both_proxies
async def test_the_only_gateway_dies(yard_cluster: Cluster) -> None:
    """kill -9 in the middle of a stream, which breaks: the replica gets its lease back and its request ends. Requests
    sent after its death wait for its successor and succeed."""
    yard_cluster.deploy(SHARED)
    await asyncio.to_thread(yard_cluster.wait_quiet, "shared")
    (victim,) = yard_cluster.gateway_pids().values()
    endless = chat("shared", stream=True, max_tokens=1_000_000)
    async with (
        httpx.AsyncClient(base_url=yard_cluster.url, timeout=60, trust_env=False) as client,
        client.stream("POST", CHAT, json=endless) as answer,
    ):
        stream = Reader(answer.aiter_raw())
        assert await stream.goes_on()
        assert yard_cluster.reports("shared")[0]["leases"] == 1
        await kill(victim)
        assert await asyncio.gather(*(_code(yard_cluster) for _ in range(8))) == [200] * 8
        async with asyncio.timeout(PATIENCE_S):
            await stream.task
    assert victim not in yard_cluster.gateway_pids().values()
    await asyncio.to_thread(yard_cluster.wait_quiet, "shared")


async def _code(cluster: Cluster) -> int:
    """The status of one short request on a connection of its own."""
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60, trust_env=False) as client:
        answer = await client.post(CHAT, json=chat("shared", max_tokens=1))
    return answer.status_code


def _two_other(cluster: Cluster, gone: int) -> None:
    eventually("two gateways again", lambda: len(p := cluster.gateway_pids()) == 2 and gone not in p.values())


async def test_what_two_gateways_hold_is_summed_and_counted_once(yard_cluster: Cluster) -> None:
    """One request runs, the others wait at whichever gateway has them: the model's card, which its scaling follows,
    knows all of them, and none twice however long they wait."""
    yard_cluster.deploy(fake_app("tight", engine={"max_num_seqs": 1}, overcommit=0))
    with two_gateways(yard_cluster):
        async with httpx.AsyncClient(base_url=yard_cluster.url, timeout=60, trust_env=False) as client:
            body = chat("tight", max_tokens=2, fake={"hang": 1})
            asked = [asyncio.create_task(client.post(CHAT, json=body)) for _ in range(12)]

            def held() -> int:
                return int(yard_cluster.ready()["models"]["tight"]["held"])

            # Each gateway reads the card anew every few seconds.
            await asyncio.to_thread(eventually, "eleven are held", lambda: {held() for _ in range(10)} == {11})
            for _ in range(15):
                await asyncio.sleep(0.2)
                assert held() == 11
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            await asyncio.to_thread(eventually, "none is held", lambda: {held() for _ in range(10)} == {0})
    yard_cluster.remove("tight")


def test_gateways_agree_where_a_conversation_goes(yard_cluster: Cluster) -> None:
    """Each turn may come to another gateway, and finds the replica that has the turns before. Another strategy
    applies live and goes elsewhere."""
    name = "talk"
    yard_cluster.deploy(fake_app(name, replicas=3))
    talk = [{"role": "user", "content": "a b c " * 500}]

    def replica(**more: Any) -> str:
        # A connection of its own: the proxy hands it to either gateway.
        answer = httpx.post(
            yard_cluster.url + CHAT, json=chat(name, messages=talk, **more), timeout=60, trust_env=False
        )
        assert answer.status_code == 200, answer.text
        return str(answer.json()["system_fingerprint"])

    with two_gateways(yard_cluster):
        eventually("three replicas", lambda: yard_cluster.ready()["models"][name]["replicas"] == 3)
        # Until both know it: a gateway that was never asked has never heard of the others.
        eventually("both gateways agree", lambda: len({replica() for _ in range(12)}) == 1)
        home = replica()
        for turn in range(8):
            talk.append({"role": "assistant", "content": f"{turn} " * 50})
            assert {replica() for _ in range(3)} == {home}
        app = fake_app(name, replicas=3)
        card = next(d for d in app["deployments"] if d["name"] == CARD_DEPLOYMENT)
        card["user_config"]["routing"] = "round_robin"
        yard_cluster.deploy(app)
        eventually("it goes round", lambda: len({replica() for _ in range(12)}) == 3)
    yard_cluster.remove(name)
