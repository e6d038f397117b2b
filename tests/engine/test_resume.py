"""One real engine, in this process: streams that break are continued exactly (float32, greedy); its numbers."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import yaml

from serve_app import keys
from serve_app.config import GatewaySettings, ModelArgs, RequestLimits
from serve_app.gateway.tally import Tally
from serve_app.lease import EVERY_TOKEN_HEADER
from serve_app.model import chunks
from tests.engine import exact_resume
from tests.engine.ask import CHAT, COMPLETIONS
from tests.engine.conftest import IN_THIS_PROCESS, ONE_THREAD
from tests.engine.exact_resume import Started, reasons, text
from tests.inprocess import FakeModel, Replica, Yard, yard

pytestmark = IN_THIS_PROCESS


def model_args(**engine: Any) -> ModelArgs:
    return ModelArgs.model_validate(
        {
            "source": {"demo": "smollm2-135m-instruct"},
            "engine": {
                # With bfloat16 a prompt's keys and values differ in their last bits from those that were decoded one
                # by one, and a near tie between two tokens may tip over.
                "dtype": "float32",
                "max_model_len": 1024,
                "max_num_seqs": 8,
                "kv_cache_memory_bytes": 400_000_000,
                "enforce_eager": True,
                "scheduling_policy": "priority",
            }
            | engine,
            "resources": {"num_gpus": 0},
            "env": {"VLLM_CPU_OMP_THREADS_BIND": "nobind"} | ONE_THREAD,
        }
    )


# A busy machine may be very slow; these clients wait for it.
SLOW_S = 300.0
STORY = {"model": "chat", "messages": [{"role": "user", "content": "Tell me a short story about a fox."}]}
EMOJI = {"model": "chat", "messages": [{"role": "user", "content": "Repeat exactly: 🦊🐻🐼 日本語 ñandú 🎉"}]}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(engine_home: Path) -> AsyncIterator[Any]:
    """One engine; each replica of a test is a port of its own in front of it."""
    from serve_app.model.engine import VllmEngine

    args = model_args()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODELYARD_HOME", str(engine_home))
        for name, value in args.env.items():
            patch.setenv(name, value)
        running = VllmEngine(args, "chat")
        facts = await running.start()
        yield Started(running, facts)
        running.shutdown()


async def stream(y: Yard, path: str, body: dict[str, Any], break_after: tuple[int, ...] = ()) -> list[Any]:
    return await exact_resume.stream(y, path, {"temperature": 0, "max_tokens": 20} | body, break_after)


def two(engine: Any) -> FakeModel:
    return exact_resume.two(engine, model_args())


def assert_same(broken: list[dict[str, Any]], whole: list[dict[str, Any]]) -> None:
    """Text, usage and finish reason are those of an undisturbed run, and it is one stream."""
    assert text(broken) == text(whole)
    assert broken[-1]["usage"] == whole[-1]["usage"]
    assert reasons(broken) == reasons(whole)
    for field in ("id", "model", "created", "object"):
        assert len({event[field] for event in broken}) == 1, field
    assert len([c for e in broken for c in e["choices"] if c.get("delta", {}).get("role")]) <= 1


async def test_a_broken_stream_goes_on_exactly(engine: Any) -> None:
    """Broken at ten points, and once at three points of one stream."""
    async with yard(two(engine)) as y:
        whole = await stream(y, CHAT, STORY)
        assert reasons(whole) == ["length"]
        for points in ((1,), (2,), (3,), (5,), (7,), (9,), (12,), (15,), (18,), (len(whole) - 1,), (4, 9, 15)):
            assert_same(await stream(y, CHAT, STORY, points), whole)


async def test_a_completion_goes_on_exactly(engine: Any) -> None:
    """The other route."""
    body = {"model": "chat", "prompt": "The sea is"}
    async with yard(two(engine)) as y:
        whole = await stream(y, COMPLETIONS, body)
        for points in ((1,), (12,)):
            assert_same(await stream(y, COMPLETIONS, body, points), whole)


async def test_a_break_inside_a_character(engine: Any) -> None:
    """A character of several tokens is held back until it is whole: where the stream breaks in its middle, the other
    replica sends it, once."""
    async with yard(two(engine)) as y:
        whole = await stream(y, CHAT, EMOJI)
        texts = [c["delta"].get("content") for e in whole for c in e["choices"]]
        inside = [i for i in range(2, len(texts) - 1) if texts[i] == "" and not texts[i + 1].isascii()]
        assert inside, f"no token of {texts} ends inside a character"
        for i in inside[:3]:
            assert_same(await stream(y, CHAT, EMOJI, (i + 1,)), whole)


async def test_stop_strings_across_the_break(engine: Any) -> None:
    """Text that might become a stop string is held back: it is not lost with the replica that held it, and a stop
    string that begins before the break and ends after it still stops."""
    async with yard(two(engine)) as y:
        free = text(await stream(y, CHAT, STORY))
        body = STORY | {"stop": [free[len(free) // 2 :][:15]]}
        whole = await stream(y, CHAT, body)
        assert reasons(whole) == ["stop"]
        count = len(whole) - 1
        for points in ((count // 2,), (count - 2,), (count - 1,)):
            assert_same(await stream(y, CHAT, body, points), whole)


async def test_a_break_after_the_last_token(engine: Any) -> None:
    """Usage and [DONE] are missing: the other replica says them and generates nothing."""
    async with yard(two(engine)) as y:
        whole = await stream(y, CHAT, STORY)
        first, other = y.models["chat"].replicas
        first.door.keep_back, other.alive = "last", False
        reading = asyncio.create_task(stream(y, CHAT, STORY))
        await first.door.kept_back.wait()
        await asyncio.sleep(0.05)  # what was sent is read
        other.alive = True
        first.sever()
        assert_same(await reading, whole)


async def test_a_penalty_that_counts_the_answer_is_not_resumed(engine: Any) -> None:
    """One error event, [DONE], nothing left behind."""
    async with yard(two(engine)) as y:
        seen = await stream(y, CHAT, STORY | {"presence_penalty": 0.5}, (5,))
        assert "presence_penalty" in seen[-1]["error"]["message"]


def turn(question: str, thought: str, answer: str) -> list[dict[str, str]]:
    said = f"Here is my thought process: {thought} Here is my response: {answer}"
    return [{"role": "user", "content": question}, {"role": "assistant", "content": said}]


# Granite's parser goes by words, and a small model keeps to the form in which it "answered" before.
THINKING = [
    *turn("What is 2 + 3?", "I add two and three, which makes five.", "The sum is 5."),
    *turn("What is the capital of Italy?", "Italy is a country, and its capital is Rome.", "The capital is Rome."),
    *turn("Is a whale a fish?", "A whale breathes air, so it is a mammal.", "No, a whale is a mammal."),
    {"role": "user", "content": "What is the capital of France?"},
]


def parts(events: list[dict[str, Any]], name: str) -> list[str]:
    """That part of every event's delta; empty where the event has none."""
    return [choice["delta"].get(name) or "" for event in events for choice in event["choices"]]


