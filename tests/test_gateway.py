"""What a client sees of the gateway, on real sockets and the scripted engine, without Ray."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from serve_app.catalog import State
from serve_app.config import FakeScript, GatewaySettings, RequestLimits
from serve_app.gateway.routes import RELAYED
from tests.inprocess import Yard, eventually, model, yard
from tests.sse import events, joined

CHAT = "/v1/chat/completions"


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "chat", "messages": [{"role": "user", "content": "two words"}], **more}


async def leaves_after(seconds: float, y: Yard, body: dict[str, Any]) -> None:
    """A client that closes its connection before its answer is there."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(seconds):
            await y.client.post(CHAT, json=body)


async def leaves_at_work(y: Yard, body: dict[str, Any], path: str = CHAT) -> None:
    """The same, once the engine has begun with it."""
    asking = asyncio.create_task(y.client.post(path, json=body))
    await eventually(lambda: y.models["chat"].replicas[0].engine.report()["running"])
    await asyncio.sleep(0.1)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_an_answer_and_its_stream_agree() -> None:
    """Stream and whole answer have the same text, and name the model as the client asked for it."""
    async with yard(model("chat", also_known_as=("org/chat",))) as y:
        whole = (await y.client.post(CHAT, json=chat(model="org/chat", max_tokens=5))).json()
        stream = (await y.client.post(CHAT, json=chat(model="org/chat", max_tokens=5, stream=True))).text
        assert whole["choices"][0]["message"]["content"] == joined(stream) == "t0 t1 t2 t3 t4 "
        assert whole["model"] == events(stream)[0]["model"] == "org/chat"
        await y.quiet()


async def test_usage_only_where_asked_for() -> None:
    """include_usage adds one last chunk with empty choices and the numbers of the whole answer."""
    async with yard(model("chat")) as y:
        whole = (await y.client.post(CHAT, json=chat(max_tokens=3))).json()
        plain = events((await y.client.post(CHAT, json=chat(max_tokens=3, stream=True))).text)
        asked = chat(max_tokens=3, stream=True, stream_options={"include_usage": True})
        with_usage = events((await y.client.post(CHAT, json=asked)).text)
        assert not [e for e in plain if "usage" in e]
        assert with_usage[-1]["choices"] == []
        assert with_usage[-1]["usage"] == whole["usage"]


BAD: list[tuple[bytes, str, int, str | None]] = [
    (b'{"model": "nope"}', "application/json", 404, "model_not_found"),
    (b'{"model": "Chat"}', "application/json", 404, "model_not_found"),
    (b'{"model": "chat "}', "application/json", 404, "model_not_found"),
    (b"{}", "application/json", 400, None),
    (b'{"model": null}', "application/json", 400, None),
    (b'{"model": ""}', "application/json", 400, None),
    (b'{"model": 7}', "application/json", 400, None),
    (b'{"model": ["chat"]}', "application/json", 400, None),
    (b"[1]", "application/json", 400, None),
    (b"{", "application/json", 400, None),
    (b"", "application/json", 400, None),
    (b"\xff\xfe", "application/json", 400, None),
    (b"[" * 60_000, "application/json", 400, None),
    (b'{"model": "chat"}', "text/plain", 415, "unsupported_media_type"),
    (b'{"model": "chat", "x": "' + b"y" * 70_000 + b'"}', "application/json", 413, "request_too_large"),
]


@pytest.mark.parametrize("path", [route.path for route in RELAYED if route.body == "json"])
async def test_bad_requests(path: str) -> None:
    """Every bad body gets the right 4xx in the protocol's own envelope, on every route, before any replica is asked."""
    async with yard(model("chat")) as y:
        y.relay.settings = GatewaySettings(max_body_mb=0.0625)
        for content, kind, status, code in BAD:
            answer = await y.client.post(path, content=content, headers={"content-type": kind})
            assert (answer.status_code, content[:40]) == (status, content[:40])
            body = answer.json()
            if path.startswith("/v1/messages"):
                assert body["type"] == "error"
                assert set(body["error"]) == {"type", "message"}
            else:
                assert set(body["error"]) == {"message", "type", "param", "code"}
                assert body["error"]["code"] == code
        assert y.models["chat"].streams == 0


