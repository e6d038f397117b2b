"""The page at /status in a real browser: headless Chromium, driven by playwright, at a gateway with the scripted
engine."""

import os
import shutil
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml

from serve_app import keys
from serve_app.config import FakeScript, GatewaySettings
from serve_app.gateway.failures import Failure
from serve_app.scaling import EngineStats
from tests.inprocess import HOST, FakeModel, Yard, eventually, model, yard

CHROMIUM = shutil.which("chromium")
playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
Page, Browser, expect = playwright.Page, playwright.Browser, playwright.expect

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium (apt-get install chromium)"),
]

KEY = "my-" + "k" * 43
# The browser waits for what the page looks for every two seconds, on machines of any speed.
PATIENCE_MS = 60_000
# Where pictures go, for people to look at.
PICTURES = os.environ.get("MODELYARD_PICTURES")


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with playwright.async_playwright() as driver:
        # Chromium's sandbox does not work for root.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=arguments)
        expect.set_options(timeout=PATIENCE_MS)
        yield browser
        await browser.close()


class Visit:
    """A page, everything that it asked for, and everything that it complained about."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.urls: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.urls.append(request.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda said: said.type == "error" and self.complaints.append(said.text))


async def visit(browser: Browser, y: Yard, **options: object) -> Visit:
    page = await browser.new_page(**options)
    page.set_default_timeout(PATIENCE_MS)
    visited = Visit(page)
    await page.goto(f"http://{HOST}:{y.port}/status")
    return visited


def locked(y: Yard, path: Path) -> None:
    path.write_text(yaml.safe_dump({"keys": [{"name": "team", "hash": keys.hash_of(KEY)}]}))
    y.relay.settings = GatewaySettings(keys_file=str(path))


def row(page: Page, name: str) -> object:
    return page.locator("#models tbody tr").filter(has=page.locator(".name", has_text=name))


async def ask(page: Page, prompt: str = "hello there") -> None:
    await page.get_by_label("Prompt").fill(prompt)
    await page.get_by_role("button", name="Send").click()


async def test_a_prompt_streams_and_is_measured(browser: Browser) -> None:
    """Text while the answer is under way, then the times and the engine's own count of tokens; nothing is blocked by
    the page's own policy, and nothing is asked of anybody else."""
    async with yard(model("chat", script=FakeScript(token_interval_s=0.02))) as y:
        visited = await visit(browser, y)
        page = visited.page
        await expect(row(page, "chat")).to_contain_text("ready")
        await page.get_by_label("Max tokens").fill("40")
        replica = y.models["chat"].replicas[0]
        replica.door.keep_back = "end"
        await ask(page)
        await replica.door.kept_back.wait()
        await expect(page.locator("#answer")).to_contain_text("t0 t1 t2")
        await expect(page.locator("#progress")).to_have_text("Answering…")
        await page.get_by_role("button", name="Stop").click()
        await expect(page.locator("#progress")).to_have_text("Stopped.")
        replica.door.keep_back = "nothing"
        await ask(page)
        await expect(page.locator("#progress")).to_have_text("Done.")
        assert await page.locator("#answer").text_content() == "".join(f"t{i} " for i in range(40))
        await expect(page.locator("#answer-tokens")).to_have_text("40")
        await expect(page.locator("#first-token")).to_contain_text(" s")
        assert float(await page.locator("#token-rate").text_content()) > 0
        assert len(await page.locator("#request-id").text_content()) == 32
        assert visited.complaints == []
        assert all(url.startswith((f"http://{HOST}:{y.port}/", "data:")) for url in visited.urls)


async def test_an_id_that_comes_twice_is_shown_once(browser: Browser) -> None:
    """As behind Serve without the settings of ``modelyard env``."""
    async with yard(model("chat")) as y:
        page = (await visit(browser, y)).page
        await expect(row(page, "chat")).to_contain_text("ready")

        async def twice(route: playwright.Route) -> None:
            answer = await route.fetch()
            await route.fulfill(response=answer, headers=answer.headers | {"x-request-id": "one, one"})

        await page.route("**/v1/chat/completions", twice)
        await ask(page)
        await expect(page.locator("#request-id")).to_have_text("one")


