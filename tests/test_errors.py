"""Every error that a client can see: its envelope, its headers, its way between processes."""

import json
import pickle

import pytest

from serve_app import errors
from serve_app.errors import MethodNotAllowed, ModelyardError, TooManyRequests, Unavailable, UnknownModel


def _all(cls: type[ModelyardError]) -> list[type[ModelyardError]]:
    return [cls, *(s for sub in cls.__subclasses__() for s in _all(sub))]


def _make(cls: type[ModelyardError]) -> ModelyardError:
    return MethodNotAllowed("what happened", allow="GET, POST") if cls is MethodNotAllowed else cls("what happened")


EVERY = pytest.mark.parametrize("cls", _all(ModelyardError), ids=lambda c: c.__name__)


@EVERY
def test_an_error_survives_pickling(cls: type[ModelyardError]) -> None:
    """Errors cross Ray processes whole: class, text, and every attribute that the response is made from."""
    error = _make(cls)
    error.param, error.code, error.retry_after_s = "model", "some_code", 2.5
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert str(copy) == "what happened"
    assert vars(copy) == vars(error)
    assert errors.render(copy) == errors.render(error)


@EVERY
def test_the_openai_envelope_has_its_four_keys(cls: type[ModelyardError]) -> None:
    """Whatever the error, a client of OpenAI's protocol finds message, type, param and code."""
    status, headers, body = errors.render(_make(cls))
    assert 400 <= status < 600
    assert dict(headers)[b"content-type"] == b"application/json"
    assert dict(headers)[b"content-length"] == str(len(body)).encode()
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] == "what happened"
    assert error["type"]


@EVERY
def test_the_anthropic_envelope_names_one_of_its_types(cls: type[ModelyardError]) -> None:
    """Whatever the error, a client of Anthropic's protocol finds a type from its list, and no OpenAI fields."""
    _, _, body = errors.render(_make(cls), "anthropic")
    content = json.loads(body)
    assert content["type"] == "error"
    assert set(content["error"]) == {"type", "message"}
    assert content["error"]["type"] in {*errors._ANTHROPIC_TYPES.values(), "api_error"}


def test_param_and_code_reach_the_envelope() -> None:
    """The code of a class is its default; what an instance is given wins."""
    _, _, body = errors.render(UnknownModel("no such model", param="model"))
    assert json.loads(body)["error"] == {
        "message": "no such model",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    _, _, body = errors.render(Unavailable("asleep", code="starting"))
    assert json.loads(body)["error"]["code"] == "starting"


@pytest.mark.parametrize(("seconds", "header"), [(0.0, b"1"), (0.2, b"1"), (1.0, b"1"), (1.01, b"2"), (30, b"30")])
def test_retry_after_is_whole_seconds_rounded_up_and_at_least_one(seconds: float, header: bytes) -> None:
    """A client that waits as long as it is told never comes too early, and never at once."""
    _, headers, _ = errors.render(TooManyRequests("full", retry_after_s=seconds))
    assert dict(headers)[b"retry-after"] == header


def test_no_retry_after_unless_it_is_known() -> None:
    """The header is absent rather than made up."""
    _, headers, _ = errors.render(TooManyRequests("full"))
    assert b"retry-after" not in dict(headers)


def test_a_wrong_method_says_which_are_right() -> None:
    """RFC 9110: 405 carries Allow."""
    status, headers, _ = errors.render(MethodNotAllowed("no", allow="GET, POST"))
    assert (status, dict(headers)[b"allow"]) == (405, b"GET, POST")


def test_an_error_inside_a_stream_is_one_event_and_the_protocols_end() -> None:
    """OpenAI streams end in [DONE] after an error too; Anthropic's end with the error event."""
    error = Unavailable("gone\nfor good")
    first, end, rest = errors.sse_event(error).split(b"\n\n")
    assert json.loads(first.removeprefix(b"data: "))["error"]["message"] == "gone\nfor good"
    assert (end, rest) == (b"data: [DONE]", b"")
    event, rest = errors.sse_event(error, "anthropic").split(b"\n\n")
    name, data = event.split(b"\n")
    assert name == b"event: error"
    assert json.loads(data.removeprefix(b"data: "))["error"]["type"] == "overloaded_error"
    assert rest == b""
