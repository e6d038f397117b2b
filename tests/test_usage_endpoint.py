"""/usage and `modelyard usage`: what a gateway counts for whom, who may see it, and what is said where it cannot be."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from serve_app import keys
from serve_app.cli import app
from serve_app.config import FakeScript, GatewaySettings, Name
from serve_app.gateway.routes import RELAYED
from serve_app.signals import OTHER
from serve_app.usage import FIELDS
from tests.inprocess import HOST, Yard, eventually, model, yard

CHAT = "/v1/chat/completions"
TEAM, OWN, OPS = ("my-" + letter * 43 for letter in "tom")

Rows = dict[tuple[str | None, str], tuple[int, ...]]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def ask(asked: str = "chat", tokens: int = 3, **more: Any) -> dict[str, Any]:
    return {"model": asked, "messages": [{"role": "user", "content": "two words"}], "max_tokens": tokens} | more


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "usage"
    made.mkdir()
    return made


@pytest.fixture
async def counted(folder: Path) -> AsyncIterator[Yard]:
    """A gateway that keeps usage, without keys."""
    async with yard(model("chat", also_known_as=("org/chat",), adapters={"tuned": "/tuned"}), model("other-one")) as y:
        y.relay.settings = GatewaySettings(usage_dir=str(folder))
        yield y


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    entries = [{"name": name, "hash": keys.hash_of(key)} for name, key in (("team", TEAM), ("own", OWN), ("ops", OPS))]
    entries[2] |= {"metrics": True}  # type: ignore[dict-item]
    file = tmp_path / "keys.yaml"
    file.write_text(yaml.safe_dump({"keys": entries}))
    return file


async def rows(y: Yard, secret: str = "", **query: str) -> Rows:
    """By key and model, the figures in the order of ``FIELDS``; the test's requests are all of one day, or two."""
    answer = await y.client.get("/usage", params=query, headers=bearer(secret) if secret else {})
    assert answer.status_code == 200, answer.text
    sums: Rows = {}
    for row in answer.json()["usage"]:
        at, figures = (row["key"], row["model"]), tuple(row[field] for field in FIELDS)
        sums[at] = tuple(map(sum, zip(figures, sums.get(at, (0,) * len(FIELDS)), strict=True)))
    return sums


async def until(y: Yard, expected: Rows, secret: str = "") -> None:
    """Until ``/usage`` says so, 20 s at most; it must not say something else then."""

    def requests(told: Rows) -> int:
        return sum(figures[0] for figures in told.values())

    async with asyncio.timeout(20):
        while requests(found := await rows(y, secret)) < requests(expected):
            await asyncio.sleep(0.05)
    assert found == expected


async def test_each_request_counts_once_whatever_becomes_of_it(counted: Yard) -> None:
    """An answer, a stream, a stream whose client left, an engine's error, a wrong name and `/generate`, with the tokens
    that the engine had for them; all without a name, for there are no keys."""
    y = counted
    assert (await y.client.post(CHAT, json=ask())).status_code == 200
    assert (await y.client.post(CHAT, json=ask(stream=True))).status_code == 200
    async with y.client.stream("POST", CHAT, json=ask(tokens=50, stream=True, fake={"hang": 4})) as answer:
        async for part in answer.aiter_lines():
            if "t3" in part:
                break
    assert (await y.client.post(CHAT, json=ask(fake={"status": 400}))).status_code == 400
    assert (await y.client.post(CHAT, json=ask("nobody"))).status_code == 404
    generate = {"model_name": "chat", "prompt": "two words", "max_tokens": 3}
    assert (await y.client.post("/generate", json=generate)).status_code == 200
    await until(y, {(None, "chat"): (5, 1, 8, 13, 0), (None, OTHER): (1, 1, 0, 0, 0)})


async def test_ids_count_for_the_model_that_served(counted: Yard) -> None:
    """A further id, an adapter, a name of the gateway's and a fallback: no row under a name that no model has."""
    y = counted
    names = {"alias": Name(to="chat"), "safe": Name(to="missing", fallback=("other-one",))}
    y.relay.settings = y.relay.settings.model_copy(update={"names": names})
    for asked in ("org/chat", "tuned", "alias", "safe"):
        assert (await y.client.post(CHAT, json=ask(asked))).status_code == 200
    await until(y, {(None, "chat"): (3, 0, 6, 9, 0), (None, "other-one"): (1, 0, 2, 3, 0)})


async def test_what_nobody_could_count_is_told(folder: Path) -> None:
    """A replica that dies takes its count along: the request is in `uncounted`, and its tokens are in no sum."""
    async with yard(model("chat", script=FakeScript(first_token_s=60))) as y:
        y.relay.settings = GatewaySettings(usage_dir=str(folder))
        (replica,) = y.models["chat"].replicas
        asking = asyncio.create_task(y.client.post(CHAT, json=ask(), headers={"x-modelyard-timeout-s": "0.1"}))
        await eventually(lambda: replica.engine.report()["running"])
        replica.sever()
        assert (await asking).status_code == 503
        await until(y, {(None, "chat"): (1, 1, 0, 0, 1)})


