"""What the gateway reads of a request: one parse of the body, only the fields that it needs."""

import math
import re
from typing import Any

import msgspec
from python_multipart.exceptions import MultipartParseError
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from serve_app import errors, prefixes
from serve_app.admission import Ticket
from serve_app.gateway.routes import Route
from serve_app.prefixes import Prefix

# How long a request may wait for a replica, where that is less than the model's own limit.
TIMEOUT_HEADER = b"x-modelyard-timeout-s"
# Requests with the same value go to the same replica while it has room, whatever their text.
SESSION_HEADER = b"x-modelyard-session"
_NUMBER = re.compile(rb"\d+(\.\d+)?([eE][+-]?\d+)?")

# What a request will probably cost, before anybody has read it: bytes of JSON per token, tokens of an answer whose
# length nobody limits, and how many answers one may ask for (https://platform.openai.com/docs/api-reference).
BYTES_PER_TOKEN = 4
USUAL_ANSWER_TOKENS = 256
MAX_ANSWERS = 128


class Fields(msgspec.Struct):
    """The body's fields that the gateway looks at. Everything else passes unread, and what a prompt is made of does so
    too: ``system`` to ``input``, in the order in which chat templates put it."""

    model: Any = msgspec.UNSET
    stream: Any = None
    store: Any = None
    background: Any = None
    previous_response_id: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    n: Any = None
    user: Any = None
    metadata: Any = None
    safety_identifier: Any = None
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()

    @property
    def whose(self) -> str | None:
        """The user whom the request names: OpenAI's ``user``, Anthropic's ``metadata.user_id``, or OpenAI's
        ``safety_identifier``."""
        metadata = self.metadata if isinstance(self.metadata, dict) else {}
        named = (self.user, metadata.get("user_id"), self.safety_identifier)
        return next((user for user in named if isinstance(user, str) and user), None)


async def read(route: Route, headers: dict[bytes, bytes], body: bytes) -> Fields:
    """The request's fields, with a ``model`` that is a name; raises ``InvalidRequest`` where there is none, or where
    the route's own rules are broken."""
    content_type = headers.get(b"content-type", b"").decode("latin-1")
    kind = content_type.partition(";")[0].strip().lower()
    if route.body == "multipart":
        if kind != "multipart/form-data":
            raise errors.UnsupportedMediaType(f"{route.path} takes multipart/form-data, not {kind or 'nothing'}.")
        fields = Fields(model=await _multipart_model(content_type, body))
    else:
        if kind != "application/json" and not kind.endswith("+json"):
            raise errors.UnsupportedMediaType(
                f"{route.path} takes JSON: send the header Content-Type: application/json, not {kind or 'none'}."
            )
        fields = parse(body)
        if route.path == "/v1/responses":
            _stateless(fields)
    _check_model(fields.model)
    return fields


def parse(body: bytes) -> Fields:
    try:
        return msgspec.json.decode(body, type=Fields)
    except msgspec.ValidationError:
        raise errors.InvalidRequest("The body must be a JSON object.") from None
    except (msgspec.DecodeError, RecursionError):
        raise errors.InvalidRequest("The body is not valid JSON.") from None


def ticket_of(route: Route, fields: Fields, size: int, context: int | None) -> Ticket:
    """The request's place among those that wait. ``size``: of its body in bytes; ``context``: the model's in tokens: no
    prompt with one answer costs more. Fields of a wrong type or range count as absent: the engine refuses them."""
    prompt = size // BYTES_PER_TOKEN
    answer, answers = 0, 1
    if route.streams:  # else nothing is generated
        given = (fields.max_completion_tokens, fields.max_tokens, fields.max_output_tokens)
        answer = next((v for v in given if _is_count(v)), USUAL_ANSWER_TOKENS)
        answers = min(fields.n, MAX_ANSWERS) if _is_count(fields.n) else 1
    if context:
        prompt = min(prompt, context)
        answer = min(answer, context - prompt)
    return Ticket(tokens=max(1, prompt + answers * answer))


def prefix_of(route: Route, headers: dict[bytes, bytes], fields: Fields) -> Prefix:
    """How the request begins, as its session or its JSON says; ``NOTHING`` where no engine computes a cache for it."""
    if not route.streams:  # nothing is generated
        return prefixes.NOTHING
    if session := headers.get(SESSION_HEADER):
        return prefixes.of_session(session)
    try:
        text = (fields.system, fields.instructions, fields.messages, fields.prompt, fields.input)
        return prefixes.of_text(part for field in text for part in _parts(field))
    except (msgspec.DecodeError, RecursionError):  # the engine says what is wrong with it
        return prefixes.NOTHING


def _parts(field: msgspec.Raw) -> list[msgspec.Raw]:
    """Messages one by one; anything else, a list of token ids too, as a whole."""
    if bytes(memoryview(field)[:64]).translate(None, b" \t\r\n").startswith(b"[{"):
        return msgspec.json.decode(field, type=list[msgspec.Raw])
    return [field]


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def longest_wait_s(headers: dict[bytes, bytes]) -> float:
    """How long the client lets its request wait for a replica; infinite where it does not say."""
    given = headers.get(TIMEOUT_HEADER)
    if given is None:
        return math.inf
    seconds = float(given) if _NUMBER.fullmatch(given) else 0.0
    if not 0 < seconds < math.inf:
        name = TIMEOUT_HEADER.decode()
        raise errors.InvalidRequest(f"The header {name} must be a positive number of seconds.", param=name)
    return seconds


def _check_model(model: Any) -> None:
    if model is msgspec.UNSET or model is None:
        raise errors.InvalidRequest("Say which model: the body needs a `model`.", param="model")
    if not isinstance(model, str):
        raise errors.InvalidRequest("`model` must be a string.", param="model")
    if not model:
        raise errors.InvalidRequest("`model` is empty.", param="model")


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
