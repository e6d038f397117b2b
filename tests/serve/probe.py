"""A Serve application of the tests' own: what one replica of a model reports, over HTTP.

A process can join only one Ray in its life, and the tests use several; so they join none.
"""

from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application

from serve_app.config import MODEL_DEPLOYMENT

api = FastAPI()


@serve.deployment(name="Probe", max_ongoing_requests=100, ray_actor_options={"num_cpus": 0})
@serve.ingress(api)
class Probe:
    @api.get("/{model}")
    async def report(self, model: str) -> Any:
        return await serve.get_deployment_handle(MODEL_DEPLOYMENT, model).report.remote()


def app(_args: dict[str, Any]) -> Application:
    application: Application = Probe.bind()  # type: ignore[attr-defined]
    return application
