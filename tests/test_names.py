"""What a name means: the decisions, and what a client sees of them on real sockets and the scripted engine."""

import asyncio
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from serve_app import catalog, errors, names
from serve_app.asgi import ASGIApp, Message, Receive, Scope, Send, read_body
from serve_app.catalog import Catalog, Model, State
from serve_app.check import check_config
from serve_app.config import LENGTH_FIELDS, REQUESTS_OWN_FIELDS, FakeScript, GatewaySettings, Name, RequestLimits
from serve_app.gateway.fields import parse
from serve_app.lease import CardView
from serve_app.model.fake_engine import FakeEngine
from tests.inprocess import FakeModel, Replica, Yard, model, yard
from tests.sse import events

ROOT = Path(__file__).resolve().parent.parent
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
USERS = [f"user-{i}" for i in range(4000)]


def exists(*models: str, **aliases: str) -> Catalog:
    """A catalog of ``models``; ``aliases``: further id → model."""
    entries = [
        Model(
            m, State.READY, "", 1, CardView(also_known_as=tuple(a for a, of in aliases.items() if of == m), created=1)
        )
        for m in models
    ]
    return catalog.build(entries, Catalog())


def name(**given: Any) -> Name:
    return Name.model_validate(given)


# --- Which model


@settings(max_examples=25)
@given(st.dictionaries(st.sampled_from("abcde"), st.floats(0.01, 100), min_size=1))
def test_shares_are_the_weights(weights: dict[str, float]) -> None:
    """Over many users each model gets the share of its weight, within sampling error."""
    got = Counter(names.pick("canary", user, weights) for user in USERS)
    for target, weight in weights.items():
        assert got[target] / len(USERS) == pytest.approx(weight / sum(weights.values()), abs=0.04)


@settings(max_examples=25)
@given(st.dictionaries(st.sampled_from("abcde"), st.floats(0.1, 10), min_size=2), st.floats(1, 10))
def test_a_grown_share_takes_users_and_moves_no_others(weights: dict[str, float], more: float) -> None:
    """A user stays with its model unless the canary's larger share takes it."""
    canary = min(weights)
    for user in USERS[:500]:
        before = names.pick("n", user, weights)
        after = names.pick("n", user, weights | {canary: weights[canary] * more})
        assert after in (before, canary)


def test_names_share_users_each_in_its_own_way() -> None:
    """Who is in one name's canary is not in every other's for that."""
    weights = {"stable": 1.0, "canary": 1.0}
    same = sum(names.pick("a", user, weights) == names.pick("b", user, weights) for user in USERS)
    assert same / len(USERS) == pytest.approx(0.5, abs=0.05)


@given(st.text())
def test_any_user_is_somebody(user: str) -> None:
    """Whatever a client writes as its user chooses a model, and the same one again."""
    weights = {"a": 1.0, "b": 1.0}
    assert names.pick("n", user, weights) == names.pick("n", user, weights)


def test_a_models_own_id_asks_that_model_only() -> None:
    """Without a name nothing changes: one model, by its id or a further one."""
    known = names.build(exists("chat", llama="chat"), {"smart": name(to="chat", fallback=["small"])})
    assert known.choose("llama", "u") == names.Choice(("chat",))


def test_targets_come_in_order_and_once() -> None:
    """The chosen model first, then the fallbacks; two ids of one model are asked once."""
    known = names.build(
        exists("chat", "small", llama="chat"), {"smart": name(to="llama", fallback=["chat", "gone", "small"])}
    )
    assert known.choose("smart", "u").targets == ("chat", "gone", "small")


def test_a_models_own_id_wins_against_a_name() -> None:
    """The name is listed as a conflict and changes nothing."""
    known = names.build(exists("chat", "small", llama="chat"), {"llama": name(to="small")})
    assert known.choose("llama", "u") == names.Choice(("chat",))
    assert known.catalog.conflicts == ("the name 'llama' is an id of chat, which keeps it",)


