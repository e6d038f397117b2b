"""modelyard status: what a person reads, and what to do where there is nothing to read."""

import asyncio
import io
import itertools
import json
from collections.abc import Callable

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from serve_app import status
from serve_app.catalog import State
from serve_app.cli import app
from serve_app.endpoint import EndpointError
from serve_app.gateway.failures import Failure
from serve_app.model.http_server import HttpServer
from serve_app.scaling import EngineStats
from tests.inprocess import HOST, Yard, model, yard


async def printed(y: Yard, *options: str) -> Result:
    command = ["status", "--url", f"http://{HOST}:{y.port}", *options]
    return await asyncio.to_thread(CliRunner().invoke, app, command)


async def test_every_model_is_listed() -> None:
    """State, replicas, usual start and further ids of each; a conflict is told; exit 0."""
    sleepy = model("sleepy", replicas=0)
    sleepy.state = State.ASLEEP
    async with yard(model("chat", replicas=2, also_known_as=("org/chat",)), sleepy, model("x[red]")) as y:
        told = await asyncio.to_thread(status.read, f"{y.client.base_url}/v1/")
        out = io.StringIO()
        status.show(told, Console(file=out, width=120))
        lines = [line.split() for line in out.getvalue().splitlines()]
        assert ["chat", "ready", "2", "7", "s", "org/chat"] in lines
        assert ["sleepy", "asleep", "0", "7", "s", "7", "s"] in lines
        assert ["x[red]", "ready", "1", "7", "s"] in lines
        assert (await printed(y)).exit_code == 0


async def test_json_is_the_gateways_own() -> None:
    """--json prints what /ready says, for scripts."""
    async with yard(model("chat")) as y:
        result = await printed(y, "--json")
        assert json.loads(result.stdout) == (await y.client.get("/ready")).json()


async def test_no_model_yet() -> None:
    """An empty table would say nothing."""
    async with yard() as y:
        assert "knows no model yet" in (await printed(y)).stdout


async def test_a_gateway_that_has_just_started() -> None:
    """Its own words, and what to do; exit 1."""
    async with yard() as y:
        y.directory.known = False
        result = await printed(y)
        assert (result.exit_code, result.stdout) == (1, "")
        assert "knows no models yet. Ask again" in result.stderr


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"error": "no"}'])
async def test_something_else_answers(body: bytes) -> None:
    """Another server on that port is called what it is."""

    async def other(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        if scope["type"] == "lifespan":
            return
        await send({"type": "http.response.start", "status": 503, "headers": []})
        await send({"type": "http.response.body", "body": body})

    server = HttpServer(other, HOST)
    await server.start()
    try:
        with pytest.raises(EndpointError, match="no Modelyard gateway"):
            await asyncio.to_thread(status.read, f"http://{HOST}:{server.port}")
    finally:
        await server.stop()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://127.0.0.1:9", "Nothing answers at http://127.0.0.1:9"),
        ("here", "no address"),
        ("http://here:port", "no address"),
    ],
)
def test_nothing_answers(url: str, says: str) -> None:
    """Plain words, the next step, exit 1."""
    result = CliRunner().invoke(app, ["status", "--url", url])
    assert (result.exit_code, result.stdout) == (1, "")
    assert says in result.stderr


def test_a_server_that_keeps_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timeout is not called an absence."""

    def hangs(*_args: object, **_options: object) -> httpx.Response:
        raise httpx.ReadTimeout("timed out")

    monkeypatch.setattr(httpx, "get", hangs)
    with pytest.raises(EndpointError, match="did not answer within 10 s"):
        status.read("http://127.0.0.1:8000")


def interrupted_after(looks: int, then: Callable[[int], None]) -> Callable[[float], None]:
    """Instead of waiting: ``then`` with the number of the look that is over, and Ctrl-C after so many."""
    count = itertools.count(1)

    def pause(_seconds: float) -> None:
        if (look := next(count)) == looks:
            raise KeyboardInterrupt
        then(look)

    return pause


async def test_watching_without_a_terminal_prints_each_change_once() -> None:
    """Also that the gateway is away, and that it is back; Ctrl-C ends it without a word."""
    async with yard(model("chat", replicas=2)) as y:
        replicas = y.models["chat"].replicas

        def then(look: int) -> None:
            replicas[1].alive = look < 3
            y.directory.known = look != 4

        out = io.StringIO()
        console, pause = Console(file=out, width=200), interrupted_after(7, then)
        await asyncio.to_thread(status.watch, str(y.client.base_url), console, pause=pause)
        lines = [line for line in out.getvalue().splitlines() if not {"usual", "start"} & {*line.split()}]
        assert [line.split()[:3] for line in lines] == [
            ["chat", "ready", "2"],
            ["chat", "ready", "1"],
            ["The", "gateway", "at"],
            ["chat", "ready", "1"],
        ]


async def test_watching_as_json_is_a_line_per_change() -> None:
    """For programs that read it."""
    async with yard(model("chat")) as y:
        out = io.StringIO()
        console = Console(file=out, width=40)
        pause = interrupted_after(3, lambda look: setattr(y.directory, "known", look != 2))
        await asyncio.to_thread(status.watch, str(y.client.base_url), console, as_json=True, pause=pause)
        told = [json.loads(line) for line in out.getvalue().splitlines()]
        assert [sorted(one)[:1] for one in told] == [["conflicts"], ["fault"]]


async def test_watching_on_a_terminal_stays_in_one_place() -> None:
    """What was shown is replaced, and the cursor is there again in the end."""
    async with yard(model("chat")) as y:
        out = io.StringIO()
        console = Console(file=out, width=120, force_terminal=True)
        await asyncio.to_thread(
            status.watch, str(y.client.base_url), console, pause=interrupted_after(3, lambda _look: None)
        )
        assert out.getvalue().count("\x1b[2K") >= 2
        assert out.getvalue().rindex("\x1b[?25h") > out.getvalue().rindex("\x1b[?25l")


async def test_requests_caches_and_failures_are_shown() -> None:
    """What the page at /status shows; columns that are empty everywhere are left out."""
    chat = model("chat")
    chat.load = EngineStats(running=5, waiting=2, kv_usage=0.62, tokens_s=40.0)
    async with yard(chat) as y:
        y.relay.failures.add(Failure(1.0, "chat", "/v1/completions", 503, "[red]model_unavailable", "id-1"))
        head, under, row, _, whose, _, failure = (await printed(y)).stdout.splitlines()
        assert head.split() == ["usual"]
        assert under.split() == ["model", "state", "replicas", "running", "queued", "KV", "tokens/s", "start"]
        assert row.split() == ["chat", "ready", "1", "5", "2", "62", "%", "40", "7", "s"]
        assert "of the gateway one" in whose
        assert failure.split()[1:] == ["chat", "/v1/completions", "503", "[red]model_unavailable", "id-1"]
