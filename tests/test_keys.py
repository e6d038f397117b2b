"""API keys: who gets in, what each key may do, and that no key is ever told."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml
from httpx import Response
from typer.testing import CliRunner

from serve_app import errors, keys, status
from serve_app.catalog import State
from serve_app.cli import app
from serve_app.config import FakeScript, GatewaySettings, RequestLimits
from serve_app.endpoint import EndpointError
from serve_app.gateway import key_file
from serve_app.gateway.key_file import KeyFile
from serve_app.gateway.routes import RELAYED
from serve_app.keys import KEYS_VARIABLE, Caller
from tests.inprocess import HOST, Yard, model, yard

CHAT = {"model": "chat", "messages": [{"role": "user", "content": "hi"}]}
TEAM, ALL = "my-" + "t" * 43, "my-" + "a" * 43


def document(**team: object) -> str:
    """A keys file: ``team`` may use chat, ``all`` everything."""
    entries = [
        {"name": "team", "hash": keys.hash_of(TEAM), "models": ["chat"]} | team,
        {"name": "all", "hash": keys.hash_of(ALL)},
    ]
    return yaml.safe_dump({"keys": entries})


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A keys file that is looked at with every request."""
    monkeypatch.setattr(key_file, "LOOK_EVERY_S", 0.0)
    path = tmp_path / "keys.yaml"
    path.write_text(document())
    return path


def locked(y: Yard, path: Path, **more: Any) -> None:
    y.relay.settings = GatewaySettings(keys_file=str(path), **more)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_every_route_but_the_probes_needs_a_key(file: Path) -> None:
    """401 in the route's own envelope, with the header that says how; known and unknown paths alike."""
    paths = [("POST", route.path) for route in RELAYED]
    paths += [("GET", p) for p in ("/v1/models", "/v1/models/chat", "/docs", "/openapi.json", "/metrics", "/usage")]
    paths.append(("GET", "/nothing"))
    async with yard(model("chat")) as y:
        locked(y, file)
        for method, path in [*paths, ("POST", "/generate")]:
            for headers in ({}, bearer("my-wrong"), {"authorization": f"Basic {ALL}"}, {"x-api-key": "k" * 10_000}):
                answer = await y.client.request(method, path, json=CHAT, headers=headers)
                assert answer.status_code == 401, path
                assert answer.headers["www-authenticate"] == "Bearer"
                kind = answer.json()["error"]["type"]
                assert kind == "authentication_error"
                assert ("type" in answer.json()) == path.startswith("/v1/messages")
        for headers in (bearer(TEAM), {"authorization": f"bearer  {TEAM}"}, {"x-api-key": TEAM}):
            assert (await y.client.post("/v1/chat/completions", json=CHAT, headers=headers)).status_code == 200


async def test_a_key_sees_and_uses_its_own_models(file: Path) -> None:
    """Others are 403 whether they exist or not, are not listed, and are not named in errors; a further id of an allowed
    model is allowed."""
    async with yard(model("chat", also_known_as=("org/chat",)), model("secret")) as y:
        locked(y, file)
        for asked, code in (("chat", 200), ("org/chat", 200), ("secret", 403), ("nothing", 403)):
            answer = await y.client.post("/v1/chat/completions", json=CHAT | {"model": asked}, headers=bearer(TEAM))
            assert answer.status_code == code, answer.text
            got = await y.client.get(f"/v1/models/{asked}", headers=bearer(TEAM))
            assert got.status_code == code
        body = {"model_name": "secret", "prompt": "hi"}
        assert (await y.client.post("/generate", json=body, headers=bearer(TEAM))).status_code == 403
        for path in ("/v1/models", "/ready"):
            assert "secret" not in (await y.client.get(path, headers=bearer(TEAM))).text
            assert "secret" in (await y.client.get(path, headers=bearer(ALL))).text
        unknown = await y.client.post("/v1/chat/completions", json=CHAT | {"model": "nothing"}, headers=bearer(ALL))
        assert unknown.status_code == 404


async def test_a_key_for_a_name_or_an_adapter_sees_nothing_behind_it(file: Path) -> None:
    """Neither the model that answers, nor its other ids; and a key for a model sees none of its adapters."""
    file.write_text(document(models=["assistant", "sql"]))
    behind = model("base-7b", also_known_as=("org/base-7b",), adapters={"sql": "/adapters/x", "private": "/adapters/y"})
    async with yard(behind) as y:
        locked(y, file, names={"assistant": {"to": "base-7b"}})
        listed = (await y.client.get("/v1/models", headers=bearer(TEAM))).json()["data"]
        assert [(m["id"], m["root"], m["parent"]) for m in listed] == [
            ("assistant", "assistant", None),
            ("sql", "sql", None),
        ]
        paths = ("/v1/models", "/v1/models/sql", "/v1/models/assistant", "/ready", "/ready?model=sql")
        for path in paths:
            answer = await y.client.get(path, headers=bearer(TEAM))
            assert answer.status_code == 200
            assert not any(hidden in answer.text for hidden in ("base-7b", "private", "/adapters"))
        listed = (await y.client.get("/v1/models", headers=bearer(ALL))).json()["data"]
        assert {(m["id"], m["root"], m["parent"]) for m in listed} >= {
            ("sql", "sql", "base-7b"),
            ("assistant", "base-7b", None),
        }
        file.write_text(document(models=["base-7b"]))
        for asked, code in (("org/base-7b", 200), ("sql", 403)):
            answer = await y.client.post("/v1/chat/completions", json=CHAT | {"model": asked}, headers=bearer(TEAM))
            assert answer.status_code == code
        assert "sql" not in (await y.client.get("/ready", headers=bearer(TEAM))).text