async def test_reasoning_stays_apart_across_the_break(engine: Any) -> None:
    """A parser that finds the change from reasoning to content in the text: broken before the reasoning, inside it,
    while the words between the two are held back, and in the content, once or three times, what the client gets of
    either is that of an undisturbed run. So it is for a client that wants no reasoning."""
    body = {"model": "chat", "messages": THINKING, "max_tokens": 48}
    thinking = await engine.behind(model_args(reasoning_parser="granite"))
    async with yard(two(thinking)) as y:
        whole = await stream(y, CHAT, body)
        assert reasons(whole) == ["stop"]
        reasoning, content = parts(whole, "reasoning"), parts(whole, "content")
        assert "Paris" in "".join(reasoning)
        assert "Paris" in "".join(content)
        assert "Here is" not in "".join(reasoning + content), "the parser found nothing"
        first = next(i for i, text in enumerate(content, 1) if text)  # the event with the first content
        for points in ((1,), (4,), (first - 1,), (first,), (first + 3,), (4, first - 1, first + 3)):
            broken = await stream(y, CHAT, body, points)
            assert_same(broken, whole)
            assert "".join(parts(broken, "reasoning")) == "".join(reasoning)
        hidden = body | {"include_reasoning": False}
        whole = await stream(y, CHAT, hidden)
        assert "".join(parts(whole, "content")) == "".join(content)
        for points in ((1,), (2,)):
            assert_same(await stream(y, CHAT, hidden, points), whole)


async def test_the_numbers_that_scaling_follows(engine: Any) -> None:
    """Twenty requests on an engine of eight slots: eight run, twelve wait, its speed and its cache show; once their
    clients have left it has none."""
    stats = engine.stats
    model = FakeModel("chat", [Replica("r", engine, 64)])
    async with yard(model) as y:
        y.client.timeout = httpx.Timeout(SLOW_S)
        body = STORY | {"max_tokens": 400, "ignore_eos": True}
        asking = [asyncio.create_task(y.client.post(CHAT, json=body)) for _ in range(20)]
        while (stats().running, stats().waiting) != (8, 12) or not stats().tokens_s:
            await asyncio.sleep(0.05)
        assert 0 < stats().kv_usage <= 1
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        while stats().running or stats().waiting:
            await asyncio.sleep(0.05)
        assert stats().kv_usage == 0


async def limited(y: Yard, folder: Path, **more: Any) -> dict[str, str]:
    """A key with a large quota, as headers; ``more`` of its entry."""
    key, entry = keys.make("team")
    file = folder / "keys.yaml"
    file.write_text(yaml.safe_dump({"keys": [entry | more]}))
    y.relay.settings = GatewaySettings(keys_file=str(file))
    return {"authorization": f"Bearer {key}"}


