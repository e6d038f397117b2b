"""The page at /status: what its files may do in a browser, and what it is given. How it looks and works is in
``test_status_browser``."""

import asyncio
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from serve_app import keys
from serve_app.config import GatewaySettings
from serve_app.gateway import status_page
from serve_app.gateway.failures import KEPT, Failure, Failures
from serve_app.model.card_memory import CardMemory
from serve_app.scaling import EngineStats
from tests.inprocess import Yard, eventually, model, yard

ROOT = Path(__file__).parents[1]
SOURCES = {name: status_page._read(name).decode() for name, _ in status_page.FILES.values()}
CHAT = "/v1/chat/completions"
TEAM = "my-" + "t" * 43


def asked(name: str = "chat", **fields: object) -> dict[str, object]:
    return {"model": name, "messages": [{"role": "user", "content": "a secret prompt"}], **fields}


def locked(y: Yard, path: Path) -> None:
    path.write_text(yaml.safe_dump({"keys": [{"name": "team", "hash": keys.hash_of(TEAM), "models": ["chat"]}]}))
    y.relay.settings = GatewaySettings(keys_file=str(path))


# The files


@pytest.mark.parametrize("path", status_page.FILES)
async def test_each_file_is_served_without_a_key(path: str, tmp_path: Path) -> None:
    """Under a policy that lets the browser run and load our own files only, and never as anything else."""
    async with yard(model("chat")) as y:
        locked(y, tmp_path / "keys.yaml")
        answer = await y.client.get(path)
        assert (answer.status_code, answer.content) == (200, status_page._read(status_page.FILES[path][0]))
        policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_page_needs_nobody_else() -> None:
    """No address of another origin, no script, handler or style within the page, no way for text to become HTML."""
    for name, text in SOURCES.items():
        assert not re.search(r"https?://|//\w+\.|@import|url\(", text), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text), (
            name
        )
    page = SOURCES["page.html"]
    assert not re.search(r"<style|<script(?![^>]*src=)|\bstyle=|\son\w+=|javascript:", page)
    assert set(re.findall(r'(?:href|src)="([^"]+)"', page)) == {"data:,", "status/page.css", "status/page.js"}


def test_every_module_that_is_imported_is_served() -> None:
    """By the name that the importing one uses."""
    for text in SOURCES.values():
        for name in re.findall(r'from "\./([\w.]+)"', text):
            assert f"/status/{name}" in status_page.FILES


def test_a_key_goes_nowhere_but_into_a_header() -> None:
    """No cookie, no storage that outlives the tab, and an input without a name, so that no form can send it."""
    assert not any(re.search(r"localStorage|indexedDB|\bcookie\b", text) for text in SOURCES.values())
    (key_input,) = re.findall(r'<input id="key"[^>]*>', SOURCES["page.html"])
    assert " name=" not in key_input
    assert 'type="password"' in key_input