def test_a_target_that_does_not_exist_is_told_and_passed_over() -> None:
    """Its share is the others'; the other names mean what they meant; a name that leads nowhere does not exist."""
    known = names.build(
        exists("chat"),
        {"canary": name(to={"chat": 1, "next": 99}), "lost": name(to="nowhere"), "fine": name(to="chat")},
    )
    assert {known.choose("canary", user).targets for user in USERS[:50]} == {("chat",)}
    assert known.choose("fine", "u").targets == ("chat",)
    with pytest.raises(errors.UnknownModel, match=r"Models here: canary, chat, fine\."):
        known.choose("lost", "u")
    assert known.catalog.conflicts == (
        "the name 'canary' leads to 'next', which does not exist now",
        "the name 'lost' leads to 'nowhere', which does not exist now",
    )


def test_a_missing_model_has_fallbacks() -> None:
    """Where the only target does not exist, the fallbacks are asked after it: the client is told."""
    known = names.build(exists("small"), {"smart": name(to="gone", fallback=["small"])})
    assert known.choose("smart", "u").targets == ("gone", "small")


@pytest.mark.parametrize("asked", ["Smart", "smart ", "smar", "smart/", ""])
def test_near_misses_are_unknown(asked: str) -> None:
    """A name is meant letter by letter."""
    with pytest.raises(errors.UnknownModel):
        names.build(exists("chat"), {"smart": name(to="chat")}).choose(asked, "u")


def test_a_name_leads_to_models_only() -> None:
    """One level and no loops: a name behind a name is refused, by its name."""
    with pytest.raises(ValidationError, match="a leads to b, which is itself a name"):
        GatewaySettings.model_validate({"names": {"a": {"to": "b"}, "b": {"to": "chat"}}})


@pytest.mark.parametrize(
    "wrong",
    [
        {"to": {}},
        {"to": {"chat": 0}},
        {"to": {"chat": True}},
        {"to": "chat", "max_tokens": 0},
        {"to": "chat", "defaults": {"model": "other"}},
        {"to": "chat", "defaults": {"store": True}},
        {"to": "chat", "defaults": {"max_tokens": 1, "max_output_tokens": 1}},
        {"to": "chat", "defaults": {"max_tokens": "9"}},
        {"to": "chat", "defaults": {"temperature": float("nan")}},
    ],
)
def test_what_cannot_be_meant_is_refused(wrong: dict[str, Any]) -> None:
    """At load, never at a request."""
    with pytest.raises(ValidationError):
        Name.model_validate(wrong)


@pytest.mark.parametrize(
    ("error", "other"),
    [
        (errors.Unavailable("no replica"), True),
        (errors.UnknownModel("removed"), True),
        (errors.TooManyRequests("full"), True),
        (errors.TooManyRequests("your limit", code="rate_limit"), False),
        (errors.Relayed(429, "the engine's"), False),
        (errors.Relayed(400, "bad"), False),
        (errors.Relayed(500, "broken"), False),
        (errors.UnsupportedTask("no"), False),
        (errors.UpstreamBroken("half"), False),
    ],
)
def test_when_another_model_may_be_asked(error: errors.ModelyardError, other: bool) -> None:
    """Only where this one could not serve; what was said of the request stands."""
    assert names.cannot_serve(error) is other


@pytest.mark.parametrize(
    ("body", "whose"),
    [
        ({"user": "a", "metadata": {"user_id": "b"}}, "a"),
        ({"metadata": {"user_id": "b"}, "safety_identifier": "c"}, "b"),
        ({"user": "", "safety_identifier": "c"}, "c"),
        ({"user": 7, "metadata": "x"}, None),
        ({}, None),
    ],
)
def test_whose_request_it_is(body: dict[str, Any], whose: str | None) -> None:
    """Each protocol's field, where it holds a text."""
    assert parse(json.dumps(body).encode()).whose == whose


def test_the_examples_of_the_docs_are_valid() -> None:
    """Together they pass `modelyard check`; some of the models are missing, and the adapter's folder."""
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "names.md").read_text(), re.DOTALL)
    report = check_config({"applications": [app for block in blocks for app in yaml.safe_load(block)]}, base=ROOT)
    assert report.faults == ()
    assert [note.rpartition(".names.")[2] for note in report.notes if ".names." in note] == [
        f"assistant: {target} is no model of this file" for target in ("chat-next", "chat-small")
    ]
    assert any("adapter_config.json" in note for note in report.notes)


