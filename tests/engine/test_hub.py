"""A model from a hub, or from what stands in for one: here a mirror on this machine, with the real model's files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_app import demo_model
from tests.engine.ask import CHAT, capital
from tests.engine.conftest import START_S, chat_app
from tests.hub import REPO, Mirror, running_mirror
from tests.serve.cluster import Cluster, eventually

pytestmark = pytest.mark.engine


@pytest.fixture
def mirror() -> Iterator[Mirror]:
    with running_mirror() as running:
        running.has_model(demo_model.path())
        yield running


def hub_app(name: str, hub: str, **env: str) -> dict[str, Any]:
    app = chat_app() | {"name": name, "deployments": []}
    app["args"] |= {"source": {"hub": hub}}
    app["args"]["env"] |= {"NO_PROXY": "*", "HF_HUB_OFFLINE": "0"} | env
    return app


def test_a_mirrors_model_is_downloaded_and_answers(engines: Cluster, mirror: Mirror, tmp_path: Path) -> None:
    """``/ready`` says how far the download is. Then the hub's cache is enough: with the network forbidden the next
    replica starts, and answers the same."""
    mirror.pause_s = 0.5
    cache = {"HF_HOME": str(tmp_path / "hf")}
    engines.deploy(hub_app("mirrored", REPO, HF_ENDPOINT=mirror.endpoint, **cache), wait=False)

    def progress() -> Any:
        model = engines.ready()["models"].get("mirrored", {"state": "", "reason": ""})
        assert model["state"] != "ready", "the download did not show"
        return "downloading: 0." in model["reason"] and " of 0.3 GB" in model["reason"]

    eventually("the progress shows", progress, START_S)
    engines.wait_state("mirrored", "ready", START_S)
    first = engines.client.post(CHAT, json=capital(model="mirrored")).json()["choices"][0]["message"]
    assert "Paris" in first["content"]
    asked, before = len(mirror.asked), engines.pids("mirrored")
    engines.deploy(hub_app("mirrored", REPO, **cache | {"HF_HUB_OFFLINE": "1"}), wait=False)
    eventually("another replica runs alone", lambda: not {*before} & {*engines.pids("mirrored")}, START_S)
    engines.wait_state("mirrored", "ready", START_S)
    assert engines.client.post(CHAT, json=capital(model="mirrored")).json()["choices"][0]["message"] == first
    assert len(mirror.asked) == asked
    engines.remove("mirrored")


def test_a_model_that_the_hub_refuses_says_why(engines: Cluster, mirror: Mirror, tmp_path: Path) -> None:
    """In one line, where a person looks: private or missing, and what to do."""
    app = hub_app("refused", "nobody/nothing", HF_ENDPOINT=mirror.endpoint, HF_HOME=str(tmp_path / "hf"))
    mirror.answers["/nobody/nothing/resolve/main/config.json"] = (401, {"x-error-code": "RepoNotFound"}, b"")
    engines.deploy(app, wait=False)
    reason = engines.wait_state("refused", "failed", START_S)["reason"]
    hint = "correct source.hub; set HF_TOKEN if it is private"
    assert reason == f"nobody/nothing is not at {mirror.endpoint}: {hint}"
    engines.remove("refused")
