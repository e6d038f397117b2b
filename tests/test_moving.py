"""Requests whose replica is lost, leaves or falls silent: on real sockets and the scripted engine, without Ray."""

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import httpx
import pytest

from serve_app.config import FakeScript, RequestLimits
from serve_app.gateway.routes import RELAYED
from serve_app.lease import GROUP_END, RECORD
from tests.inprocess import FakeModel, Replica, Yard, model, yard
from tests.sse import events

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
KEEP = {"x-modelyard-keep": "1"}
ALL_TASKS = ("generate", "embed", "score")
TOKENS = 20


def body(path: str, **more: Any) -> dict[str, Any]:
    prompt = (
        {"prompt": "two words"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "two words"}]}
    )
    return {"model": "chat", "max_tokens": TOKENS, **prompt, **more}


def streamed(path: str, **more: Any) -> dict[str, Any]:
    return body(path, stream=True, stream_options={"include_usage": True}, **more)


def right(tokens: int = TOKENS) -> str:
    return "".join(f"t{i} " for i in range(tokens))


def assert_whole(answer: str) -> None:
    """One unbroken stream with the right text, one id, one role, one finish reason at its end, and the sum of usage."""
    seen = events(answer)
    for field in ("id", "model", "created", "object"):
        assert len({event[field] for event in seen}) == 1, field
    choices = [choice for event in seen for choice in event["choices"]]
    chat = "delta" in choices[0]
    assert "".join(c["delta"].get("content", "") if chat else c["text"] for c in choices) == right()
    assert [c["delta"].get("role") for c in choices] == ["assistant"] + [None] * TOKENS if chat else True
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]
    assert seen[-1]["usage"] == {"prompt_tokens": 2, "completion_tokens": TOKENS, "total_tokens": TOKENS + 2}


class Stream:
    """A client that reads one stream; ``after`` does something once so many events have come."""

    def __init__(self, y: Yard, request: dict[str, Any], path: str) -> None:
        self._y = y
        self._request = request
        self._path = path
        self.text = ""

    async def read(self, after: dict[int, Callable[[], Any]] | None = None) -> str:
        count = 0
        async with self._y.client.stream("POST", self._path, json=self._request) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                self.text += line + "\n"
                if line:
                    count += 1
                    if after and count in after:
                        await after[count]()
        return self.text


def serving(y: Yard) -> Replica:
    """The replica that works on the only request."""
    (busy,) = [replica for replica in y.models["chat"].replicas if replica.gate.busy]
    return busy


async def lose(y: Yard) -> None:
    """The replica at work dies; nobody where the answer is complete but for the client's reading."""
    for replica in y.models["chat"].replicas:
        if replica.gate.busy:
            replica.sever()


async def back(y: Yard) -> None:
    """Everybody who died is there again."""
    for replica in y.models["chat"].replicas:
        if not replica.alive:
            await replica.restart()


def pair(**more: Any) -> FakeModel:
    script = FakeScript(token_interval_s=more.pop("interval_s", 0.01))
    return model("chat", replicas=more.pop("replicas", 2), script=script, limits=RequestLimits(**more))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_broken_stream_goes_on(path: str) -> None:
    """Wherever it breaks, the client sees one unbroken stream."""
    async with yard(pair()) as y:
        for point in (1, 2, 3, 10, TOKENS - 1):
            assert_whole(await Stream(y, streamed(path), path).read({point: lambda: lose(y)}))
            assert sum(replica.alive for replica in y.models["chat"].replicas) == 1
            await back(y)
            await y.quiet()


@pytest.mark.parametrize("kept_back", ["last", "end"])
async def test_a_stream_may_break_after_its_last_token(kept_back: Literal["last", "end"]) -> None:
    """Usage and [DONE] are missing, or only the end of the body: what is missing comes from the other replica, which
    generates nothing."""
    async with yard(pair()) as y:
        first, other = y.models["chat"].replicas
        first.door.keep_back, other.alive = kept_back, False
        reading = asyncio.create_task(Stream(y, streamed(CHAT), CHAT).read())
        await first.door.kept_back.wait()
        await asyncio.sleep(0.05)  # what was sent is read
        other.alive = True
        await first.die()
        assert_whole(await reading)
        assert other.door.admitted == (kept_back == "last")
        await y.quiet()


async def test_a_stream_may_break_again_and_again() -> None:
    """Every replica it moves to dies too; within the limit the stream is still whole, beyond it it ends in an error."""
    async with yard(pair(replicas=4, attempts=4)) as y:
        breaks = {point: lambda: lose(y) for point in (3, 6, 9)}
        assert_whole(await Stream(y, streamed(CHAT), CHAT).read(breaks))
        assert y.counted == {("modelyard_moves_total", "chat", "stream", "broken"): 3}
    async with yard(pair(replicas=4, attempts=3)) as y:
        last = events(await Stream(y, streamed(CHAT), CHAT).read(breaks))[-1]
        assert last["error"]["code"] == "model_unavailable"
        await y.quiet()