# --- What changes in a request

RAW = b'{"model": "smart", "big": 12345678901234567890123, "f": 1.10, "s": "\\u00e9", "max_tokens": 5, "n": null}'


@pytest.mark.parametrize(
    "means", [{}, {"max_tokens": 5}, {"defaults": {"f": 2}}, {"defaults": {"max_completion_tokens": 9}}]
)
def test_what_needs_no_change_keeps_its_bytes(means: dict[str, Any]) -> None:
    """Not one space moves where the request says everything itself, within the cap."""
    assert names.apply(RAW, CHAT, name(to="chat", **means)) is None


def test_a_change_leaves_the_rest_as_it_was_written() -> None:
    """Large integers, long floats and escapes survive to the letter; null counts as not given."""
    changed = names.apply(RAW, CHAT, name(to="chat", defaults={"n": 2, "top_p": 0.5}, max_tokens=4))
    assert changed == (
        b'{"model":"smart","big":12345678901234567890123,"f":1.10,"s":"\\u00e9","max_tokens":4,"n":2,"top_p":0.5}'
    )


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), st.lists, max_leaves=5)
# Fields that any name may set to anything; the others have tests of their own.
SETTABLE = st.text(max_size=5).filter(lambda key: key not in (*REQUESTS_OWN_FIELDS, *LENGTH_FIELDS))