async def complete(tally: Tally) -> bool:
    """Whether its tokens were counted."""
    done = asyncio.Event()
    tally.then(done.set)
    await done.wait()
    return tally.used is not None


async def test_what_a_request_cost_is_counted(engine: Any, tmp_path: Path) -> None:
    """The replica's count is what vLLM says in its usage: for a whole answer, a stream, two answers to one prompt and
    a stream that moved; and for an aborted one what was generated until then."""
    async with yard(two(engine)) as y:
        y.client.timeout = httpx.Timeout(SLOW_S)
        headers = await limited(y, tmp_path, tokens_per_minute=1_000_000)
        tallies: list[Tally] = []
        settle = y.relay._quotas.settle
        y.relay._quotas.settle = lambda charge: tallies.append(charge.tally) or settle(charge)  # type: ignore[func-returns-value]
        y.client.headers.update(headers)
        for more in ({}, {"n": 2}):
            answer = await y.client.post(CHAT, json=STORY | {"max_tokens": 12} | more)
            assert await complete(tallies[-1])
            assert tallies[-1].used == answer.json()["usage"]["total_tokens"]
        for points in ((), (5,)):
            events = await stream(y, CHAT, STORY, points)
            assert await complete(tallies[-1])
            assert tallies[-1].used == events[-1]["usage"]["total_tokens"]
        asking = asyncio.create_task(y.client.post(CHAT, json=STORY | {"max_tokens": 600, "ignore_eos": True}))
        while not engine.stats().running:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.5)
        asking.cancel()
        await y.quiet()
        assert await complete(tallies[-1])
        assert tallies[-1].used is not None
        assert 30 < tallies[-1].used < 500


async def test_a_high_priority_goes_first_inside_the_engine(engine: Any, tmp_path: Path) -> None:
    """Thirty requests of nobody's priority fill an engine of eight slots; one of a key with a high one, sent last,
    is answered before most of them, although its client asks for a low one."""
    async with yard(FakeModel("chat", [Replica("r", engine, 64)])) as y:
        y.client.timeout = httpx.Timeout(SLOW_S)
        high = await limited(y, tmp_path, priority="high")
        other, entry = keys.make("other")
        document = yaml.safe_load((tmp_path / "keys.yaml").read_text())
        (tmp_path / "keys.yaml").write_text(yaml.safe_dump({"keys": [*document["keys"], entry]}))
        done: list[str] = []

        async def ask(who: str, headers: dict[str, str]) -> None:
            body = STORY | {"max_tokens": 20, "ignore_eos": True, "priority": 9}
            assert (await y.client.post(CHAT, json=body, headers=headers)).status_code == 200
            done.append(who)

        asking = [asyncio.create_task(ask("other", {"x-api-key": other})) for _ in range(30)]
        while engine.stats().waiting < 15:
            await asyncio.sleep(0.02)
        await asyncio.gather(*asking, ask("high", high))
        assert done.index("high") < 20


# --- Several tokens in one event

PLAIN = {EVERY_TOKEN_HEADER.decode(): "1"}


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, engine: Any) -> Iterator[None]:
    """As under a load that is beyond any bound; tokens may wait for half a second, so that many share an event."""
    monkeypatch.setattr(chunks, "EVENTS_S", 0.001)
    engine.share_events(0.5)
    yield
    engine.share_events(0.0)


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_tokens_that_share_an_event_are_the_same_answer(engine: Any, path: str) -> None:
    """Text, usage and finish reason as with an event for each, in few events; who asks gets each by itself."""
    body = STORY if path == CHAT else {"model": "chat", "prompt": "The sea is"}
    async with yard(two(engine)) as y:
        y.client.headers.update(PLAIN)
        plain = await stream(y, path, body)
        for name in PLAIN:
            del y.client.headers[name]
        shared = await stream(y, path, body)
        assert_same(shared, plain)
        assert len(plain) >= 15
        assert len(shared) <= len(plain) / 2
        for point in (2, 3):
            assert_same(await stream(y, path, body, (point,)), plain)


async def test_without_load_each_token_has_its_event(engine: Any) -> None:
    """By the measured pace of the engine, not by a setting."""
    engine.share_events(RequestLimits().chunk_s)
    async with yard(two(engine)) as y:
        seen = await stream(y, CHAT, STORY)
        assert len(seen) >= 15


@pytest.mark.usefixtures("loaded")
async def test_a_client_that_leaves_between_events_aborts_its_request(engine: Any) -> None:
    """While its tokens wait for others: the engine's request ends at once, and the streams are counted right."""
    async with yard(two(engine)) as y:
        body = STORY | {"stream": True, "max_tokens": 900, "ignore_eos": True}
        async with y.client.stream("POST", CHAT, json=body) as answer:
            await anext(answer.aiter_lines())
            assert engine._engine._pace.streams == 1
        await y.quiet()
        assert engine._engine._pace.streams == 0