async def test_stop_ends_the_request(browser: Browser) -> None:
    """In the engine too, by the keyboard alone; the next prompt can be sent."""
    async with yard(model("chat", script=FakeScript(tokens=1_000_000, token_interval_s=0.02))) as y:
        page = (await visit(browser, y)).page
        await expect(row(page, "chat")).to_contain_text("ready")
        await page.get_by_label("Prompt").fill("go on")
        await page.get_by_label("Max tokens").fill("1000000")
        await page.get_by_label("Prompt").press("Control+Enter")
        await expect(page.locator("#answer")).to_contain_text("t1 ")
        await page.get_by_role("button", name="Stop").focus()
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("button", name="Send")).to_be_focused()
        await eventually(lambda: y.models["chat"].replicas[0].engine.report()["aborted"] == 1)


async def test_an_error_is_said_and_listed(browser: Browser) -> None:
    """By the playground, and in the list of recent errors; names and reasons are text, whatever is in them."""
    evil = "<img src=x onerror=alert(1)>"
    chat = model("chat", also_known_as=(evil,))
    async with yard(chat) as y:
        y.relay.failures.add(Failure(1.0, "chat", "/v1/chat/completions", 503, evil, "of-long-ago"))
        visited = await visit(browser, y)
        page = visited.page
        await expect(page.locator("#failures")).to_contain_text(evil)
        await expect(row(page, "chat")).to_contain_text(evil)
        chat.limits = chat.limits.model_copy(update={"wait_s": 0.1, "hold_s": 0.1})
        await chat.replicas[0].die()
        await ask(page)
        await expect(page.locator("#fault")).to_contain_text("No replica of chat")
        await expect(page.locator("#failures tbody tr")).to_have_count(2)
        await expect(page.locator("#failures tbody tr").first).to_contain_text("model_unavailable")
        assert await page.locator("img").count() == 0
        assert ["503" in complaint for complaint in visited.complaints] == [True]


async def test_a_replica_dies_and_comes_back(browser: Browser) -> None:
    """The row says so both times, without a reload; a prompt that is sent meanwhile is answered."""
    async with yard(model("chat")) as y:
        page = (await visit(browser, y)).page
        replicas = row(page, "chat").locator("[data-label=Replicas]")
        await expect(replicas).to_have_text("1")
        replica = y.models["chat"].replicas[0]
        await replica.die()
        await expect(replicas).to_have_text("0")
        await expect(row(page, "chat").locator(".state")).to_have_text("starting")
        await ask(page)
        await expect(page.locator("#progress")).to_contain_text("is starting")
        await replica.restart()
        await expect(page.locator("#progress")).to_have_text("Done.")
        await expect(row(page, "chat").locator(".state")).to_have_text("ready")
        await expect(replicas).to_have_text("1")


async def test_a_gateway_that_is_away_is_missed_and_found_again(browser: Browser) -> None:
    """The page says that what it shows is old, and goes on by itself."""
    async with yard(model("chat")) as y:
        page = (await visit(browser, y)).page
        await expect(page.locator("#connection")).to_have_text("Connected")
        await page.context.set_offline(True)
        await expect(page.locator("#connection")).to_contain_text("does not answer. Trying again")
        await expect(row(page, "chat")).to_be_visible()
        y.models["chat"].load = EngineStats(running=7)
        await page.context.set_offline(False)
        await expect(page.locator("#connection")).to_have_text("Connected")
        await expect(row(page, "chat").locator("[data-label=Running]")).to_have_text("7")


async def test_a_key_is_asked_for_and_stays_in_the_tab(browser: Browser, tmp_path: Path) -> None:
    """A wrong one is told so. The right one is in sessionStorage and nowhere else: no URL, no place of the document,
    no other storage; it survives a reload and can be forgotten."""
    async with yard(model("chat")) as y:
        locked(y, tmp_path / "keys.yaml")
        visited = await visit(browser, y)
        page = visited.page
        form = page.locator("#key-form")
        await expect(page.get_by_label("API key")).to_be_focused()
        await expect(page.locator("#content")).to_be_hidden()
        await page.keyboard.type("my-wrong")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("alert")).to_have_text("This key is not known here.")
        await page.get_by_label("API key").fill(KEY)
        await page.get_by_role("button", name="Show").click()
        await expect(row(page, "chat")).to_contain_text("ready")
        await expect(form).to_be_hidden()
        await ask(page)
        await expect(page.locator("#progress")).to_have_text("Done.")
        assert await page.evaluate("Object.values(sessionStorage)") == [KEY]
        assert await page.evaluate("localStorage.length") == 0
        assert await page.context.cookies() == []
        everywhere = await page.evaluate(
            "document.documentElement.outerHTML + [...document.querySelectorAll('input, textarea')].map((e) => e.value)"
        )
        assert KEY not in everywhere
        await page.reload()
        await expect(row(page, "chat")).to_contain_text("ready")
        await page.get_by_role("button", name="Forget the key").click()
        await expect(form).to_be_visible()
        assert await page.evaluate("sessionStorage.length") == 0
        assert await page.locator("#models tbody tr").count() == 0
        assert not any(KEY in url or "my-wrong" in url for url in visited.urls)
        assert visited.complaints == []


