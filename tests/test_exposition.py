"""A gateway's own ``/metrics``: what Prometheus reads there, and who may."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from serve_app import keys, signals
from serve_app.catalog import State
from serve_app.config import GatewaySettings
from tests.inprocess import Yard, model, yard
from tests.prometheus import copied, found, needs_prometheus, prometheus, shipped

CHAT = "/v1/chat/completions"
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def ask(**more: Any) -> dict[str, Any]:
    return {"model": "chat", "messages": [{"role": "user", "content": "a b"}], "max_tokens": 3, **more}


async def samples(y: Yard) -> Samples:
    answer = await y.client.get("/metrics")
    assert answer.status_code == 200
    families = text_string_to_metric_families(answer.text)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def at(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset({"gateway": "one", **labels}.items())


async def test_it_says_what_rays_metrics_are_told() -> None:
    """After answers, streams and a refusal: every series, under Ray's name, with our labels and the gateway's."""
    async with yard(model("chat")) as y:
        for more in ({}, {"stream": True}, {"model": "nobody"}):
            await y.client.post(CHAT, json=ask(**more))
        await y.quiet()
        found = await samples(y)
        for metric in signals.OF_GATEWAYS:
            for (_, *labels), value in _told(y, metric):
                end = "_count" if metric.kind == "histogram" else ""
                named = dict(zip(metric.labels, labels, strict=True))
                assert found[at(f"ray_{metric.name}{end}", **named)] == value
        assert found[at("ray_modelyard_requests_total", model="chat", route=CHAT, status="2xx", reason="ok")] == 2
        assert not any(name.endswith("_created") for name, _ in found)
        assert "nobody" not in str(found)


def _told(y: Yard, metric: signals.Metric) -> list[tuple[tuple[str, ...], float]]:
    told: dict[tuple[str, ...], float] = {**y.noted.counters, **y.noted.gauges}
    told |= {series: len(values) for series, values in y.noted.observed.items()}
    return [(series, value) for series, value in told.items() if series[0] == metric.name]


async def test_it_says_how_the_models_are() -> None:
    """In the moment of the scrape: replicas that answer, and one state of each model."""
    two, broken = model("chat", replicas=2), model("broken", replicas=0)
    broken.state = State.FAILED
    async with yard(two, broken) as y:
        found = await samples(y)
        assert found[at("ray_modelyard_replicas", model="chat")] == 2
        assert found[at("ray_modelyard_replicas", model="broken")] == 0
        states = {series for series, value in found.items() if series[0] == "ray_modelyard_model_state" and value}
        assert states == {
            at("ray_modelyard_model_state", model="chat", state="ready"),
            at("ray_modelyard_model_state", model="broken", state="failed"),
        }
        two.replicas[0].alive = False
        assert (await samples(y))[at("ray_modelyard_replicas", model="chat")] == 1


async def test_it_needs_a_key_of_its_own(tmp_path: Path) -> None:
    """Where keys are on: 401 without one, 403 with one that may not, though it may use every model; and one that may
    read metrics alone uses no model."""
    secrets, entries = zip(*(keys.make(name) for name in ("team", "prometheus")), strict=True)
    file = tmp_path / "keys.yaml"
    file.write_text(yaml.safe_dump({"keys": [entries[0], entries[1] | {"metrics": True, "models": []}]}))
    team, prometheus = ({"authorization": f"Bearer {secret}"} for secret in secrets)
    async with yard(model("chat")) as y:
        y.relay.settings = GatewaySettings(keys_file=str(file))
        assert (await y.client.get("/metrics")).status_code == 401
        refused = await y.client.get("/metrics", headers=team)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
        assert (await y.client.get("/metrics", headers=prometheus)).status_code == 200
        assert (await y.client.post(CHAT, json=ask(), headers=team)).status_code == 200
        assert (await y.client.post(CHAT, json=ask(), headers=prometheus)).status_code == 403


@needs_prometheus
async def test_a_prometheus_reads_it(tmp_path: Path) -> None:
    """As ``deployments/prometheus/gateway.yml`` says, but for the port, with its key in the file that it names."""
    secret, entry = keys.make("prometheus")
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump({"keys": [entry | {"metrics": True, "models": []}]}))
    config = shipped("gateway.yml")
    (job,) = config["scrape_configs"]
    async with yard(model("chat")) as y:
        y.relay.settings = GatewaySettings(keys_file=str(tmp_path / "keys.yaml"))
        job["static_configs"] = [{"targets": [f"127.0.0.1:{y.port}"]}]

        def replicas() -> Any:
            """Prometheus tells new targets to its scrapers every five seconds."""
            with prometheus(copied(tmp_path, secret), config) as asked:
                for _ in range(300):
                    if series := found(asked, 'ray_modelyard_replicas{model="chat"}'):
                        return series[0]["value"][1]
                    time.sleep(0.1)

        assert await asyncio.to_thread(replicas) == "1"


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", "text/plain; version=0.0.4"),
        ("application/openmetrics-text; version=1.0.0", "application/openmetrics-text; version=1.0.0"),
    ],
)
async def test_it_speaks_the_format_that_is_asked_for(accept: str, content_type: str) -> None:
    """Prometheus' text without a wish, OpenMetrics where it is preferred."""
    async with yard(model("chat")) as y:
        answer = await y.client.get("/metrics", headers={"accept": accept})
        assert answer.headers["content-type"].startswith(content_type)