async def test_unknown_paths_and_methods() -> None:
    """Unknown path: 404, also one that a slash too many makes unknown. Wrong method: 405 with Allow. Both JSON, never
    HTML or `detail`."""
    async with yard(model("chat")) as y:
        for method, path, status in [
            ("GET", "/nope", 404),
            ("GET", "/health/", 404),
            ("POST", "/generate/", 404),
            ("POST", "/invocations", 404),
            ("POST", "/v1/load_lora_adapter", 404),
            ("GET", CHAT, 405),
            ("DELETE", "/v1/models", 405),
            ("GET", "/v1/responses/resp_1", 404),
        ]:
            answer = await y.client.request(method, path)
            assert (answer.status_code, path) == (status, path)
            assert answer.json()["error"]["message"]
            assert status != 405 or answer.headers["allow"]


async def test_models_are_listed_under_every_id() -> None:
    """/v1/models lists names and further ids; one model is found raw and percent-encoded."""
    async with yard(model("chat", also_known_as=("org/chat",)), model("code")) as y:
        listed = (await y.client.get("/v1/models")).json()["data"]
        assert [m["id"] for m in listed] == ["chat", "code", "org/chat"]
        for path in ("/v1/models/org/chat", "/v1/models/org%2Fchat"):
            assert (await y.client.get(path)).json()["id"] == "org/chat"
        missing = await y.client.get("/v1/models/org/nope")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_ready() -> None:
    """/ready is 200 while the gateway can route; with ?model= it is that model's own state."""
    async with yard(model("chat"), model("code")) as y:
        y.models["code"].state = State.STARTING
        assert (await y.client.get("/health")).status_code == 200
        ready = await y.client.get("/ready")
        assert ready.status_code == 200
        assert ready.json()["models"]["code"]["state"] == "starting"
        assert (await y.client.get("/ready", params={"model": "chat"})).status_code == 200
        starting = await y.client.get("/ready", params={"model": "code"})
        assert (starting.status_code, starting.headers["retry-after"]) == (503, "7")
        assert (await y.client.get("/ready", params={"model": "nope"})).status_code == 404
        y.directory.known = False
        assert (await y.client.get("/ready")).status_code == 503
        assert (await y.client.post(CHAT, json=chat())).status_code == 503


async def test_a_route_that_the_model_lacks_names_its_tasks() -> None:
    """400 that says what the model can do."""
    async with yard(model("chat", script=FakeScript(tasks=("embed",)))) as y:
        answer = await y.client.post(CHAT, json=chat())
        assert answer.status_code == 400
        assert "embed" in answer.json()["error"]["message"]


@pytest.mark.parametrize("field", [{"store": True}, {"previous_response_id": "r"}, {"background": True}])
async def test_responses_are_stateless(field: dict[str, Any]) -> None:
    """Whatever needs a stored response is refused with its name; without it the route works."""
    async with yard(model("chat")) as y:
        refused = await y.client.post("/v1/responses", json={"model": "chat", "input": "x", **field})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(field)))
        fine = await y.client.post("/v1/responses", json={"model": "chat", "input": "x", "store": False})
        assert fine.status_code == 200


async def test_audio_names_its_model_in_a_form() -> None:
    """Multipart bodies pass unread but for `model`."""
    async with yard(model("ears", script=FakeScript(tasks=("transcription",)))) as y:
        path = "/v1/audio/transcriptions"
        fine = await y.client.post(path, data={"model": "ears"}, files={"file": b"RIFF"})
        assert fine.status_code == 200
        none = await y.client.post(path, files={"file": b"RIFF"})
        assert (none.status_code, none.json()["error"]["param"]) == (400, "model")
        assert (await y.client.post(path, json={"model": "ears"})).status_code == 415


