"""SECURITY.md says what is so."""

import re
from pathlib import Path
from typing import Any

import pytest

from serve_app import asgi, keys, usage
from serve_app.config import GatewaySettings, RequestLimits
from serve_app.gateway import failures, relay, request, status_page, tracing, upstream
from serve_app.gateway.app import WITHOUT_KEY
from serve_app.keys import Key
from serve_app.model import http_server
from serve_app.signals import ALL

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "SECURITY.md").read_text()
BOUNDS = {row.split("|")[1].strip(): row for row in re.findall(r"^\|.*$", TEXT, re.M)}
LIMITS = RequestLimits()


@pytest.mark.parametrize(
    ("row", "bounds"),
    [
        ("path, query and headers", [f"{asgi.MAX_HEAD_BYTES // 1024} KiB", f"{asgi.MAX_HEADERS} headers"]),
        ("the same at a replica's port, also without an end", [f"{http_server.MAX_UNPARSED_BYTES // 1024} KiB"]),
        ("body", [f"{GatewaySettings().max_body_mb:g} MB"]),
        ("request id", [f"{len(request.clean_request_id(b'a' * 10_000))} bytes"]),
        ("waiting for a model, at each gateway", [f"{LIMITS.max_waiting} requests", f"{LIMITS.wait_s:g} s"]),
        ("waiting for one that sleeps or starts", [f"{LIMITS.hold_requests} requests", f"{LIMITS.hold_s:g} s"]),
        ("kept for a client that reads slowly", [f"{upstream.HIGH_WATER // 1024} KiB"]),
        ("replicas that one request may lose", [f"| {LIMITS.attempts} |"]),
        ("days that one question about usage may span", [f"| {usage.MAX_DAYS} |"]),
        ("an engine's error that is looked at", [f"{relay.MAX_ERROR_BYTES // 1024} KiB"]),
        ("failed requests that `/ready` tells of, of each model", [f"the last {failures.KEPT}"]),
    ],
)
def test_the_bounds_are_the_codes(row: str, bounds: list[str]) -> None:
    """Each default of the table."""
    for bound in bounds:
        assert bound in BOUNDS[row]


def test_a_key_has_no_bounds_of_its_own_by_default() -> None:
    """What the table calls none."""
    key = Key(name="a", hash=keys.hash_of("a"))
    assert [key.max_concurrent, key.requests_per_minute, key.tokens_per_minute] == [None] * 3


def test_what_it_names_exists() -> None:
    """Files of ours and settings."""
    for file in re.findall(r"`((?:gateway/|model/)?\w+\.py)`", TEXT):
        assert (ROOT / "serve_app" / file).is_file(), file
    known: dict[str, Any] = GatewaySettings.model_fields | Key.model_fields
    for name in ("max_body_mb", "cors_origins", "max_concurrent", "requests_per_minute", "tokens_per_minute"):
        assert name in known
        assert f"`{name}`" in TEXT
    assert set(re.findall(r"`limits\.(\w+)`", TEXT)) <= RequestLimits.model_fields.keys()


def test_without_a_key_there_are_probes_and_the_files_of_the_page() -> None:
    """And nothing else."""
    assert {"/health", "/ready", *status_page.FILES} == WITHOUT_KEY
    assert "`/health`, that `/ready` is ready, and the files of the page at `/status`" in TEXT


def test_six_headers_are_passed_on() -> None:
    """None of them says who the client is."""
    assert len(request._FORWARDED) + len(tracing.PARENTS) == 6
    assert not request._FORWARDED & {b"authorization", b"cookie", b"x-api-key", b"proxy-authorization"}


def test_labels_are_names_of_the_configuration() -> None:
    """No metric has a label for what a client sends: models, our routes, and words of ours."""
    words = {"status", "reason", "stage", "what", "why", "state"}
    assert {label for metric in ALL for label in metric.labels} == {"model", "to", "route"} | words
