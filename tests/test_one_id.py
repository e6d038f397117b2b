"""One ``x-request-id`` per answer, whatever Serve adds."""

import pytest

from serve_app import ray_env
from serve_app.asgi import Message, Receive, Scope, Send, respond
from serve_app.one_id import FirstId, middlewares

OURS, SERVES = (b"x-request-id", b"ours"), (b"x-request-id", b"Serve's")
OTHER = (b"content-type", b"text/plain")


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ([OURS, OTHER, SERVES], [OTHER, OURS]),
        ([OURS, OURS], [OURS]),
        ([OTHER, SERVES], [OTHER, SERVES]),
        ([OTHER], [OTHER]),
    ],
)
async def test_the_first_id_stays(given: list[tuple[bytes, bytes]], left: list[tuple[bytes, bytes]]) -> None:
    """And every other header, and the body."""
    sent: list[Message] = []

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await respond(send, 200, given, b"body")

    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    await FirstId(app)({"type": "http"}, receive, send)
    assert [message.get("headers") for message in sent] == [left, None]
    assert sent[-1]["body"] == b"body"


def test_serve_is_told_of_it() -> None:
    """By the path under which it can be imported."""
    assert f"{middlewares.__module__}:{middlewares.__name__}" in [setting.value for setting in ray_env.SETTINGS]
    (middleware,) = middlewares()
    assert middleware.cls is FirstId
