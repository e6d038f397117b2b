"""What a fault is, and what pydantic found in plain words."""

import dataclasses
import functools
import json
import typing
from collections.abc import Iterator
from enum import Enum
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic_core import ErrorDetails

from serve_app.check_levels import near
from serve_app.model import engine_args


@dataclasses.dataclass(frozen=True)
class Fault:
    """One thing that must be changed. ``path`` says where, ``message`` what is wrong, ``hint`` what would be right."""

    path: str
    message: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" + (f"; {self.hint}" if self.hint else "")


def in_words(error: ErrorDetails) -> str:
    given, limits = error["input"], error.get("ctx", {})
    kind = error["type"]
    is_ = "" if isinstance(given, dict | list | BaseModel) else f", is {json.dumps(given, default=str)}"
    match kind:
        case "missing":
            return "is missing"
        case "greater_than_equal":
            return f"must be at least {limits['ge']:g}{is_}"
        case "greater_than":
            return f"must be greater than {limits['gt']:g}{is_}"
        case "less_than_equal":
            return f"must be at most {limits['le']:g}{is_}"
        case "less_than":
            return f"must be less than {limits['lt']:g}{is_}"
        case "literal_error" | "enum":
            return f"must be {limits['expected']}{is_}"
        case "string_too_short" | "too_short":
            return "must not be empty"
        case "string_pattern_mismatch":
            return f"has a character that is not allowed here{is_}"
        case "value_error":
            return str(limits["error"])
        case "string_type":
            return f"must be text{is_}" + (
                f' (write it in quotes: "{given}")' if isinstance(given, int | float) else ""
            )
        case "dict_type" | "model_type" | "model_attributes_type" | "dataclass_type":
            return f"must be a mapping{is_ or ', is a list'}"
        case "list_type" | "tuple_type" | "set_type":
            return f"must be a list{is_ or ', is a mapping'}"
        case "finite_number":
            return f"must be a finite number{is_}"
    for prefix, what in (("int_", "a whole number"), ("float_", "a number"), ("bool_", "true or false")):
        if kind.startswith(prefix):
            return f"must be {what}{is_}"
    return error["msg"][:1].lower() + error["msg"][1:] + is_


def path_of(root: str, loc: tuple[int | str, ...], data: Any, missing: bool) -> str:
    """``loc`` as a path. Pydantic puts names of union branches into it: only what is in ``data`` is a key."""
    for part in loc:
        if isinstance(part, int) and isinstance(data, list) and part < len(data):
            root, data = f"{root}[{part}]", data[part]
        elif isinstance(data, dict) and part in data:
            root, data = join(root, part), data[part]
    return join(root, loc[-1]) if missing else root


def join(path: str, key: object) -> str:
    text = str(key) or '""'
    return f"{path}.{text}" if path else text


# --- Values of vLLM's arguments


def _parts(hint: Any) -> Iterator[Any]:
    yield hint
    if typing.get_origin(hint) is not typing.Literal:
        for arg in typing.get_args(hint):
            yield from _parts(arg)


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint)


def argument_problem(key: str, value: Any, hint: Any) -> str:
    """What is wrong with a value; empty where nothing is, and where the hint cannot tell."""
    for part in _parts(hint):
        if isinstance(part, str | typing.ForwardRef) or (isinstance(part, type) and issubclass(part, Enum)):
            return ""  # vLLM reads names of enum members in its own ways
        if dataclasses.is_dataclass(part):  # making one may touch the device: only its keys are read
            names = [f.name for f in dataclasses.fields(part)]
            wrong = [str(k) for k in value if k not in names] if isinstance(value, dict) else []
            wrong = [f"{k} (did you mean {n}?)" if (n := near(k, names)) else k for k in wrong]
            return f"unknown key {', '.join(wrong)}" if wrong else ""
    try:
        # As JSON, strictly: lists serve for sets and whole numbers for floats, but "false" is no bool.
        text = json.dumps(engine_args.read_numbers({key: value})[key])
    except ValueError:
        text = json.dumps(value, default=str)
    except TypeError:
        return "must be text, numbers, lists and mappings"
    try:
        _adapter(hint).validate_json(text, strict=True)
    except ValidationError as e:
        return in_words(e.errors(include_url=False)[0])
    except (PydanticUserError, TypeError):
        return ""
    return ""