async def test_probes_without_a_key_learn_nothing(file: Path) -> None:
    """``/ready`` says that the gateway can route: no names, no causes; asking for a model needs a key."""
    broken = model("chat", replicas=0)
    broken.state = State.FAILED
    async with yard(broken) as y:
        locked(y, file)
        assert (await y.client.get("/health")).status_code == 200
        ready = await y.client.get("/ready")
        assert (ready.status_code, ready.json()) == (200, {"status": "ready"})
        assert (await y.client.get("/ready", params={"model": "chat"})).status_code == 401
        assert (await y.client.get("/ready", params={"model": "chat"}, headers=bearer(TEAM))).status_code == 503


async def test_a_changed_file_counts_and_restarts_nothing(file: Path) -> None:
    """A key that is added works, one that is taken away does not; a broken or missing file changes nothing."""
    async with yard(model("chat"), model("other")) as y:
        locked(y, file)

        async def asked(name: str) -> int:
            body = CHAT | {"model": name}
            return (await y.client.post("/v1/chat/completions", json=body, headers=bearer(TEAM))).status_code

        assert await asked("other") == 403
        file.write_text(document(models=["chat", "other"]))
        assert await asked("other") == 200
        for broken in ("keys: [", "keys: [{name: team}]", "keys: []", ""):
            file.write_text(broken)
            assert await asked("other") == 200
        file.unlink()
        assert await asked("other") == 200
        file.write_text(yaml.safe_dump({"keys": [{"name": "all", "hash": keys.hash_of(ALL)}]}))
        assert await asked("other") == 401
        y.relay.settings = GatewaySettings()
        assert await asked("other") == 200


async def test_it_fails_closed(tmp_path: Path) -> None:
    """Keys that are configured and were never read let nobody in."""
    async with yard(model("chat")) as y:
        locked(y, tmp_path / "missing.yaml")
        answer = await y.client.post("/v1/chat/completions", json=CHAT, headers=bearer(TEAM))
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert (await y.client.get("/health")).status_code == 200


async def test_keys_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same document in the gateway's own variable."""
    monkeypatch.setenv(KEYS_VARIABLE, document())
    async with yard(model("chat")) as y:
        assert (await y.client.get("/v1/models")).status_code == 401
        assert (await y.client.get("/v1/models", headers=bearer(TEAM))).status_code == 200


async def test_open_requests_of_a_key_are_bounded(file: Path) -> None:
    """One more than ``max_concurrent`` is 429 at once; the places come back, also from clients that left; other keys
    do not notice."""
    file.write_text(document(max_concurrent=2))
    slow = model("chat", script=FakeScript(first_token_s=30))
    async with yard(slow) as y:
        locked(y, file)

        def post(key: str) -> "asyncio.Task[Response]":
            return asyncio.create_task(y.client.post("/v1/chat/completions", json=CHAT, headers=bearer(key)))

        running = [post(TEAM), post(TEAM)]
        while slow.replicas[0].gate.busy < 2:
            await asyncio.sleep(0.01)
        refused = await y.client.post("/v1/chat/completions", json=CHAT, headers=bearer(TEAM))
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "concurrency_limit"
        assert refused.headers["retry-after"]
        running.append(post(ALL))
        while slow.replicas[0].gate.busy < 3:
            await asyncio.sleep(0.01)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await y.quiet()
        assert not y.relay._open


