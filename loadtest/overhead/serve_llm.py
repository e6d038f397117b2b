"""Ray Serve LLM, Ray's own way to serve a model, with the engine arguments that a replica of Modelyard would use.

Everything else is as it comes. It runs with the one vLLM release that ``ray[llm]`` pins, or one with the same modules.
"""

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from ray.serve import Application

from serve_app.config import ModelArgs

IMPORT_PATH = "loadtest.overhead.serve_llm:app"
# Ray Serve LLM chooses it: its own workers on GPUs, vLLM's processes on CPUs.
EXECUTOR = "distributed_executor_backend"


def check(python: str = sys.executable) -> None:
    """ImportError: ``python`` cannot import it, and what to do. In a process of its own, since it brings vLLM along."""
    done = subprocess.run([python, "-c", "import ray.serve.llm"], capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ImportError(
            f"Ray Serve LLM cannot be imported: {last}; pip install 'ray[serve,llm]' with the packages of this "
            "environment in one of its own, and name its Python: --peer ray-serve-llm=/path/to/bin/python"
        )


def llm_config(model: ModelArgs, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Ray's ``LLMConfig`` for one replica. ``arguments``: ``AsyncEngineArgs``' keywords."""
    own = {"model", "served_model_name", EXECUTOR}
    return {
        "model_loading_config": {"model_id": name, "model_source": arguments["model"]},
        "engine_kwargs": {key: value for key, value in arguments.items() if key not in own} | model.frontend,
        "accelerator_config": {"kind": "gpu" if model.resources.num_gpus else "cpu"},
        "deployment_config": {"autoscaling_config": {"min_replicas": 1, "max_replicas": 1}},
        "runtime_env": {"env_vars": dict(model.env)},
    }


def app(args: dict[str, Any]) -> Application:
    """``args``: see ``llm_config``."""
    from ray.serve.llm import build_openai_app

    application: Application = build_openai_app({"llm_configs": [args]})
    return application
