"""What Serve says of its applications, and that in our words.

``serve.status()`` would say it too. But it makes objects of Serve's configuration that pickle each deployment's request
router and policy anew: 10 ms of CPU per model at every look, in the process that relays streams. So the controller is
asked as Ray's dashboard asks it for ``GET /api/serve/applications/``, whose answer is plain data.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import ray

from serve_app.catalog import AppSnapshot
from serve_app.config import CARD_DEPLOYMENT, GATEWAY_DEPLOYMENT, MODEL_DEPLOYMENT

CONTROLLER, NAMESPACE = "SERVE_CONTROLLER_ACTOR", "serve"
# A controller that restarts answers late.
PATIENCE_S = 30.0
# The line of a traceback that names the exception.
_RAISED = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception): ", re.MULTILINE)


def applications() -> Mapping[str, Mapping[str, Any]]:
    """Serve's ``ApplicationDetails`` by name, as JSON has them. Blocks. Raises what Ray raises where no controller
    answers."""
    controller = ray.get_actor(CONTROLLER, NAMESPACE)
    details = ray.get(controller.get_serve_instance_details.remote(), timeout=PATIENCE_S)
    found: Mapping[str, Mapping[str, Any]] = details["applications"]
    return found


def gateways_of(applications: Iterable[Mapping[str, Any]]) -> int:
    """How many replicas of the gateway run; 0: Serve does not say, as while it builds the application anew."""
    return sum(_running(app["deployments"].get(GATEWAY_DEPLOYMENT, {})) for app in applications)


def snapshot_of(name: str, app: Mapping[str, Any]) -> AppSnapshot | None:
    """One application; None where it is not one of our models, or is going."""
    status, message, deployments = app["status"], app["message"], app["deployments"]
    if status in ("DELETING", "NOT_STARTED"):
        return None
    failed = status == "DEPLOY_FAILED"
    if not deployments:
        # Serve does not say what is in it while it builds it anew, nor where it could not. What ran before runs on.
        return AppSnapshot(name, None, wanted=True, failed=failed, message=in_short(message), updating=True)
    model = deployments.get(MODEL_DEPLOYMENT)
    if model is None or CARD_DEPLOYMENT not in deployments:
        return None
    running = _running(model)
    # A model that was woken and cannot start: Serve gives up after three attempts, until it is deployed again.
    start_failed = "failed to start" in model["message"]
    failed = failed or (model["status"] == "UNHEALTHY" and start_failed and not running)
    return AppSnapshot(
        name=name,
        running=running,
        wanted=model["status"] != "HEALTHY" or bool(model["replicas"]),
        failed=failed,
        message=in_short(model["message"] or message),
        updating=failed or model["status"] == "UPDATING",
        start_failed=start_failed,
    )


def in_short(message: str) -> str:
    """One line of Serve's message for people to read, cut short: where it holds tracebacks, what was raised last."""
    raised = list(_RAISED.finditer(message))
    told = message[raised[-1].end() :] if raised else message.strip().partition("\n")[0]
    return " ".join(told.split())[:200]


def _running(deployment: Mapping[str, Any]) -> int:
    return sum(replica["state"] == "RUNNING" for replica in deployment.get("replicas", ()))
