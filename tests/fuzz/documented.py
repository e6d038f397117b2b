"""Requests that schemathesis makes from the gateway's own OpenAPI document: some as it says, some against it."""

import contextlib
import copy
from collections.abc import Sequence
from typing import Any

import hypothesis
import requests
import schemathesis
from hypothesis import HealthCheck, Phase
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from tests.fuzz.case import Case, Headers


def cases(document: dict[str, Any], models: Sequence[str], count: int, seed: int) -> list[Case]:
    """Hardly more than ``count``, the same for the same ``seed``; ``models`` are the ids that a body may name."""
    schema = schemathesis.openapi.from_dict(_with_models(document, models))
    operations = [found.ok() for found in schema.get_all_operations()]
    per_operation = -(-count // (2 * len(operations)))
    made = [
        case
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
        for operation in operations
        for case in _drawn(operation, mode, per_operation, seed)
    ]
    return [_case(case) for case in made]


def _drawn(operation: Any, mode: GenerationMode, count: int, seed: int) -> list[schemathesis.Case]:
    made: list[schemathesis.Case] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def draw(case: schemathesis.Case) -> None:
        made.append(case)

    with contextlib.suppress(Unsatisfiable):  # nothing can be wrong with a request that has no parts
        draw()
    return made


def _with_models(document: dict[str, Any], models: Sequence[str]) -> dict[str, Any]:
    """``document``, more exact in which models there are: else hardly a request would reach one."""
    document = copy.deepcopy(document)
    for path in document["paths"].values():
        for media in path.get("post", {}).get("requestBody", {}).get("content", {}).values():
            if "model" in (fields := media["schema"].get("properties", {})):
                fields["model"]["enum"] = list(models)
    return document


def _case(case: schemathesis.Case) -> Case:
    request = requests.Request(**_known(case.as_transport_kwargs(base_url="http://gateway"))).prepare()
    headers: Headers = tuple((_bytes(name), _bytes(value)) for name, value in request.headers.items())
    headers = tuple(h for h in headers if h[0].lower() not in (b"content-length", b"transfer-encoding"))
    body = request.body or b""
    if not isinstance(body, str | bytes):
        body = b"".join(map(_bytes, body))
    return Case("openapi", _bytes(request.method or "GET"), _bytes(request.path_url), headers, _bytes(body))


def _known(arguments: dict[str, Any]) -> dict[str, Any]:
    names = ("method", "url", "headers", "files", "data", "params", "auth", "cookies", "json")
    return {name: arguments[name] for name in names if name in arguments}


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
