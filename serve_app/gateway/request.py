"""What the gateway reads of a request: one parse of the body, only the fields that it needs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from python_multipart.exceptions import MultipartParseError
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from serve_app import errors
from serve_app.asgi import Receive
from serve_app.gateway.routes import Route


class ClientLeft(Exception):
    """The client closed the connection: nobody is left to answer."""


@asynccontextmanager
async def while_client_stays(receive: Receive) -> AsyncIterator[None]:
    """Run the block until it ends or the client closes its connection, which is how clients cancel: then the block is
    cancelled and ``ClientLeft`` raised. The request's body must have been read."""
    this = asyncio.current_task()
    assert this is not None
    left = False

    async def watch() -> None:
        nonlocal left
        while (await receive())["type"] != "http.disconnect":
            pass
        left = True
        this.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not left:
            raise
        this.uncancel()
        raise ClientLeft from None
    finally:
        watcher.cancel()


class Fields(msgspec.Struct):
    """The body's fields that the gateway looks at. Everything else passes unread."""

    model: Any = msgspec.UNSET
    stream: Any = None
    store: Any = None
    background: Any = None
    previous_response_id: Any = None


async def read_body(receive: Receive, limit: int) -> bytes:
    """The whole body; ``BodyTooLarge`` beyond ``limit`` bytes."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise errors.BodyTooLarge(f"The body is larger than the {limit / 2**20:g} MB that this gateway accepts.")
        parts.append(part)
        if not message.get("more_body"):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def asked_model(route: Route, headers: dict[bytes, bytes], body: bytes) -> str:
    """The id in the request's ``model``; raises ``InvalidRequest`` where there is none, or where the route's own
    rules are broken."""
    content_type = headers.get(b"content-type", b"").decode("latin-1")
    kind = content_type.partition(";")[0].strip().lower()
    if route.body == "multipart":
        if kind != "multipart/form-data":
            raise errors.UnsupportedMediaType(f"{route.path} takes multipart/form-data, not {kind or 'nothing'}.")
        return _checked(await _multipart_model(content_type, body))
    if kind != "application/json" and not kind.endswith("+json"):
        raise errors.UnsupportedMediaType(
            f"{route.path} takes JSON: send the header Content-Type: application/json, not {kind or 'none'}."
        )
    fields = parse(body)
    if route.path == "/v1/responses":
        _stateless(fields)
    return _checked(fields.model)


def parse(body: bytes) -> Fields:
    try:
        return msgspec.json.decode(body, type=Fields)
    except msgspec.ValidationError:
        raise errors.InvalidRequest("The body must be a JSON object.") from None
    except (msgspec.DecodeError, RecursionError):
        raise errors.InvalidRequest("The body is not valid JSON.") from None


def _checked(model: Any) -> str:
    if model is msgspec.UNSET or model is None:
        raise errors.InvalidRequest("Say which model: the body needs a `model`.", param="model")
    if not isinstance(model, str):
        raise errors.InvalidRequest("`model` must be a string.", param="model")
    if not model:
        raise errors.InvalidRequest("`model` is empty.", param="model")
    return model


def _stateless(fields: Fields) -> None:
    """Responses are not kept here, so whatever needs a kept one is refused rather than ignored."""
    for name, wrong in (
        ("previous_response_id", fields.previous_response_id is not None),
        ("store", fields.store is True),
        ("background", fields.background is True),
    ):
        if wrong:
            raise errors.InvalidRequest(
                f"`{name}` needs stored responses, and this endpoint keeps none: send the whole conversation in "
                "`input`, with `store` false or absent.",
                param=name,
                code="unsupported_parameter",
            )


async def _multipart_model(content_type: str, body: bytes) -> Any:
    async def once() -> Any:
        yield body

    try:
        form = await MultiPartParser(Headers({"content-type": content_type}), once()).parse()
    except (MultiPartException, MultipartParseError, KeyError):
        raise errors.InvalidRequest("The body is not valid multipart/form-data.") from None
    model = form.get("model", msgspec.UNSET)
    await form.close()
    return None if isinstance(model, UploadFile) else model