@given(st.dictionaries(st.text(max_size=5), JSON), st.dictionaries(SETTABLE, JSON))
def test_defaults_fill_what_is_missing(body: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Every field of the request stays, every other default is there, and nothing else."""
    raw = json.dumps(body).encode()
    changed = json.loads(names.apply(raw, "/v1/embeddings", name(to="m", defaults=defaults)) or raw)
    assert changed == defaults | {key: v for key, v in body.items() if v is not None or key not in defaults}


@pytest.mark.parametrize(
    ("path", "means", "body", "expected"),
    [
        # A cap of 100: absent, null, larger, smaller.
        (CHAT, {"max_tokens": 100}, {}, {"max_tokens": 100}),
        (CHAT, {"max_tokens": 100}, {"max_tokens": None}, {"max_tokens": 100}),
        (CHAT, {"max_tokens": 100}, {"max_tokens": 101}, {"max_tokens": 100}),
        (CHAT, {"max_tokens": 100}, {"max_tokens": 10**30}, {"max_tokens": 100}),
        (CHAT, {"max_tokens": 100}, {"max_tokens": 99}, {"max_tokens": 99}),
        (CHAT, {"max_tokens": 100}, {"max_completion_tokens": 500}, {"max_completion_tokens": 100}),
        (CHAT, {"max_tokens": 100}, {"max_completion_tokens": 5}, {"max_completion_tokens": 5}),
        (
            CHAT,
            {"max_tokens": 100},
            {"max_tokens": 200, "max_completion_tokens": 300},
            {"max_tokens": 100, "max_completion_tokens": 100},
        ),
        (COMPLETIONS, {"max_tokens": 100}, {"max_tokens": 500.5}, {"max_tokens": 100}),
        (RESPONSES, {"max_tokens": 100}, {}, {"max_output_tokens": 100}),
        (RESPONSES, {"max_tokens": 100}, {"max_output_tokens": 200}, {"max_output_tokens": 100}),
        (MESSAGES, {"max_tokens": 100}, {"max_tokens": 200}, {"max_tokens": 100}),
        # The protocol's own default is smaller than the cap, or larger.
        (COMPLETIONS, {"max_tokens": 100}, {}, {"max_tokens": 16}),
        (COMPLETIONS, {"max_tokens": 7}, {}, {"max_tokens": 7}),
        # Routes that generate nothing.
        ("/v1/embeddings", {"max_tokens": 100, "defaults": {"max_tokens": 5}}, {}, {}),
        ("/v1/messages/count_tokens", {"max_tokens": 100}, {"max_tokens": 200}, {"max_tokens": 200}),
        # A default length, as each route calls it, and under the cap.
        (CHAT, {"defaults": {"max_tokens": 50}}, {}, {"max_tokens": 50}),
        (CHAT, {"defaults": {"max_tokens": 50}}, {"max_completion_tokens": 60}, {"max_completion_tokens": 60}),
        (RESPONSES, {"defaults": {"max_tokens": 50}}, {}, {"max_output_tokens": 50}),
        (COMPLETIONS, {"defaults": {"max_output_tokens": 50}, "max_tokens": 40}, {}, {"max_tokens": 40}),
        (CHAT, {"defaults": {"max_tokens": 50}, "max_tokens": 100}, {"max_tokens": 80}, {"max_tokens": 80}),
    ],
)
def test_lengths(path: str, means: dict[str, Any], body: dict[str, Any], expected: dict[str, Any]) -> None:
    """The cap and the default length, on every route that generates, as that route calls them."""
    assert (
        json.loads(names.apply(json.dumps(body).encode(), path, name(to="m", **means)) or json.dumps(body)) == expected
    )


@pytest.mark.parametrize("value", ["5000", True, [1], {"a": 1}])
def test_a_length_that_is_no_number_passes_no_cap(value: Any) -> None:
    """An engine would read "5000" as a number: it is refused instead."""
    with pytest.raises(errors.InvalidRequest, match="max_tokens"):
        names.apply(json.dumps({"max_tokens": value}).encode(), CHAT, name(to="m", max_tokens=100))


# --- What a client sees


class Recording(FakeEngine):
    """Keeps every body that reaches it; answers with ``status`` alone where it has one."""

    def __init__(self, name: str, status: int | None = None) -> None:
        super().__init__(FakeScript(tasks=("generate", "embed")), name)
        self.bodies: list[bytes] = []
        self._status = status

    @property
    def asgi(self) -> ASGIApp:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await self._answer(scope, receive, send)
                return
            body = await read_body(receive)
            self.bodies.append(body)
            if self._status is not None:
                await send({"type": "http.response.start", "status": self._status, "headers": []})
                await send({"type": "http.response.body", "body": b""})
                return
            read = False

            async def again() -> Message:
                nonlocal read
                if read:
                    return await receive()
                read = True
                return {"type": "http.request", "body": body}

            await self._answer(scope, again, send)

        return app


def recorded(name: str, status: int | None = None, **limits: Any) -> FakeModel:
    return FakeModel(name, [Replica(f"{name}-0", Recording(name, status), 64)], limits=RequestLimits(**limits))


def asked(y: Yard, name: str) -> int:
    """How many requests came to that model's engine."""
    return sum(replica.door.admitted for replica in y.models[name].replicas)


def means(y: Yard, **given: dict[str, Any]) -> None:
    y.relay.settings = GatewaySettings.model_validate({"names": given})


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "smart", "messages": [{"role": "user", "content": "two words"}], "max_tokens": 3, **more}


def assert_fell_back(y: Yard, answer: httpx.Response, before: str = "big", to: str = "small") -> None:
    """The header and the metric say so, and the answer is whole under the name that was asked for."""
    assert (answer.status_code, answer.headers.get("x-modelyard-fallback")) == (200, to)
    assert y.counted["modelyard_fallbacks_total", before, to] == 1
    if answer.headers["content-type"].startswith("text/event-stream"):
        seen = events(answer.text)
        assert {event["model"] for event in seen} == {"smart"}
        assert "error" not in seen[-1]
    else:
        assert answer.json()["model"] == "smart"


