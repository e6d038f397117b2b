"""LoRA adapters on a real engine, behind the gateway: who answers, what a broken one does, what a break does."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from serve_app import demo_model, resume
from serve_app.lease import ADAPTER_HEADER, ADAPTER_PATH_HEADER, ASKED_MODEL_HEADER, LEASE_HEADER
from tests.engine import exact_resume
from tests.engine.ask import CHAT, COMPLETIONS, GENERATING, MESSAGES, RESPONSES, events
from tests.engine.ask import body as asking
from tests.engine.conftest import IN_THIS_PROCESS
from tests.engine.exact_resume import Started, reasons, text
from tests.engine.test_resume import SLOW_S, assert_same, model_args
from tests.inprocess import FakeModel, Replica, Yard, yard

pytestmark = IN_THIS_PROCESS

# Fewer places than adapters: they come and leave.
ARGS = model_args(enable_lora=True, max_lora_rank=16, max_loras=2)
GOOD = ("left", "right", "third")
QUESTION = "Once upon a time there was a fox who"


def write_adapter(folder: Path, seed: int, *, rank: int = 8, wider: int = 0, weights: bytes | None = None) -> None:
    """A LoRA of random weights for the demo model, strong enough to say something else. ``wider``: its outputs exceed
    the model's by so much. ``weights``: what stands in the file in place of weights."""
    import torch
    from safetensors.torch import save_file

    shape = json.loads((demo_model.prepare(print) / "config.json").read_text())
    hidden = shape["hidden_size"]
    widths = {"q_proj": hidden, "v_proj": hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]}
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(shape["num_hidden_layers"]):
        for name, width in widths.items():
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank, hidden, generator=random) * 0.1
            tensors[f"{module}.lora_B.weight"] = torch.randn(width + wider, rank, generator=random) * 0.1
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": sorted(widths), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    if weights is not None:
        (folder / "adapter_model.safetensors").write_bytes(weights)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, engine_home: Path) -> dict[str, str]:
    """Folders of good ones and broken ones, by the id that a client asks for."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(GOOD):
        write_adapter(folder / name, seed)
    write_adapter(folder / "large", 7, rank=32)
    write_adapter(folder / "garbage", 7, weights=b"no weights" * 100)
    write_adapter(folder / "wide", 7, wider=64)
    (folder / "empty").mkdir()
    (folder / "nothing-in-it").mkdir()
    (folder / "nothing-in-it" / "adapter_config.json").write_text("{}")
    names = [*GOOD, "large", "garbage", "wide", "empty", "nothing-in-it", "missing"]
    return {name: str(folder / name) for name in names}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(engine_home: Path) -> AsyncIterator[Any]:
    from serve_app.model.engine import VllmEngine

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODELYARD_HOME", str(engine_home))
        for name, value in ARGS.env.items():
            patch.setenv(name, value)
        running = VllmEngine(ARGS, "chat")
        yield Started(running, await running.start())
        running.shutdown()


@pytest_asyncio.fixture(loop_scope="module")
async def served(engine: Any, adapters: dict[str, str]) -> AsyncIterator[Yard]:
    """A gateway in front of two replicas that share the engine."""
    replicas = [Replica(f"chat-{i}", engine, 16, resume.generation(ARGS)) for i in range(2)]
    async with yard(FakeModel("chat", replicas, adapters=dict(adapters))) as y:
        y.client.timeout = httpx.Timeout(SLOW_S)
        yield y


def request(path: str, name: str) -> dict[str, Any]:
    return asking(path, QUESTION, 20, temperature=0) | {"model": name}


async def say(y: Yard, name: str, path: str = CHAT) -> str:
    """The text of a whole answer, which must be by ``name``."""
    answer = await y.client.post(path, json=request(path, name))
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert told["model"] == name
    if path == MESSAGES:
        return str(told["content"][0]["text"])
    if path == RESPONSES:
        return str(told["output"][0]["content"][0]["text"])
    choice = told["choices"][0]
    return str(choice["text"] if path == COMPLETIONS else choice["message"]["content"])


async def stream(y: Yard, name: str, path: str = CHAT, break_after: tuple[int, ...] = ()) -> list[Any]:
    return await exact_resume.stream(y, path, request(path, name), break_after)


@pytest.mark.parametrize("path", GENERATING)
async def test_each_answers_for_itself(served: Yard, path: str) -> None:
    """On every route: the base model and three adapters say four things, and the same each time, whatever was loaded
    or left since; the answer's `model` is the id that was asked for."""
    told = {name: await say(served, name, path) for name in ("chat", *GOOD)}
    assert len(set(told.values())) == 4, told
    for name in ("chat", *reversed(GOOD)):
        assert await say(served, name, path) == told[name]