def fleet() -> list[FakeModel]:
    """Something of everything that the page can show."""
    chat = model("chat", replicas=2, also_known_as=("org/chat-8b-instruct",), script=FakeScript(token_interval_s=0.01))
    chat.load = EngineStats(running=37, waiting=4, kv_usage=0.62, tokens_s=1843.0)
    coder = model("codellama", adapters={"sql": "/a/sql"})
    coder.load = EngineStats(running=3, kv_usage=0.08, tokens_s=212.0)
    return [chat, coder, model("embed", replicas=0), model("whisper", replicas=0)]


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_fits_and_can_be_read(browser: Browser, tmp_path: Path, scheme: str, width: int) -> None:
    """In both schemes, on a wide and on a narrow screen: nothing is wider than the screen, every control has a name,
    and text differs enough from what is behind it."""
    async with yard(*fleet()) as y:
        y.models["whisper"].state = "failed"
        y.models["whisper"].reason = "no such file: /models/whisper-large-v3/config.json"
        y.models["embed"].waking_for_s = 4.0
        for name, status, reason in (("whisper", 503, "model_unavailable"), ("chat", 429, "queue_full")):
            failure = Failure(time.time(), name, "/v1/chat/completions", status, reason, uuid.uuid4().hex)
            y.relay.failures.add(failure)
        view = {"width": width, "height": 900}
        page = (await visit(browser, y, color_scheme=scheme, viewport=view)).page
        await expect(row(page, "chat")).to_contain_text("ready")
        await page.get_by_label("Max tokens").fill("100")
        await ask(page, "What is the capital of France?")
        await expect(page.locator("#progress")).to_have_text("Done.")
        await page.screenshot(path=Path(PICTURES or tmp_path) / f"status-{scheme}-{width}.png", full_page=True)
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        assert await page.evaluate(UNNAMED) == []
        assert await page.evaluate(PALE) == []


async def test_nothing_moves_for_who_does_not_want_it(browser: Browser) -> None:
    """The dot of a starting model pulses, unless the system asks for less motion."""
    async with yard(model("chat", replicas=0)) as y:
        for wish, moves in (("no-preference", "pulse"), ("reduce", "none")):
            page = (await visit(browser, y, reduced_motion=wish)).page
            await expect(row(page, "chat").locator(".state")).to_have_text("starting")
            pulse = "getComputedStyle(document.querySelector('#models .state'), '::before').animationName"
            assert await page.evaluate(pulse) == moves


# Controls without an accessible name.
UNNAMED = """
[...document.querySelectorAll("button, input, select, textarea, progress")]
  .filter((e) => !(e.labels?.length || e.ariaLabel || e.textContent.trim())).map((e) => e.outerHTML)
"""
# Text whose contrast with its ground is below 4.5, what WCAG 2 asks for; disabled controls are exempt.
PALE = """
(() => {
  const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => {
    const [r, g, b] = channels(colour).map((c) => (c /= 255) <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const ground = (e) => {
    const colour = getComputedStyle(e).backgroundColor;
    return channels(colour)[3] === 0 ? ground(e.parentElement) : colour;
  };
  const contrast = (e) => {
    const [a, b] = [light(getComputedStyle(e).color), light(ground(e))];
    return (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
  };
  return [...document.querySelectorAll("body *")]
    .filter((e) => e.checkVisibility() && !e.disabled)
    .filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
    .filter((e) => contrast(e) < 4.5).map((e) => `${e.outerHTML.slice(0, 80)} ${contrast(e).toFixed(2)}`);
})()
"""
