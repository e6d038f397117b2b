"""A real Prometheus, configured by the files under deployments/, finds what the dashboard asks for."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from loadtest import dashboard
from loadtest.clusters import free_ports
from serve_app.local_cluster import HOST
from serve_app.ray_api import token
from tests.serve.cluster import GATEWAY, Cluster, eventually, fake_app

pytestmark = [
    pytest.mark.serve,
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="Prometheus is not installed (Debian: apt-get install prometheus)"
    ),
]
DEPLOYED = Path(__file__).resolve().parents[2] / "deployments" / "prometheus"
CHAT = "/v1/chat/completions"
LIMITS = {"grace_s": 1.0}


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
            kind(f"ray_vllm_{name}", name, labels, registry=registry).labels("seen", "a")
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


@contextmanager
def prometheus(folder: Path, cluster: Cluster, more: str) -> Iterator[httpx.Client]:
    """As ``prometheus.yml`` says, but for addresses, scraping faster, with ``more`` as one more target."""
    shutil.copytree(DEPLOYED, folder, dirs_exist_ok=True)
    config = yaml.safe_load((folder / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (discovery,) = config["scrape_configs"][0]["http_sd_configs"]
    path = discovery["url"].partition("8265")[2]
    discovery |= {"url": cluster.session.dashboard + path, "refresh_interval": "1s"}
    config["scrape_configs"].append({"job_name": "vllm", "static_configs": [{"targets": [more]}]})
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    (folder / "ray_token").write_text(token() or "")
    (port,) = free_ports(1)
    command = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(
            [*command, f"--web.listen-address={HOST}:{port}"], cwd=folder, stdout=log, stderr=log
        ) as process,
        httpx.Client(base_url=f"http://{HOST}:{port}", timeout=30, trust_env=False) as client,
    ):
        try:
            eventually("Prometheus is ready", lambda: process.poll() is None and _ready(client))
            yield client
        finally:
            process.kill()


def _ready(client: httpx.Client) -> bool:
    try:
        return client.get("/-/ready").is_success
    except httpx.TransportError:
        return False


def found(client: httpx.Client, expression: str) -> list[dict[str, Any]]:
    """The series with numbers in them."""
    answer = client.get("/api/v1/query", params={"query": expression}).raise_for_status().json()
    return [series for series in answer["data"]["result"] if series["value"][1] != "NaN"]


def ask(model: str, path: str = CHAT, **more: Any) -> dict[str, Any]:
    said = (
        {"input": "two words"} if path == "/v1/responses" else {"messages": [{"role": "user", "content": "two words"}]}
    )
    return {"model": model, "max_tokens": 6, **said, **more}


@pytest.fixture
def troubled(yard_cluster: Cluster) -> Iterator[Cluster]:
    """With a model whose replicas may die, one that sleeps, and a name that falls back."""
    alias = {"to": "gone", "fallback": ["seen"]}
    gateway = {"name": GATEWAY, "import_path": "serve_app.gateway:app", "route_prefix": "/"}
    named = {"deployments": [{"name": "Gateway", "user_config": {"names": {"alias": alias}}}]}
    sleeper = fake_app("sleeper", bounds=(0, 1), scaling={"idle_s": 600})
    yard_cluster.deploy(gateway | named, fake_app("seen", replicas=2, limits=LIMITS), sleeper)
    yield yard_cluster
    yard_cluster.deploy(gateway)
    yard_cluster.remove("seen", "sleeper")


def test_every_panel_has_data(troubled: Cluster, tmp_path: Path) -> None:
    """With Ray's targets as its dashboard lists them, after requests of every kind: each query of the dashboard finds
    numbers, and Prometheus has loaded the alerts. vLLM's metrics are a stand-in: the scripted engine has none."""
    client = troubled.client
    engines = EngineMetrics()
    try:
        with prometheus(tmp_path, troubled, engines.address) as asked:
            eventually("the fallback", lambda: client.post(CHAT, json=ask("alias")).is_success, 20)
            assert client.post(CHAT, json=ask("sleeper")).is_success
            # A stream that moves, and one of a route whose streams cannot.
            assert client.post(CHAT, json=ask("seen", stream=True, fake={"die": 3})).is_success
            for path, fault in ((CHAT, {"status": 500}), ("/v1/responses", {"die": 3})):
                client.post(path, json=ask("seen", path, stream=True, fake=fault))
            with client.stream("POST", CHAT, json=ask("seen", stream=True, fake={"hang": 2})) as answer:
                next(answer.iter_lines())
            missing = [
                (panel.title, query.filled())
                for panel in dashboard.panels(json.loads(dashboard.FILE.read_text()))
                for query in panel.queries
            ]

            def complete() -> bool:
                engines.move()
                assert client.post(CHAT, json=ask("seen", stream=True)).is_success
                missing[:] = [(title, query) for title, query in missing if not found(asked, query)]
                return not missing

            try:
                eventually("every query finds numbers", complete)
            except AssertionError:
                pytest.fail(f"nothing is found by {missing}; {(tmp_path / 'log').read_text()[-2000:]}")
            rules = asked.get("/api/v1/rules").json()["data"]["groups"]
            alerts = yaml.safe_load((DEPLOYED / "alerts.yml").read_text())["groups"]
            assert [len(group["rules"]) for group in rules] == [len(group["rules"]) for group in alerts]
            assert {rule["health"] for group in rules for rule in group["rules"]} == {"ok"}
    finally:
        engines.close()