async def test_what_cannot_be_continued_ends_in_one_error_event() -> None:
    """One error event that says why, then [DONE]; never a silent end. Nothing stays behind."""
    async with yard(pair()) as y:
        seen = events(await Stream(y, streamed(CHAT, n=2), CHAT).read({5: lambda: lose(y)}))
        assert [("error" in event) for event in seen] == [False] * (len(seen) - 1) + [True]
        assert y.counted == {("modelyard_broken_streams_total", "chat"): 1}
        assert "several answers in one stream" in seen[-1]["error"]["message"]
        await y.quiet()


async def test_a_stream_that_no_replica_takes_over_is_counted() -> None:
    """Nobody is there within ``hold_s``: one error event, [DONE], and the metric of broken streams."""
    async with yard(pair(replicas=1, hold_s=0.2)) as y:
        last = events(await Stream(y, streamed(CHAT), CHAT).read({5: lambda: lose(y)}))[-1]
        assert last["error"]["code"] == "model_unavailable"
        assert y.counted["modelyard_broken_streams_total", "chat"] == 1
        await y.quiet()


async def test_another_version_does_not_continue() -> None:
    """Token ids mean nothing to other weights: the replica refuses, and the stream ends in an error event."""
    chat = pair(attempts=2)
    chat.replicas[1] = Replica("chat-other", chat.replicas[1].engine, 64, generation="2")
    async with yard(chat) as y:
        text = await Stream(y, streamed(CHAT), CHAT).read({5: lambda: lose(y)})
        assert events(text)[-1]["error"]["code"] == "model_unavailable"


@pytest.mark.parametrize("path", [route.path for route in RELAYED if route.body == "json"])
async def test_before_the_first_byte_another_replica_is_asked(path: str) -> None:
    """On every route, a replica that dies before it answered costs the client nothing but time; the answer says so in
    a header."""
    async with yard(model("chat", replicas=2, script=FakeScript(first_token_s=0.3, tasks=ALL_TASKS))) as y:
        request = {"model": "chat", "prompt": "x", "input": "x", "messages": [{"role": "user", "content": "x"}]}
        asked = asyncio.create_task(y.client.post(path, json=request))
        while not any(replica.gate.busy for replica in y.models["chat"].replicas):
            await asyncio.sleep(0.01)
        await lose(y)
        answer = await asked
        assert (answer.status_code, answer.headers["x-modelyard-moves"]) == (200, "1")
        await y.quiet()


async def test_a_replica_that_says_503_is_passed_over() -> None:
    """503 is about the replica, so another one is asked; where all say so, the client gets 503. A 400 is the request's
    fault: it is relayed at once and counts against nobody."""
    async with yard(pair(attempts=3)) as y:
        for status, code, tries in ((503, 503, 3), (400, 400, 1)):
            before = sum(r.door.admitted for r in y.models["chat"].replicas)
            answer = await y.client.post(CHAT, json=body(CHAT, fake={"status": status}))
            assert answer.status_code == code
            assert sum(r.door.admitted for r in y.models["chat"].replicas) - before == tries
        await y.quiet()


async def test_the_bytes_are_those_of_the_replica() -> None:
    """With a journal kept, the client gets byte for byte what the engine's app sends without one."""
    async with yard(pair()) as y:
        replica = y.models["chat"].replicas[0]
        for path in (CHAT, COMPLETIONS):
            same = {"x-request-id": "one"}
            through = (await y.client.post(path, json=streamed(path), headers=same)).content
            lease = replica.gate.grant()
            async with httpx.AsyncClient(trust_env=False) as direct:
                url = f"http://127.0.0.1:{replica.server.port}{path}"
                secret = {"x-modelyard-lease": lease.token, "x-modelyard-model": "chat"}
                plain = (await direct.post(url, json=streamed(path), headers=same | secret)).content
                kept = (await direct.post(url, json=streamed(path), headers=same | secret | KEEP)).content
            replica.gate.end(lease)
            assert _undated(through) == _undated(plain)
            assert RECORD in kept
            assert GROUP_END in kept
            assert not {*RECORD, *GROUP_END} & {*through}


def _undated(stream: bytes) -> list[dict[str, Any]]:
    """Bytes but for the second in which they were made."""
    return [{**event, "created": 0} for event in events(stream.decode())]