async def test_a_key_sees_its_own_and_no_more(counted: Yard, keys_file: Path) -> None:
    """Its own without asking, another's not even when asked for by name; a key for metrics sees all, or one. A request
    that was not let in is nobody's."""
    y = counted
    y.relay.settings = y.relay.settings.model_copy(update={"keys_file": str(keys_file)})
    for key, status in ((TEAM, 200), (TEAM, 200), (OWN, 200), ("my-wrong", 401)):
        assert (await y.client.post(CHAT, json=ask(), headers=bearer(key))).status_code == status
    team: Rows = {("team", "chat"): (2, 0, 4, 6, 0)}
    own: Rows = {("own", "chat"): (1, 0, 2, 3, 0)}
    await until(y, team | own, OPS)
    assert await rows(y, TEAM) == await rows(y, TEAM, key="team") == await rows(y, OPS, key="team") == team
    assert await rows(y, OWN) == own
    for other in ("own", "nobody", ""):
        refused = await y.client.get("/usage", params={"key": other}, headers=bearer(TEAM))
        assert (refused.status_code, refused.json()["error"]["param"]) == (403, "key")
    assert (await y.client.get("/usage")).status_code == 401


async def test_days_are_asked_for_and_refused(counted: Yard) -> None:
    """In OpenAI's envelope, with the parameter; other days than today have nothing."""
    y = counted
    await y.client.post(CHAT, json=ask())
    await until(y, {(None, "chat"): (1, 0, 2, 3, 0)})
    assert await rows(y, since="2020-01-01", until="2020-01-31") == {}
    for query, param in (({"since": "soon"}, "since"), ({"until": "2025-13-01"}, "until"), ({"since": ""}, "since")):
        refused = await y.client.get("/usage", params=query)
        error = refused.json()["error"]
        assert (refused.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)


async def test_without_a_folder_there_is_none() -> None:
    """404 says which setting is missing."""
    async with yard(model("chat")) as y:
        answer = await y.client.get("/usage")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
        assert "usage_dir" in answer.json()["error"]["message"]


async def test_requests_do_not_mind_a_folder_that_fails(tmp_path: Path) -> None:
    """They are answered; who asks for the usage is told that it cannot be read, without the path."""
    async with yard(model("chat")) as y:
        y.relay.settings = GatewaySettings(usage_dir=str(tmp_path / "missing"))
        assert (await y.client.post(CHAT, json=ask())).status_code == 200
        answer = await y.client.get("/usage")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "usage_unavailable")
        assert str(tmp_path) not in answer.text


def test_no_relayed_route_has_its_path() -> None:
    """It is the gateway's own."""
    assert "/usage" not in {route.path for route in RELAYED}


# --- modelyard usage


async def printed(y: Yard, *options: str) -> Result:
    command = ["usage", "--url", f"http://{HOST}:{y.port}", *options]
    return await asyncio.to_thread(CliRunner().invoke, app, command)


async def test_the_command_prints_sums_and_their_sum(
    counted: Yard, keys_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line per key and model over all days, and a last one; of one key where it is named; the gateway's own JSON
    for scripts."""
    y = counted
    y.relay.settings = y.relay.settings.model_copy(update={"keys_file": str(keys_file)})
    for key in (TEAM, TEAM, OWN):
        await y.client.post(CHAT, json=ask(), headers=bearer(key))
    await until(y, {("team", "chat"): (2, 0, 4, 6, 0), ("own", "chat"): (1, 0, 2, 3, 0)}, OPS)
    monkeypatch.setenv("MODELYARD_API_KEY", OPS)
    lines = [line.split() for line in (await printed(y)).stdout.splitlines()]
    assert lines[1][:3] == ["key", "model", "requests"]
    assert lines[2:] == [
        ["own", "chat", "1", "0", "2", "3", "0"],
        ["team", "chat", "2", "0", "4", "6", "0"],
        ["3", "0", "6", "9", "0"],
    ]
    assert "own" not in (await printed(y, "--key", "team")).stdout
    answer = await y.client.get("/usage", headers=bearer(OPS))
    assert json.loads((await printed(y, "--json")).stdout) == answer.json()
    assert "no requests" in (await printed(y, "--since", "2020-01-01", "--until", "2020-01-02")).stdout


async def test_the_command_says_that_a_sum_is_not_complete(counted: Yard) -> None:
    """As where a second gateway writes to a folder of its own."""
    await counted.client.post(CHAT, json=ask())
    await until(counted, {(None, "chat"): (1, 0, 2, 3, 0)})
    assert "Not complete" not in (await printed(counted)).stdout
    counted.directory.gateways = 2
    assert "Not complete" in (await printed(counted)).stdout


async def test_the_command_says_what_to_do(counted: Yard, keys_file: Path) -> None:
    """A key that is missing, a day that is none, no folder: one line each, exit 1."""
    wrong_day = await printed(counted, "--since", "soon")
    counted.relay.settings = GatewaySettings(keys_file=str(keys_file))
    no_key = await printed(counted)
    counted.relay.settings = GatewaySettings()
    none = await printed(counted)
    for result, says in ((wrong_day, "2026-11-30"), (no_key, "MODELYARD_API_KEY"), (none, "usage_dir")):
        assert (result.exit_code, result.stdout) == (1, "")
        assert says in result.stderr
