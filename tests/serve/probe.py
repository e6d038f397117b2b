"""A Serve application of the tests' own: what one replica of a model or one gateway reports, and what a caller of the
model is told of its replicas, over HTTP.

A process can join only one Ray in its life, and the tests use several; so they join none.
"""

import time
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.util import placement_group_table

from serve_app.config import MODEL_DEPLOYMENT
from serve_app.replica_watch import WATCH

api = FastAPI()


@serve.deployment(name="Probe", max_ongoing_requests=100, ray_actor_options={"num_cpus": 0})
@serve.ingress(api)
class Probe:
    def __init__(self) -> None:
        self._heard: dict[str, list[tuple[float, list[str]]]] = {}
        self._handles: dict[str, Any] = {}

    @api.get("/{model}/running")
    async def running(self, model: str) -> Any:
        """Every set of running replicas since the first question, each with the time (Unix, s) at which it came."""
        if model not in self._handles:
            heard = self._heard.setdefault(model, [])
            WATCH.subscribe(model, lambda ids: heard.append((time.time(), sorted(ids))))
            self._handles[model] = serve.get_deployment_handle(MODEL_DEPLOYMENT, model)
            await self._handles[model].report.remote()  # the first call makes the router
            heard.insert(0, (time.time(), sorted(WATCH.running(model) or ())))
        return self._heard[model]

    @api.get("/{model}/groups")
    def groups(self, model: str) -> Any:
        """Ray's table of the placement groups of the model's replicas."""
        table = placement_group_table().values()
        return [group for group in table if str(group["name"]).startswith(f"SERVE_REPLICA::{model}#")]

    @api.get("/{app}/report/{deployment}")
    async def report(self, app: str, deployment: str) -> Any:
        return await serve.get_deployment_handle(deployment, app).report.remote()


def app(_args: dict[str, Any]) -> Application:
    application: Application = Probe.bind()  # type: ignore[attr-defined]
    return application