async def test_all_at_once(served: Yard) -> None:
    """Requests for the base model and for more adapters than the engine has room for, at the same time: each is
    answered as when it is alone, streamed or not."""
    alone = {name: await say(served, name) for name in ("chat", *GOOD)}
    names = [name for name in ("chat", *GOOD) for _ in range(3)]
    whole = [say(served, name) for name in names]
    streams = [served.client.post(CHAT, json=request(CHAT, name) | {"stream": True}) for name in alone]
    answers, streamed = await asyncio.gather(asyncio.gather(*whole), asyncio.gather(*streams))
    assert answers == [alone[name] for name in names]
    assert [text(events(answer)) for answer in streamed] == list(alone.values())


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_stream_says_what_the_whole_answer_says(served: Yard, path: str) -> None:
    """For an adapter and for the base model."""
    for name in ("left", "chat"):
        seen = await stream(served, name, path)
        assert text(seen) == await say(served, name, path)
        assert {event["model"] for event in seen} == {name}


async def test_the_base_model_is_not_taken_for_an_adapter_of_its_name(
    engine: Any, served: Yard, adapters: dict[str, str]
) -> None:
    """An adapter that is called as the model is, and is loaded: who asks for the model without an adapter gets the
    base model. Straight to a replica's port: the gateway lets nobody call an adapter so."""
    base, left = await say(served, "chat"), await say(served, "left")
    replica = Replica("alone", engine, 8)
    await replica.server.start()
    headers = {LEASE_HEADER: replica.gate.grant().token.encode(), ASKED_MODEL_HEADER: b"chat"}
    named = {ADAPTER_HEADER: b"chat", ADAPTER_PATH_HEADER: adapters["left"].encode()}
    url = f"http://127.0.0.1:{replica.server.port}"
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=SLOW_S) as client:
        for more, expected in ((named, left), ({}, base)):
            answer = (await client.post(CHAT, json=request(CHAT, "chat"), headers=more)).json()
            assert answer["choices"][0]["message"]["content"] == expected
    assert "chat" in engine.report()["adapters"]
    await replica.server.stop()
    assert await say(served, "chat") == base


BROKEN = {
    "missing": "folder",
    "empty": "adapter_config.json",
    "nothing-in-it": "its folder|lora_alpha",
    "large": "rank 32",
    "garbage": "header",
    "wide": "size",
}


@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_adapter_is_refused_and_nobody_else(served: Yard, name: str, adapters: dict[str, str]) -> None:
    """Twice, streamed and not: 400 that says what is wrong and names no file. The base model and an adapter that runs
    meanwhile answer as before, and so does the engine afterwards."""
    before = {who: await say(served, who) for who in ("chat", "left")}
    running = [asyncio.create_task(say(served, who)) for who in before]
    for streams in (False, True, False):
        answer = await served.client.post(CHAT, json=request(CHAT, name) | {"stream": streams})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "adapter_unusable", "model")
        assert re.search(BROKEN[name], error["message"]), error["message"]
        assert str(Path(adapters[name]).parent) not in error["message"]
        assert "Traceback" not in error["message"]
    assert await asyncio.gather(*running) == list(before.values())
    for who in ("right", "third"):
        await say(served, who)
    assert {who: await say(served, who) for who in before} == before


async def test_a_broken_adapter_in_anthropics_words(served: Yard) -> None:
    """The same refusal where the route has another envelope."""
    answer = await served.client.post(MESSAGES, json=request(MESSAGES, "missing"))
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_files_that_are_gone_do_no_harm_to_requests_that_run(engine: Any, served: Yard, tmp_path: Path) -> None:
    """An adapter's folder goes away while a request runs on it and others come and leave: the engine does not look for
    it again, so it lives on. Once the adapter has left it is unusable."""
    folder = tmp_path / "fleeting"
    write_adapter(folder, 9)
    served.models["chat"].adapters["fleeting"] = str(folder)
    try:
        body = asking(CHAT, QUESTION, 100, ignore_eos=True) | {"model": "fleeting"}
        running = asyncio.create_task(served.client.post(CHAT, json=body))
        while "fleeting" not in engine.report()["adapters"]:
            assert not running.done()
            await asyncio.sleep(0.01)
        (folder / "adapter_config.json").unlink()
        for name in ("left", "third", "left"):
            await say(served, name)
        assert (await running).status_code == 200
        for name in ("third", "left"):
            await say(served, name)
        assert (await served.client.post(CHAT, json=body)).status_code == 400
    finally:
        del served.models["chat"].adapters["fleeting"]
    await engine.check_health()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_broken_stream_goes_on_with_its_adapter(served: Yard, path: str) -> None:
    """Its replica is lost at several points: text, usage and finish reason are those of an undisturbed run."""
    whole = await stream(served, "left", path)
    assert reasons(whole) == ["length"]
    assert text(whole) != text(await stream(served, "chat", path))
    for points in ((1,), (5,), (12,), (4, 9, 15)):
        assert_same(await stream(served, "left", path, points), whole)
