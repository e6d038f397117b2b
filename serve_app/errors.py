"""Every error that a client can see: one tree, one renderer.

``ModelyardError`` subclasses carry what the protocols need. ``render`` turns one into bytes, in OpenAI's envelope
(``{"error": {message, type, param, code}}``) or in Anthropic's (``{"type": "error", "error": {type, message}}``).
No error body is built anywhere else.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

Protocol = Literal["openai", "anthropic"]

# https://docs.anthropic.com/en/api/errors
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


# What a client reads of a fault of ours; the log has the rest.
OUR_FAULT = "The gateway failed on this request; its log says why."


class ModelyardError(Exception):
    """An error with a place in the protocol.

    ``retry_after_s``: when set, the response carries ``Retry-After`` in whole seconds, rounded up, at least 1.
    """

    status = 500
    type = "api_error"
    code: str | None = None

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code
        self.retry_after_s = retry_after_s
        self.headers: list[tuple[bytes, bytes]] = []  # further ones of the answer

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions with keyword arguments do not survive pickling (between Ray processes) by themselves.
        return (_rebuild, (type(self), self.__dict__))


def _rebuild(cls: type[ModelyardError], state: dict[str, object]) -> ModelyardError:
    error = cls.__new__(cls, state["message"])  # not __init__: subclasses ask for arguments of their own
    error.__dict__.update(state)
    return error


class InvalidRequest(ModelyardError):
    status = 400
    type = "invalid_request_error"


class UnsupportedTask(InvalidRequest):
    """The model exists, but cannot do what the route asks."""

    code = "unsupported_task"


class AdapterUnusable(InvalidRequest):
    """The model exists, but its engine cannot use the LoRA adapter that the id stands for."""

    code = "adapter_unusable"


class Unauthorized(InvalidRequest):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(InvalidRequest):
    status = 403
    type = "permission_error"
    code = "forbidden"


class NotFound(InvalidRequest):
    status = 404
    code = "not_found"


class UnknownModel(InvalidRequest):
    status = 404
    code = "model_not_found"


class MethodNotAllowed(InvalidRequest):
    status = 405
    code = "method_not_allowed"

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message)
        self.allow = allow


class BodyTooLarge(InvalidRequest):
    status = 413
    code = "request_too_large"


class HeadTooLarge(InvalidRequest):
    status = 431
    code = "request_head_too_large"


class UnsupportedMediaType(InvalidRequest):
    status = 415
    code = "unsupported_media_type"


class TooManyRequests(ModelyardError):
    status = 429
    type = "rate_limit_error"
    code = "queue_full"


class Unavailable(ModelyardError):
    """Nothing can serve this model now."""

    status = 503
    type = "service_unavailable_error"
    code = "model_unavailable"


class UpstreamBroken(ModelyardError):
    """The replica broke off after the answer had begun, or answered nonsense."""

    status = 502
    code = "upstream_error"


class Relayed(ModelyardError):
    """An engine's own refusal, said again in our envelope. ``status`` is the engine's."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param=param, code=code)
        self.status = status
        self.type = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}.get(
            status, "invalid_request_error" if status < 500 else "api_error"
        )


def body(error: ModelyardError, protocol: Protocol = "openai") -> bytes:
    """The JSON body of ``error``; also the data of an SSE error event."""
    if protocol == "anthropic":
        kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        return json.dumps({"type": "error", "error": {"type": kind, "message": error.message}}).encode()
    return json.dumps(
        {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}
    ).encode()


def sse_event(error: ModelyardError, protocol: Protocol = "openai") -> bytes:
    """``error`` as the last event of a stream that has begun, closed the way the protocol closes streams."""
    if protocol == "anthropic":
        return b"event: error\ndata: " + body(error, protocol) + b"\n\n"
    return b"data: " + body(error, protocol) + b"\n\ndata: [DONE]\n\n"


def failed_to_start(model: str) -> Unavailable:
    return Unavailable(f"The model {model!r} failed to start.", retry_after_s=30)


def adapter_unusable(name: str, why: str) -> AdapterUnusable:
    return AdapterUnusable(f"The adapter {name!r} cannot be used: {why.rstrip('.')}.", param="model")


def render(error: ModelyardError, protocol: Protocol = "openai") -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """``(status, headers, body)`` of ``error``."""
    content = body(error, protocol)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    headers += error.headers
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()))
    if isinstance(error, Unauthorized):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, MethodNotAllowed):
        headers.append((b"allow", error.allow.encode()))
    return error.status, headers, content


def invalid_body(faults: Sequence[Mapping[str, Any]]) -> InvalidRequest:
    """Pydantic's faults as one error: the first field that is wrong, in words.

    A union reports one fault per branch; the shortest path is the field that the client wrote.
    """
    fault = min(faults, key=lambda f: len(f.get("loc", ())))
    cause = fault.get("ctx", {}).get("error")
    loc = [str(part) for part in fault.get("loc", ()) if part != "body"]
    # Branch names of unions, such as `list[str]` or `function-wrap[...]`, are the parser's, not the client's.
    path = [part for part in loc if part.replace("_", "").isalnum() and part not in ("str", "int", "list", "dict")]
    param = getattr(cause, "parameter", None) or ".".join(path) or None
    what = str(cause) if cause is not None else str(fault.get("msg", "is not valid")).removeprefix("Value error, ")
    return InvalidRequest(f"{param}: {what}" if param else what, param=param)
