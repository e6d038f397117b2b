"""serve_state: Serve's words in ours."""

from typing import Any

import pytest

from serve_app.gateway.serve_state import gateways_of, in_short, snapshot_of

BUILD_FAILED = """Deploying app 'chat' failed with exception:
Traceback (most recent call last):
  File "application_state.py", line 926, in _reconcile
RuntimeError: Traceback (most recent call last):
  File "api.py", line 386, in call
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelArgs
no_such_key
  Extra inputs are not permitted
"""


def application(status: str, message: str = "", **deployments: dict[str, Any]) -> dict[str, Any]:
    return {"status": status, "message": message, "deployments": deployments}


def deployment(status: str, running: int = 0, message: str = "") -> dict[str, Any]:
    return {"status": status, "message": message, "replicas": [{"state": "RUNNING"}] * running}


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("", ""),
        ("\n first \nsecond", "first"),
        (BUILD_FAILED, "1 validation error for ModelArgs no_such_key Extra inputs are not permitted"),
        ("Retrying. Error:\n  File x\nModuleNotFoundError: No module named 'vllm'\n", "No module named 'vllm'"),
    ],
)
def test_a_message_in_short(message: str, line: str) -> None:
    """The first line, or what was raised last: never a traceback."""
    assert in_short(message) == line


def test_an_application_that_is_built_anew_keeps_its_place() -> None:
    """Serve lists no deployments while it builds a changed application: how many replicas run is then unknown."""
    building = snapshot_of("m", application("DEPLOYING"))
    assert building is not None
    assert (building.running, building.failed, building.updating) == (None, False, True)
    failed = snapshot_of("m", application("DEPLOY_FAILED", BUILD_FAILED))
    assert failed is not None
    assert (failed.running, failed.failed) == (None, True)
    assert "no_such_key" in failed.message


def test_what_is_no_model_or_is_going_is_left_out() -> None:
    """The gateway's own application, and one that is being deleted."""
    assert snapshot_of("gateway", application("RUNNING", Gateway=deployment("HEALTHY", 1))) is None
    assert snapshot_of("m", application("DELETING", Model=deployment("UPDATING"), Card=deployment("UPDATING"))) is None


def test_an_update_is_told_from_a_settled_model() -> None:
    """Updating, given up, settled."""
    card = deployment("HEALTHY", 1)
    for status, model, updating in (
        ("DEPLOYING", deployment("UPDATING", 1), True),
        ("DEPLOY_FAILED", deployment("DEPLOY_FAILED", 1, "why"), True),
        ("RUNNING", deployment("HEALTHY", 1), False),
    ):
        snapshot = snapshot_of("m", application(status, Model=model, Card=card))
        assert snapshot is not None
        assert (snapshot.running, snapshot.updating, snapshot.message) == (1, updating, model["message"])
        assert not snapshot.start_failed


def test_a_start_that_failed_is_told_before_serve_gives_up() -> None:
    """Serve's message of one attempt (Ray 2.60's words): the version cannot start, though two attempts are left."""
    model = deployment(
        "UPDATING", 1, "A replica failed to start with exception. Retrying 2 more time(s). Error:\nValueError: no"
    )
    snapshot = snapshot_of("m", application("DEPLOYING", Model=model, Card=deployment("HEALTHY", 1)))
    assert snapshot is not None
    assert (snapshot.failed, snapshot.start_failed, snapshot.message) == (False, True, "no")


def test_how_many_gateways_run() -> None:
    """Those of the gateway's deployment alone; 0 while Serve does not list it."""
    chat = application("RUNNING", Model=deployment("HEALTHY", 3), Card=deployment("HEALTHY", 1))
    assert gateways_of([chat, application("RUNNING", Gateway=deployment("HEALTHY", 2))]) == 2
    assert gateways_of([chat, application("DEPLOYING")]) == 0