async def test_a_leaving_replica_keeps_what_ends_in_time() -> None:
    """A stream that ends within the grace is not touched; nothing new goes to the replica."""
    async with yard(pair(grace_s=30)) as y:

        async def leave() -> None:
            leaving = serving(y)
            stays = [r for r in y.models["chat"].replicas if r is not leaving]
            y.directory.running("chat", *stays)
            await asyncio.sleep(0.05)
            before = leaving.door.admitted
            for _ in range(5):
                assert (await y.client.post(CHAT, json=body(CHAT, max_tokens=1))).status_code == 200
            assert leaving.door.admitted == before

        y.directory.running("chat", *y.models["chat"].replicas)
        assert_whole(await Stream(y, streamed(CHAT), CHAT).read({3: leave}))
        assert sum(r.engine.report()["resumed"] for r in y.models["chat"].replicas) == 0
        await y.quiet()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_leaving_replica_hands_over_what_takes_longer(stream: bool) -> None:
    """After the grace a stream moves without a break, a whole answer is made elsewhere, and the replica is free long
    before the answer would have ended on it."""
    async with yard(pair(grace_s=0.1, interval_s=0.05)) as y:
        y.directory.running("chat", *y.models["chat"].replicas)
        request = streamed(CHAT) if stream else body(CHAT)
        asked = asyncio.create_task(y.client.post(CHAT, json=request))
        while not any(r.gate.busy for r in y.models["chat"].replicas):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        leaving = serving(y)
        y.directory.running("chat", *(r for r in y.models["chat"].replicas if r is not leaving))
        while leaving.gate.held:
            assert not asked.done()
            await asyncio.sleep(0.01)
        answer = await asked
        moved = "stream" if stream else "request"
        assert y.counted == {("modelyard_moves_total", "chat", moved, "leaving"): 1}
        if stream:
            assert_whole(answer.text)
        else:
            assert answer.json()["choices"][0]["message"]["content"] == right()
        await y.quiet()


async def test_a_leaving_replica_keeps_its_streams_while_nobody_can_take_them() -> None:
    """Make before break: with no other replica the stream stays where it is and ends there."""
    async with yard(pair(replicas=1, grace_s=0.05)) as y:
        y.directory.running("chat", *y.models["chat"].replicas)
        request = Stream(y, streamed(CHAT), CHAT)

        async def leave() -> None:
            y.directory.running("chat")

        assert_whole(await request.read({3: leave}))
        await y.quiet()


async def test_a_leaving_replica_keeps_what_its_successor_cannot_continue() -> None:
    """An update with other weights: the stream ends in place, and no replica is asked in vain."""
    chat = pair(grace_s=0.05, interval_s=0.03)
    other = chat.replicas[1] = Replica("chat-new", chat.replicas[1].engine, 64, generation="2")
    async with yard(chat) as y:
        y.directory.running("chat", *chat.replicas)

        async def leave() -> None:
            y.directory.running("chat", other)

        assert serving_first(chat)
        assert_whole(await Stream(y, streamed(CHAT), CHAT).read({3: leave}))
        assert (other.door.admitted, y.counted.total()) == (0, 0)
        await y.quiet()


def serving_first(chat: FakeModel) -> bool:
    """The first replica is the one that an idle model's first request goes to."""
    return min(chat.replicas, key=lambda replica: len(replica.streams)) is chat.replicas[0]


async def test_a_stream_that_stops_moves_on() -> None:
    """An answer that stands still while its replica lives goes on elsewhere after ``token_gap_s``; a first token that
    takes longer than that is no silence while the replica shows that it lives."""
    async with yard(pair(token_gap_s=0.3, silence_s=1.0)) as y:
        assert_whole(await Stream(y, streamed(CHAT, fake={"hang": 7}), CHAT).read())
        assert sum(r.engine.report()["resumed"] for r in y.models["chat"].replicas) == 1
        assert_whole(await Stream(y, streamed(CHAT, fake={"first_token_s": 2.0}), CHAT).read())
        assert sum(r.engine.report()["resumed"] for r in y.models["chat"].replicas) == 1
        await y.quiet()


async def test_a_replica_without_a_sign_of_life_loses_its_requests() -> None:
    """Its event loop stands still: after ``silence_s`` its requests go elsewhere."""
    async with yard(pair(silence_s=0.4)) as y:
        y.directory.running("chat", *y.models["chat"].replicas)
        whole = asyncio.create_task(y.client.post(CHAT, json=body(CHAT, fake={"first_token_s": 0.6})))
        while not any(r.gate.busy for r in y.models["chat"].replicas):
            await asyncio.sleep(0.01)
        frozen = serving(y)
        frozen.freeze()
        answer = await whole
        assert (answer.status_code, answer.headers["x-modelyard-moves"]) == (200, "1")
        frozen.thaw()


async def test_a_client_that_leaves_in_the_middle_of_a_move_leaves_nothing() -> None:
    """While its stream waits for another replica."""
    async with yard(pair(replicas=1, interval_s=0.05)) as y:
        reading = asyncio.create_task(Stream(y, streamed(CHAT), CHAT).read({3: lambda: lose(y)}))
        while y.models["chat"].pool is None or not y.models["chat"].pool.waiting:
            await asyncio.sleep(0.01)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await y.quiet()