async def test_a_canary_gets_its_share_and_keeps_its_users() -> None:
    """A user's requests all go to one model, whichever field names it; together they follow the weights."""
    async with yard(model("stable"), model("canary")) as y:
        means(y, smart={"to": {"stable": 3, "canary": 1}})
        for field in ({"user": "u7"}, {"safety_identifier": "u7"}, {"metadata": {"user_id": "u7"}}):
            before = asked(y, "stable"), asked(y, "canary")
            for _ in range(4):
                assert (await y.client.post(CHAT, json=chat(**field))).json()["model"] == "smart"
            got = asked(y, "stable") - before[0], asked(y, "canary") - before[1]
            assert sorted(got) == [0, 4]
        before = asked(y, "canary")
        await asyncio.gather(*(y.client.post(CHAT, json=chat(user=f"u{i}")) for i in range(200)))
        assert 25 <= asked(y, "canary") - before <= 80
        before = asked(y, "canary")
        await asyncio.gather(*(y.client.post(CHAT, json=chat()) for _ in range(200)))
        assert 20 <= asked(y, "canary") - before <= 85
        assert not y.counted
        await y.quiet()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failed_model_has_a_fallback(stream: bool) -> None:
    """Its start failed: the next model answers, and the client is told."""
    async with yard(model("big"), model("small")) as y:
        y.models["big"].state = State.FAILED
        means(y, smart={"to": "big", "fallback": ["small"]})
        assert_fell_back(y, await y.client.post(CHAT, json=chat(stream=stream)))
        await y.quiet()


async def test_a_missing_model_has_a_fallback() -> None:
    """As one that failed; and without leave to fall back it is a 503 that names no inner model."""
    async with yard(model("small")) as y:
        means(y, smart={"to": "big", "fallback": ["small"]})
        assert_fell_back(y, await y.client.post(CHAT, json=chat()))
        refused = await y.client.post(CHAT, json=chat(), headers={"x-modelyard-no-fallback": "1"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "10")
        assert "big" not in refused.text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_model_has_a_fallback(stream: bool) -> None:
    """Its queue is full: the next model answers at once, with a queue of its own."""
    async with yard(model("big", slots=1), model("small")) as y:
        means(y, smart={"to": "big", "fallback": ["small"]})
        busy = asyncio.create_task(y.client.post(CHAT, json=chat(model="big", fake={"hang": 0})))
        while not y.models["big"].replicas[0].gate.busy:
            await asyncio.sleep(0.01)
        y.models["big"].limits = RequestLimits(max_waiting=0)
        assert_fell_back(y, await y.client.post(CHAT, json=chat(stream=stream)))
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)
        await y.quiet()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_model_that_loses_its_replicas_has_a_fallback(stream: bool) -> None:
    """``attempts`` replicas were lost under the request before it began."""
    async with yard(recorded("big", status=503, attempts=2), model("small")) as y:
        means(y, smart={"to": "big", "fallback": ["small"]})
        assert_fell_back(y, await y.client.post(CHAT, json=chat(stream=stream)))
        assert asked(y, "big") == 2
        await y.quiet()


async def test_a_model_without_a_replica_in_time_has_a_fallback() -> None:
    """Its own patience first; then the next of the list that can."""
    sleepy = model("big", replicas=0, limits=RequestLimits(hold_s=0.1))
    refusing = model("middle", replicas=0, limits=RequestLimits(hold_requests=0))
    async with yard(sleepy, refusing, model("small")) as y:
        means(y, smart={"to": "big", "fallback": ["middle", "small"]})
        assert_fell_back(y, await y.client.post(CHAT, json=chat()), before="middle")
        assert y.counted["modelyard_fallbacks_total", "big", "middle"] == 1
        await y.quiet()


async def test_a_fallback_that_cannot_do_the_task_is_passed_over() -> None:
    """An embedding model is nobody's stand-in for a chat; the first model's own task is the client's mistake."""
    embed = model("embed", script=FakeScript(tasks=("embed",)))
    async with yard(model("big"), embed, model("small")) as y:
        y.models["big"].state = State.FAILED
        means(y, smart={"to": "big", "fallback": ["embed", "small"]}, wrong={"to": "embed", "fallback": ["small"]})
        assert_fell_back(y, await y.client.post(CHAT, json=chat()), before="embed")
        wrong = await y.client.post(CHAT, json=chat(model="wrong"))
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "unsupported_task")


