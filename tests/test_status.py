"""modelyard status: what a person reads, and what to do where there is nothing to read."""

import asyncio
import io
import json

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from serve_app import status
from serve_app.catalog import State
from serve_app.cli import app
from serve_app.endpoint import EndpointError
from serve_app.model.http_server import HttpServer
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