async def test_a_key_is_told_nowhere(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not in an answer, not in a log: neither a good key, nor a wrong one, nor one pasted where its hash belongs."""
    caplog.set_level(logging.DEBUG)
    texts = []
    async with yard(model("chat")) as y:
        locked(y, file)
        for path in ("/v1/models", "/v1/models/x", "/ready", "/docs", f"/{TEAM[:3]}"):
            for key in (TEAM, "my-wrong-key"):
                answer = await y.client.get(path, headers=bearer(key))
                texts.append(answer.text + str(answer.headers))
        for broken in (yaml.safe_dump({"keys": [{"name": "a", "hash": ALL}]}), f"keys: [{ALL}", f"{ALL}: 1", ALL):
            file.write_text(broken)
            texts.append((await y.client.get("/v1/models", headers=bearer(TEAM))).text)
    assert "cannot read the keys" in caplog.text
    for text in (*texts, "\n".join(r.getMessage() for r in caplog.records if r.name != "httpx")):
        assert TEAM not in text
        assert ALL not in text
        assert "my-wrong-key" not in text


async def test_a_key_in_the_url_opens_nothing(file: Path) -> None:
    """URLs get into logs: a key counts in a header only."""
    async with yard(model("chat")) as y:
        locked(y, file)
        for name in ("key", "api_key", "api-key", "x-api-key", "authorization", "access_token"):
            assert (await y.client.get("/v1/models", params={name: TEAM})).status_code == 401
        assert (await y.client.get(f"http://user:{TEAM}@{HOST}:{y.port}/v1/models")).status_code == 401


def test_the_command_makes_one() -> None:
    """Its entry goes to standard output and is what a keys file takes; the key goes to standard error, once."""
    made = CliRunner().invoke(app, ["key", "team-a"])
    assert made.exit_code == 0
    key = made.stderr.strip().rpartition(" ")[2]
    assert key not in made.stdout
    ring = keys.parse(yaml.safe_load("keys:\n" + made.stdout))
    assert ring.caller({b"x-api-key": key.encode()}) == Caller("team-a")
    wrong = CliRunner().invoke(app, ["key", "team a"])
    assert wrong.exit_code == 1
    assert "keys.0.name" in wrong.stderr


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ([{"name": "a"}], "keys.0.hash"),
        (
            [{"name": "a", "hash": keys.hash_of("x"), "modles": []}],
            "keys.0: an unknown key; there are name, hash, models",
        ),
        ([{"name": n, "hash": keys.hash_of(n)} for n in "aba"], "name a"),
        ([{"name": n, "hash": keys.hash_of("x")} for n in "ab"], "same hash"),
        ([], "keys"),
    ],
)
def test_faults_of_a_file_say_where(entries: list[dict[str, object]], told: str) -> None:
    """The path of what is wrong."""
    with pytest.raises(ValueError, match=told):
        keys.parse({"keys": entries})


async def test_status_with_a_key(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``modelyard status`` sends the key in ``MODELYARD_API_KEY``, and says so where it needs one."""
    async with yard(model("chat")) as y:
        locked(y, file)
        url = f"http://{HOST}:{y.port}"
        with pytest.raises(EndpointError, match="MODELYARD_API_KEY"):
            await asyncio.to_thread(status.read, url)
        monkeypatch.setenv(status.KEY_VARIABLE, TEAM)
        assert "chat" in (await asyncio.to_thread(status.read, url))["models"]


async def test_browsers_are_let_in_on_purpose_only() -> None:
    """No CORS header by default; with an origin configured, that one and no other, preflights without a key."""
    ask = {"origin": "https://app.example", "access-control-request-method": "POST"}
    async with yard(model("chat")) as y:
        assert "access-control-allow-origin" not in (await y.client.get("/health", headers=ask)).headers
        y.relay.settings = GatewaySettings(cors_origins=("https://app.example",), keys_file="/missing")
        preflight = await y.client.options("/v1/chat/completions", headers=ask)
        assert preflight.headers["access-control-allow-origin"] == "https://app.example"
        other = await y.client.options("/v1/chat/completions", headers=ask | {"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
        for name in ("authorization", "x-modelyard-session", "x-modelyard-keep-alive"):
            preflight = await y.client.options(
                "/v1/chat/completions", headers=ask | {"access-control-request-headers": name}
            )
            assert preflight.status_code == 200, name
        read = (await y.client.get("/health", headers=ask)).headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "retry-after", "x-modelyard-fallback", "x-ratelimit-remaining-tokens"} <= set(read)


def test_looks_at_its_file_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many requests come."""
    path = tmp_path / "keys.yaml"
    path.write_text(document())
    source = KeyFile(lambda: str(path))
    assert source.caller({b"x-api-key": TEAM.encode()}).name == "team"
    path.write_text(document(name="renamed"))
    assert source.caller({b"x-api-key": TEAM.encode()}).name == "team"
    monkeypatch.setattr(key_file, "LOOK_EVERY_S", 0.0)
    assert source.caller({b"x-api-key": TEAM.encode()}).name == "renamed"
    with pytest.raises(errors.Unauthorized):
        source.caller({})


async def test_a_flood_of_one_key_does_not_delay_or_refuse_another(file: Path) -> None:
    """A model with one place and a full queue of one key's requests: another key's request gets in, and is answered
    before most of those that were there before it."""
    busy = model("chat", slots=1, script=FakeScript(token_interval_s=0.02), limits=RequestLimits(max_waiting=20))
    async with yard(busy) as y:
        locked(y, file)
        order: list[str] = []

        async def ask(who: str, key: str) -> int:
            answer = await y.client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 8}, headers=bearer(key))
            if answer.status_code == 200:
                order.append(who)
            return answer.status_code

        flood = [asyncio.create_task(ask("flood", ALL)) for _ in range(21)]
        while not busy.pool or busy.pool.waiting < 20:
            await asyncio.sleep(0.001)
        assert await ask("polite", TEAM) == 200
        assert len(order) < 15
        await asyncio.gather(*flood)