async def test_where_nobody_can_serve_the_first_ones_error_is_told() -> None:
    """No header claims an answer that was none."""
    async with yard(
        model("big", replicas=0, limits=RequestLimits(hold_requests=0)),
        model("small", replicas=0, limits=RequestLimits(hold_requests=0)),
    ) as y:
        means(y, smart={"to": "big", "fallback": ["small"]})
        refused = await y.client.post(CHAT, json=chat())
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "7")
        assert "of big runs" in refused.json()["error"]["message"]
        assert "x-modelyard-fallback" not in refused.headers


@pytest.mark.parametrize("status", [400, 404, 422, 429, 500])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_an_engine_says_of_a_request_stands(status: int, stream: bool) -> None:
    """No other model is asked after an engine's own error."""
    async with yard(model("big"), model("small")) as y:
        means(y, smart={"to": "big", "fallback": ["small"]})
        refused = await y.client.post(CHAT, json=chat(stream=stream, fake={"status": status}))
        assert refused.status_code == (400 if status == 422 else status)
        assert asked(y, "small") == 0
        assert not y.counted


async def test_a_stream_that_began_is_never_another_models() -> None:
    """Its only replica is lost in the middle: an error event ends it."""
    async with yard(model("big", limits=RequestLimits(attempts=1)), model("small")) as y:
        means(y, smart={"to": "big", "fallback": ["small"]})
        request = chat(stream=True, max_tokens=50, fake={"interval_s": 0.02})
        text, lost = "", False
        async with y.client.stream("POST", CHAT, json=request) as answer:
            async for part in answer.aiter_text():
                text += part
                if "t3" in text and not lost:
                    lost = True
                    y.models["big"].replicas[0].sever()
        assert "error" in events(text)[-1]
        assert asked(y, "small") == 0
        assert not y.counted["modelyard_fallbacks_total", "big", "small"]


async def test_after_a_sign_of_life_no_other_model_takes_over() -> None:
    """The head went out without the header: a fallback now would be a silent one."""
    async with yard(model("big", replicas=0, limits=RequestLimits(hold_s=1.3)), model("small")) as y:
        means(y, smart={"to": "big", "fallback": ["small"]})
        headers = {"x-modelyard-keep-alive": "1"}
        answer = await y.client.post(CHAT, json=chat(stream=True), headers=headers)
        assert answer.text.startswith(": big is starting")
        assert "error" in answer.text
        assert asked(y, "small") == 0


@pytest.mark.parametrize(("value", "status"), [("1", 503), ("true", 503), ("0", 200)])
async def test_a_client_can_forbid_it(value: str, status: int) -> None:
    """With ``x-modelyard-no-fallback`` it is the model that the name means, or its error, on /generate too."""
    async with yard(model("big"), model("small")) as y:
        y.models["big"].state = State.FAILED
        means(y, smart={"to": "big", "fallback": ["small"]})
        headers = {"x-modelyard-no-fallback": value}
        assert (await y.client.post(CHAT, json=chat(), headers=headers)).status_code == status
        generate = {"model_name": "smart", "prompt": "x"}
        assert (await y.client.post("/generate", json=generate, headers=headers)).status_code == status


async def test_generate_knows_names() -> None:
    """A fallback with its header, and the cap."""
    async with yard(model("big"), model("small")) as y:
        y.models["big"].state = State.FAILED
        means(y, smart={"to": "big", "fallback": ["small"], "max_tokens": 2})
        answer = await y.client.post("/generate", json={"model_name": "smart", "prompt": "x", "max_tokens": 5})
        assert (answer.json(), answer.headers["x-modelyard-fallback"]) == ({"text": "t0 t1 "}, "small")
        assert y.counted["modelyard_fallbacks_total", "big", "small"] == 1


