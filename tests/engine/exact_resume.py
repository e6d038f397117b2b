"""Does this vLLM, on this device, continue broken streams exactly? For a host without pytest and without a model hub.

    python -m tests.engine.exact_resume SHAPE DTYPE TOKENIZER_FOLDER

One engine with dummy weights in the shape of ``deployments/shapes/SHAPE.json`` behind two ports; streams of 64 tokens
are broken at ten points each, and compared with an undisturbed run: text, usage, finish reason, id and ``created``.
Dummy weights like to repeat themselves, so the number of distinct words is printed: with few of them it says little.
"""

import asyncio
import copy
import json
import sys
import time
from pathlib import Path
from typing import Any

from serve_app import resume
from serve_app.asgi import ASGIApp, Receive, Scope, Send
from serve_app.config import ModelArgs
from serve_app.lease import EngineFacts
from tests.inprocess import FakeModel, Replica, Yard, yard

SHAPES = Path(__file__).parents[2] / "deployments" / "shapes"
POINTS = (1, 2, 3, 5, 8, 13, 21, 34, 50, 60)
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1, "seed": 7},
    "repetition penalty": {"temperature": 0, "repetition_penalty": 1.3},
}


class Started:
    """An engine that was started once, behind several replicas' ports."""

    def __init__(self, engine: Any, facts: EngineFacts) -> None:
        self._engine = engine
        self._facts = facts

    async def behind(self, args: ModelArgs) -> "Started":
        """The same engine behind another of vLLM's apps, one that is made for ``args``."""
        from vllm.engine.arg_utils import AsyncEngineArgs

        from serve_app.model.engine import engine_arguments

        engine_args = AsyncEngineArgs(**engine_arguments(args, "chat"))
        engine_args.create_engine_config()  # fills in what the app reads
        other = copy.copy(self._engine)
        other._app = await other._build_app(engine_args, self._facts.tasks)
        return Started(other, self._facts)

    async def start(self) -> EngineFacts:
        return self._facts

    @property
    def asgi(self) -> ASGIApp:
        return self._answer

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":  # vLLM's app is over for good once one server has ended it
            for kind in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{kind}.complete"})
        else:
            await self._engine.asgi(scope, receive, send)

    def shutdown(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


async def stream(y: Yard, path: str, request: dict[str, Any], break_after: tuple[int, ...] = ()) -> list[Any]:
    """The events of one stream whose replica is lost after so many of them (and is there again for the next)."""
    body = request | {"stream": True, "stream_options": {"include_usage": True}}
    seen: list[Any] = []
    done = False
    async with y.client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                done = True
            elif line:
                seen.append(json.loads(line.removeprefix("data: ")))
                if len(seen) in break_after:
                    for replica in y.models["chat"].replicas:
                        if replica.gate.busy:
                            replica.sever()
                            replica.alive = True  # for the next break; its port still answers
    assert done
    await y.quiet()
    return seen


def text(events: list[Any]) -> str:
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices)


def reasons(events: list[Any]) -> list[str]:
    return [c["finish_reason"] for e in events for c in e["choices"] if c["finish_reason"]]


def two(engine: Any, args: ModelArgs) -> FakeModel:
    """A model of two replicas that share one engine."""
    return FakeModel("chat", [Replica(f"chat-{i}", engine, 8, resume.generation(args)) for i in range(2)])


async def main(shape: str, dtype: str, tokenizer: str) -> None:
    from serve_app.model.engine import VllmEngine

    engine = {"dtype": dtype, "max_model_len": 2048, "max_num_seqs": 8, "gpu_memory_utilization": 0.5}
    source = {"shape": str(SHAPES / f"{shape}.json"), "tokenizer": tokenizer}
    args = ModelArgs.model_validate({"source": source, "engine": engine | {"enforce_eager": True}})
    running = VllmEngine(args, "chat")
    facts = await running.start()
    started = time.monotonic()
    await running.ping()
    print(f"{shape} {dtype}: the engine's sign of life took {(time.monotonic() - started) * 1e3:.1f} ms")
    request = {"model": "chat", "messages": [{"role": "user", "content": "Tell me a story."}]}
    request |= {"max_tokens": 64, "ignore_eos": True}
    async with yard(two(Started(running, facts), args)) as y:
        for name, case in CASES.items():
            whole = await stream(y, "/v1/chat/completions", request | case)
            same = 0
            for point in POINTS:
                broken = await stream(y, "/v1/chat/completions", request | case, (point,))
                assert (broken[-1]["usage"], reasons(broken)) == (whole[-1]["usage"], reasons(whole)), point
                assert all(len({event[field] for event in broken}) == 1 for field in ("id", "created")), point
                same += text(broken) == text(whole)
            words = len(set(text(whole).split()))
            print(f"  {name}: {same} of {len(POINTS)} texts equal the undisturbed one; {words} distinct words in it")
    running.shutdown()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
