"""The access log's line: one JSON object per request, with nothing in it that was said in the request. Pure."""

import json
from dataclasses import dataclass, fields
from typing import Literal

Outcome = Literal["ok", "refused", "client left", "broken"]

# What clients may choose is cut: a line stays a line.
LONGEST = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """One request. None: there was none, or it is not known. docs/observability.md describes each field.

    ``at``: Unix time in seconds. ``*_s``: seconds.
    """

    at: float
    id: str | None
    key: str | None
    route: str
    asked: str | None
    model: str | None
    replica: str | None
    status: int
    outcome: Outcome
    reason: str
    moves: int
    prompt_tokens: int | None
    generated_tokens: int | None
    route_s: float | None
    queue_s: float | None
    cold_s: float | None
    engine_s: float | None
    first_byte_s: float | None
    total_s: float


FIELDS = tuple(field.name for field in fields(Access))


def line(access: Access) -> str:
    """Printable ASCII whatever is in it, so nobody can begin a line of their own or colour a terminal."""
    return json.dumps({name: _shown(getattr(access, name)) for name in FIELDS}, separators=(",", ":"))


def _shown(value: object) -> object:
    if isinstance(value, str):
        return value[:LONGEST]
    return round(value, 4) if isinstance(value, float) else value