async def test_a_field_whose_name_is_no_text_is_refused() -> None:
    """Where a name changes the request every field's name is read: what is no UTF-8 is the client's fault."""
    async with yard(recorded("chat")) as y:
        means(y, capped={"to": "chat", "max_tokens": 5})
        body = json.dumps(chat(model="capped")).encode()[:-1] + b', "\xff": 1}'
        answer = await y.client.post(CHAT, content=body, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, "The body is not valid JSON.")
        assert asked(y, "chat") == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_defaults_and_caps_reach_the_engine(stream: bool) -> None:
    """The engine gets the request as the name changed it; a model's own id changes nothing, not even the bytes."""
    async with yard(recorded("big")) as y:
        means(y, smart={"to": "big", "defaults": {"temperature": 0.2, "top_p": 0.9}, "max_tokens": 2})
        answer = await y.client.post(CHAT, json=chat(stream=stream, top_p=0.5))
        (body,) = y.models["big"].replicas[0].engine.bodies  # type: ignore[attr-defined]
        assert json.loads(body) == chat(stream=stream, top_p=0.5, temperature=0.2) | {"max_tokens": 2}
        assert "t1 " in answer.text
        assert "t2 " not in answer.text
        plain = b'{ "model": "big",\n "messages": [], "max_tokens": 9, "stream": %s}' % str(stream).lower().encode()
        await y.client.post(CHAT, content=plain, headers={"content-type": "application/json"})
        assert y.models["big"].replicas[0].engine.bodies[1] == plain  # type: ignore[attr-defined]
        wrong = await y.client.post(CHAT, json=chat(max_tokens="3"))
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "max_tokens")


async def test_a_default_can_make_it_a_stream() -> None:
    """``stream`` among the defaults is known before the answer begins."""
    async with yard(model("big")) as y:
        means(y, smart={"to": "big", "defaults": {"stream": True}})
        assert len(events((await y.client.post(CHAT, json=chat())).text)) == 4


async def test_a_form_goes_where_the_name_leads() -> None:
    """Multipart bodies are relayed as they are: names, shares and fallbacks count, defaults and caps do not."""
    whisper = model("whisper", script=FakeScript(tasks=("transcription",)))
    async with yard(whisper) as y:
        means(y, smart={"to": {"gone": 1, "whisper": 1}, "defaults": {"x": 1}, "max_tokens": 1})
        form = {"data": {"model": "smart"}, "files": {"file": ("a.wav", b"RIFF")}}
        assert (await y.client.post("/v1/audio/transcriptions", **form)).status_code == 200  # type: ignore[arg-type]


async def test_names_change_live() -> None:
    """The next request goes by the new settings; one that is gone is unknown, and named as such."""
    async with yard(model("big"), model("small")) as y:
        assert (await y.client.post(CHAT, json=chat())).status_code == 404
        for target in ("big", "small"):
            means(y, smart={"to": target})
            assert (await y.client.post(CHAT, json=chat())).status_code == 200
            assert (await y.client.get("/v1/models/smart")).json()["root"] == target
        assert (asked(y, "big"), asked(y, "small")) == (1, 1)
        means(y)
        gone = await y.client.post(CHAT, json=chat())
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")


async def test_names_are_listed() -> None:
    """/v1/models has them, each with the model that it mostly means; /ready has what is wrong with them."""
    async with yard(model("big", also_known_as=("llama",)), model("small")) as y:
        means(y, smart={"to": {"small": 1, "big": 9}}, llama={"to": "small"}, lost={"to": "nowhere"})
        listed = {m["id"]: m["root"] for m in (await y.client.get("/v1/models")).json()["data"]}
        assert listed == {"big": "big", "llama": "big", "small": "small", "smart": "big"}
        assert (await y.client.get("/v1/models/lost")).status_code == 404
        assert (await y.client.get("/ready")).json()["conflicts"] == [
            "the name 'llama' is an id of big, which keeps it",
            "the name 'lost' leads to 'nowhere', which does not exist now",
        ]


async def test_a_name_is_ready_as_long_as_one_of_its_models_can_answer() -> None:
    """A failed model does not make its name unready while a fallback is there for it."""
    async with yard(model("big"), model("small")) as y:
        means(y, smart={"to": "big", "fallback": ["small"]})
        for failed, status, root in (("", 200, "big"), ("big", 200, "small"), ("small", 503, "big")):
            if failed:
                y.models[failed].state = State.FAILED
            assert (await y.client.get("/ready?model=smart")).status_code == status
            assert (await y.client.get("/v1/models/smart")).json()["root"] == root