def test_the_wheel_has_every_file(tmp_path: Path) -> None:
    """A page that is missing where the package is installed would be an error at the gateway's start."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    (source / "serve_app").symlink_to(ROOT / "serve_app")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*build, str(tmp_path), str(source)], check=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    inside = zipfile.ZipFile(wheel).namelist()
    assert {f"serve_app/gateway/status_page/{name}" for name in SOURCES} <= set(inside)


# What it is given


async def test_it_is_told_what_the_gateway_and_the_engines_do() -> None:
    """In flight and waiting here, what the engines told the card, and which gateway it is."""
    fake = model("chat", slots=1)
    fake.load = EngineStats(running=1, waiting=2, kv_usage=0.25, tokens_s=40.0)
    async with yard(fake) as y:
        posts = [asyncio.create_task(y.client.post(CHAT, json=asked(fake={"hang": 0}, stream=True))) for _ in "ab"]
        await eventually(lambda: fake.pool and fake.pool.in_use == 1 and fake.pool.waiting == 1)
        told = (await y.client.get("/ready")).json()
        assert told["gateway"] == "one"
        chat = told["models"]["chat"]
        assert (chat["in_flight"], chat["waiting"]) == (1, 1)
        assert chat["engines"] == {"running": 1, "waiting": 2, "kv_usage": 0.25, "tokens_s": 40.0}
        for post in posts:
            post.cancel()
        await asyncio.gather(*posts, return_exceptions=True)
        await y.quiet()
        assert (await y.client.get("/ready")).json()["models"]["chat"]["in_flight"] == 0


def test_the_card_tells_what_engines_said_lately() -> None:
    """Sums, and the mean of the caches; nothing once they have been silent for long."""
    now = 0.0
    card = CardMemory(slots=4, clock=lambda: now)
    assert card.view().load is None
    card.engine("a", EngineStats(running=1, waiting=2, kv_usage=0.2, tokens_s=10))
    card.engine("b", EngineStats(running=3, kv_usage=0.4, tokens_s=20))
    load = card.view().load
    assert load is not None
    assert (load.running, load.waiting, load.tokens_s) == (4, 2, 30)
    assert load.kv_usage == pytest.approx(0.3)
    now = 60.0
    assert card.view().load is None


async def test_every_id_that_may_be_asked_for_comes_with_its_tasks() -> None:
    """So the playground offers names and adapters too."""
    async with yard(model("chat", also_known_as=("org/chat",), adapters={"sql": "/a/sql"})) as y:
        y.relay.settings = GatewaySettings(names={"assistant": {"to": "chat"}})
        assert (await y.client.get("/ready")).json()["ids"] == {
            asked: ["generate"] for asked in ("assistant", "chat", "org/chat", "sql")
        }


async def test_failures_are_told_without_what_was_asked() -> None:
    """Refused and broken ones, the newest first; what went well, whose client left, or that names no model is not."""
    async with yard(model("chat")) as y:
        await y.client.post(CHAT, json=asked())
        await y.client.post(CHAT, json=asked("nothing"))
        await y.client.post(CHAT, json=asked(fake={"status": 400}), headers={"x-request-id": "first"})
        await y.client.post(CHAT, json=asked(fake={"fail": 1}, stream=True), headers={"x-request-id": "second"})
        await y.quiet()
        answer = await y.client.get("/ready")
        failures = answer.json()["failures"]
        assert [(f["id"], f["model"], f["route"], f["status"]) for f in failures] == [
            ("second", "chat", CHAT, 200),
            ("first", "chat", CHAT, 400),
        ]
        assert {f["reason"] for f in failures} == {"engine"}
        assert "secret" not in answer.text


async def test_a_key_sees_failures_of_its_own_models_only(tmp_path: Path) -> None:
    """And without one nothing is told at all."""
    async with yard(model("chat"), model("other")) as y:
        for name in ("chat", "other"):
            await y.client.post(CHAT, json=asked(name, fake={"status": 400}))
        assert {f["model"] for f in (await y.client.get("/ready")).json()["failures"]} == {"chat", "other"}
        locked(y, tmp_path / "keys.yaml")
        told = await y.client.get("/ready", headers={"authorization": f"Bearer {TEAM}"})
        assert [f["model"] for f in told.json()["failures"]] == ["chat"]
        assert "other" not in told.text
        assert (await y.client.get("/ready")).json() == {"status": "ready"}


def test_a_flood_of_failures_is_bounded_and_hides_no_other_models() -> None:
    """A fixed number of each."""
    failures = Failures()
    failures.add(Failure(0.0, "quiet", CHAT, 503, "model_unavailable", "x"))
    for at in range(1, 1000):
        failures.add(Failure(float(at), "loud", CHAT, 429, "queue_full", str(at)))
    kept = failures.of(["loud", "quiet", "unknown"])
    assert len(kept) == KEPT + 1
    assert (kept[0].id, kept[-1].model) == ("999", "quiet")
    assert failures.of(["unknown"]) == []