async def test_generate() -> None:
    """The plain endpoint: text in, text out; an unknown model is 404, a misspelt field 400."""
    async with yard(model("chat")) as y:
        answer = await y.client.post("/generate", json={"model_name": "chat", "prompt": "x", "max_tokens": 2})
        assert answer.json() == {"text": "t0 t1 "}
        assert (await y.client.post("/generate", json={"model_name": "no", "prompt": "x"})).status_code == 404
        wrong = await y.client.post("/generate", json={"model_name": "chat", "promt": "x"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "prompt")


async def test_every_route_is_documented() -> None:
    """The OpenAPI document has each route that the gateway forwards, and the docs page opens."""
    async with yard(model("chat")) as y:
        paths = (await y.client.get("/openapi.json")).json()["paths"]
        assert {route.path for route in RELAYED} <= set(paths)
        assert {"/v1/models", "/health", "/ready", "/generate"} <= set(paths)
        assert (await y.client.get("/docs")).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("fake", [{"first_token_s": 30}, {"hang": 2}, {"interval_s": 0.05}])
async def test_a_client_that_leaves_aborts_its_request(stream: bool, fake: dict[str, Any]) -> None:
    """Before the first token, in the middle, streaming or not: the engine's request is aborted and nothing is held."""
    async with yard(model("chat")) as y:
        body = chat(stream=stream, max_tokens=500, fake=fake)
        await leaves_at_work(y, body)
        await y.quiet()
        assert y.models["chat"].replicas[0].engine.report()["aborted"] == 1


@pytest.mark.parametrize("path", [route.path for route in RELAYED])
async def test_a_client_may_leave_any_route(path: str) -> None:
    """While it waits for its answer: the engine's request is aborted and nothing is held, whatever the route."""
    tasks = ("generate", "embed", "score", "transcription")
    async with yard(model("any", script=FakeScript(first_token_s=60, tasks=tasks))) as y:
        form = {"data": {"model": "any"}, "files": {"file": b"RIFF"}}
        asked = asyncio.create_task(
            y.client.post(path, **form) if path.startswith("/v1/audio") else y.client.post(path, json=chat(model="any"))
        )
        engine = y.models["any"].replicas[0].engine
        await eventually(lambda: engine.report()["running"])
        asked.cancel()
        await y.quiet()
        assert engine.report()["aborted"] == 1


async def test_a_client_that_leaves_generate_aborts_its_request() -> None:
    """The plain endpoint, which FastAPI serves, is no exception."""
    async with yard(model("chat", script=FakeScript(first_token_s=30))) as y:
        await leaves_at_work(y, {"model_name": "chat", "prompt": "x"}, "/generate")
        await y.quiet()
        assert y.models["chat"].replicas[0].engine.report()["aborted"] == 1


async def test_a_client_that_leaves_the_queue_frees_its_place() -> None:
    """One slot, one long answer: a waiting client that gives up leaves nothing behind, and the next one is served."""
    async with yard(model("chat", slots=1)) as y:
        first = asyncio.create_task(y.client.post(CHAT, json=chat(max_tokens=20, fake={"interval_s": 0.05})))
        await asyncio.sleep(0.1)
        await leaves_after(0.2, y, chat())
        second = await y.client.post(CHAT, json=chat(max_tokens=1))
        assert second.status_code == (await first).status_code == 200
        await y.quiet()
        assert y.models["chat"].replicas[0].engine.report()["finished"] == 2


async def test_a_full_queue_answers_at_once() -> None:
    """Beyond max_waiting: 429 with Retry-After. Beyond wait_s: 503 with Retry-After."""
    limits = RequestLimits(max_waiting=1, wait_s=0.5)
    async with yard(model("chat", slots=1, limits=limits)) as y:
        body = chat(fake={"first_token_s": 2})
        running = asyncio.create_task(y.client.post(CHAT, json=body))
        await asyncio.sleep(0.1)
        waiting = asyncio.create_task(y.client.post(CHAT, json=body))
        await asyncio.sleep(0.1)
        full = await y.client.post(CHAT, json=body)
        assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
        assert int(full.headers["retry-after"]) >= 1
        late = await waiting
        assert (late.status_code, late.json()["error"]["code"]) == (503, "model_unavailable")
        assert int(late.headers["retry-after"]) >= 1
        assert (await running).status_code == 200
        await y.quiet()


async def test_engine_errors_in_our_envelope() -> None:
    """An engine's 4xx keeps its status and words; its 5xx keeps its secrets."""
    async with yard(model("chat")) as y:
        refused = await y.client.post(CHAT, json=chat(stream=True, fake={"status": 400}))
        assert (refused.status_code, refused.json()["error"]["message"]) == (400, "the script says so")
        broken = await y.client.post(CHAT, json=chat(fake={"status": 500}))
        assert broken.status_code == 500
        assert "script" not in broken.text
        anthropic = await y.client.post("/v1/messages", json=chat(fake={"status": 400}))
        assert anthropic.json() == {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": "the script says so"},
        }


async def test_an_engine_error_in_the_middle_ends_the_stream_properly() -> None:
    """One error event, [DONE], a clean close."""
    async with yard(model("chat")) as y:
        seen = events((await y.client.post(CHAT, json=chat(stream=True, max_tokens=9, fake={"fail": 2}))).text)
        assert "error" in seen[-1]
        assert len(seen) == 4  # the role, two tokens, the error


async def test_a_dead_replica_before_the_first_byte_costs_nothing() -> None:
    """Pooled leases on a replica that died are not used; the request goes to the other one."""
    async with yard(model("chat", replicas=2)) as y:
        await asyncio.gather(*(y.client.post(CHAT, json=chat(max_tokens=1)) for _ in range(8)))
        await y.models["chat"].replicas[0].die()
        answers = await asyncio.gather(*(y.client.post(CHAT, json=chat(max_tokens=1)) for _ in range(20)))
        assert {a.status_code for a in answers} == {200}


async def test_leases_are_pooled_and_given_back() -> None:
    """A client that talks again reuses its lease; an idle lease is given back within a moment."""
    async with yard(model("chat")) as y:
        for _ in range(20):
            await y.client.post(CHAT, json=chat(max_tokens=1))
        assert y.models["chat"].streams == 1
        await y.quiet()


async def test_load_spreads_over_replicas() -> None:
    """64 simultaneous streams over 4 replicas: nobody takes everything."""
    async with yard(model("chat", replicas=4, script=FakeScript(token_interval_s=0.01))) as y:
        await asyncio.gather(*(y.client.post(CHAT, json=chat(stream=True, max_tokens=20)) for _ in range(64)))
        served = [r.engine.report()["finished"] for r in y.models["chat"].replicas]
        assert sum(served) == 64
        assert min(served) >= 8


async def test_aborted_requests_give_their_load_back() -> None:
    """After many that were given up the load is spread as if they had never been."""
    async with yard(model("chat", replicas=4, script=FakeScript(token_interval_s=0.01))) as y:
        await asyncio.gather(*(leaves_after(0.2, y, chat(stream=True, max_tokens=10_000)) for _ in range(64)))
        await y.quiet()
        before = [r.engine.report()["finished"] for r in y.models["chat"].replicas]
        await asyncio.gather(*(y.client.post(CHAT, json=chat(stream=True, max_tokens=20)) for _ in range(64)))
        after = [r.engine.report()["finished"] for r in y.models["chat"].replicas]
        served = [now - then for now, then in zip(after, before, strict=True)]
        assert sum(served) == 64
        assert min(served) >= 8


@pytest.mark.parametrize("stream", [True, False])
async def test_no_error_names_an_address(stream: bool) -> None:
    """Not of a replica that died, refused, answered 503 or is not there: what runs where is nobody's business."""
    async with yard(model("chat", limits=RequestLimits(wait_s=0.5, hold_s=0.5, attempts=1))) as y:
        replica = y.models["chat"].replicas[0]
        texts = [(await y.client.post(CHAT, json=chat(stream=stream, fake={"status": 503}))).text]
        dying = asyncio.create_task(y.client.post(CHAT, json=chat(stream=stream, max_tokens=9, fake={"hang": 2})))
        await eventually(lambda: replica.engine.report()["running"])
        await replica.die()
        texts.append((await dying).text)
        texts.append((await y.client.post(CHAT, json=chat(stream=stream))).text)
        for text in texts:
            assert "error" in text
            assert not any(word in text for word in ("127.0.0.1", str(replica.server.port), "chat-0", "Traceback"))


async def test_a_pool_says_what_it_holds() -> None:
    """One slot: one request has it and is watched, another waits for a lease that is being asked for. Afterwards there
    is nothing, which is what the chaos run looks for."""
    async with yard(model("chat", slots=1)) as y:
        asked = [asyncio.create_task(y.client.post(CHAT, json=chat(fake={"hang": 0}))) for _ in range(2)]
        held = {"in_use": 1, "waiting": 1, "idle": 0, "openers": 1, "watchers": 1, "pulses": 1}
        async with asyncio.timeout(5):
            while (pool := y.models["chat"].pool) is None or pool.report() != held:
                await asyncio.sleep(0.01)
        for request in asked:
            request.cancel()
        async with asyncio.timeout(5):
            while any(pool.report().values()):
                await asyncio.sleep(0.01)


async def test_a_slow_client_slows_only_itself() -> None:
    """The gateway stops reading from the replica while a client does not read: memory stays bounded."""
    async with yard(model("chat")) as y:
        reader, writer = await asyncio.open_connection("127.0.0.1", y.port, limit=2**12)
        body = json.dumps(chat(stream=True, max_tokens=100_000)).encode()
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await reader.read(1)
        await asyncio.sleep(1)
        pool = y.models["chat"].pool
        assert pool is not None
        assert pool.in_use == 1, "the whole answer was taken into memory"
        assert (await y.client.post(CHAT, json=chat(max_tokens=1))).status_code == 200
        writer.transport.abort()
        await y.quiet()


async def test_a_storm_of_cancels_leaks_nothing() -> None:
    """500 requests that give up at different moments leave no lease, no waiter and no engine request."""
    async with yard(model("chat", replicas=2, slots=8, script=FakeScript(token_interval_s=0.005))) as y:
        body = chat(stream=True, max_tokens=10_000)
        for _ in range(5):
            await asyncio.gather(*(leaves_after(0.01 + 0.002 * i, y, body) for i in range(100)))
        await y.quiet()
        assert (await y.client.post(CHAT, json=chat(max_tokens=1))).status_code == 200


async def test_client_headers_stay_at_the_gateway() -> None:
    """A client can neither name a lease nor see the engine's private headers."""
    async with yard(model("chat")) as y:
        answer = await y.client.post(CHAT, json=chat(), headers={"x-modelyard-lease": "x", "x-modelyard-model": "y"})
        assert answer.json()["model"] == "chat"
        assert not [name for name in answer.headers if name.startswith("x-modelyard")]
        port = y.models["chat"].replicas[0].server.port
        async with httpx.AsyncClient(trust_env=False) as stranger:
            refused = await stranger.post(f"http://127.0.0.1:{port}{CHAT}", json=chat())
        assert refused.status_code == 403


async def test_a_gateway_under_a_prefix() -> None:
    """With a route prefix, relayed routes and FastAPI's are found under it."""
    async with yard(model("chat")) as y:
        transport = httpx.ASGITransport(y.app, root_path="/llm")
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway/llm") as client:
            assert (await client.post("/v1/chat/completions", json=chat(max_tokens=1))).status_code == 200
            assert (await client.get("/v1/models")).status_code == 200
            assert (await client.get("/nope")).status_code == 404
