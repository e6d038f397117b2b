"""A real Prometheus, configured by the files under deployments/, finds what the dashboard asks for."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from loadtest import dashboard
from serve_app.config import GATEWAY_DEPLOYMENT, GATEWAY_IMPORT_PATH
from serve_app.ray_api import token
from tests.prometheus import HOST, copied, found, needs_prometheus, prometheus, shipped
from tests.serve.cluster import GATEWAY, Cluster, eventually, fake_app

pytestmark = pytest.mark.serve
CHAT = "/v1/chat/completions"


class EngineMetrics:
    """Stands in for vLLM's metrics, which the scripted engine has not: those that the dashboard asks for, under their
    names and labels in Ray's (held against vLLM in tests/test_vllm_contract.py), and moving."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        labels = ("model_name", "ReplicaId")
        kinds: dict[str, type[Gauge] | type[Counter]] = {
            "num_requests_waiting": Gauge,
            "kv_cache_usage_perc": Gauge,
            "prefix_cache_queries": Counter,
            "prefix_cache_hits": Counter,
        }
        self._series = [
            kind(f"ray_vllm_{name}", name, labels, registry=registry).labels("board", "a")
            for name, kind in kinds.items()
        ]
        self._server, self._thread = start_http_server(0, HOST, registry)
        self.address = f"{HOST}:{self._server.server_port}"

    def move(self) -> None:
        for series in self._series:
            series.inc(0.5)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def ask(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "two words"}], "max_tokens": 6, **more}


@pytest.fixture
def troubled(yard_cluster: Cluster) -> Iterator[Cluster]:
    """With a model whose replicas may die, one that sleeps, and a name that falls back."""
    alias = {"to": "gone", "fallback": ["board"]}
    gateway = {"name": GATEWAY, "import_path": GATEWAY_IMPORT_PATH, "route_prefix": "/"}
    named = {"deployments": [{"name": GATEWAY_DEPLOYMENT, "user_config": {"names": {"alias": alias}}}]}
    sleeper = fake_app("sleeper", bounds=(0, 1), scaling={"idle_s": 600})
    yard_cluster.deploy(gateway | named, fake_app("board", replicas=2), sleeper)
    yield yard_cluster
    yard_cluster.deploy(gateway)
    yard_cluster.remove("board", "sleeper")


@needs_prometheus
def test_every_panel_has_data(troubled: Cluster, tmp_path: Path) -> None:
    """With Ray's targets as its dashboard lists them, after requests of every kind: each query of the dashboard finds
    numbers, and Prometheus evaluates the alerts. vLLM's metrics are a stand-in: the scripted engine has none."""
    client = troubled.client
    config = shipped("prometheus.yml")
    (discovery,) = config["scrape_configs"][0]["http_sd_configs"]
    discovery["url"] = discovery["url"].replace("http://127.0.0.1:8265", troubled.session.dashboard)
    missing = [
        (panel.title, query.filled())
        for panel in dashboard.panels(json.loads(dashboard.FILE.read_text()))
        for query in panel.queries
    ]
    with closing(EngineMetrics()) as engines:
        config["scrape_configs"].append({"job_name": "vllm", "static_configs": [{"targets": [engines.address]}]})
        with prometheus(copied(tmp_path, token() or ""), config) as asked:
            eventually("the fallback", lambda: client.post(CHAT, json=ask("alias")).is_success, 20)
            troubled.wait_state("sleeper", "asleep")
            assert client.post(CHAT, json=ask("sleeper")).is_success
            assert client.post(CHAT, json=ask("nobody")).status_code == 404
            with client.stream("POST", CHAT, json=ask("board", stream=True, fake={"hang": 2})) as answer:
                next(answer.iter_lines())
            # A stream that moves, and one of several answers, which cannot.
            for answers in (1, 2):
                client.post(CHAT, json=ask("board", stream=True, n=answers, fake={"die": 3, "interval_s": 0.1}))

            def complete() -> bool:
                engines.move()
                assert client.post(CHAT, json=ask("board", stream=True)).is_success
                missing[:] = [(title, query) for title, query in missing if not found(asked, query)]
                return not missing

            try:
                eventually("every query finds numbers", complete)
            except AssertionError as error:
                raise AssertionError(f"{error}; nothing is found by {missing}") from None
            (loaded,) = asked.get("/api/v1/rules").json()["data"]["groups"]
            assert len(loaded["rules"]) == len(shipped("alerts.yml")["groups"][0]["rules"])
            assert {rule["health"] for rule in loaded["rules"]} == {"ok"}
