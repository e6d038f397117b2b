"""What is seen of requests on real Ray Serve: in Ray's metrics, through HAProxy and in Serve's own logs."""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from typing import Any

import pytest

from serve_app import signals
from serve_app.config import CARD_DEPLOYMENT, GATEWAY_DEPLOYMENT, GATEWAY_IMPORT_PATH, MODEL_DEPLOYMENT
from serve_app.gateway.access_line import FIELDS
from tests.serve.cluster import GATEWAY, Cluster, both_proxies, eventually, fake_app
from tests.serve.scrape import Sample, scraped_until, targets

pytestmark = pytest.mark.serve
CHAT = "/v1/chat/completions"
SEEN = fake_app("seen")
SERVES = "ray_serve_deployment_replica_healthy"
OURS = {f"ray_{metric.name}{end}": metric.labels for metric in signals.OF_GATEWAYS for end in ("", "_count")}


def ask(**more: Any) -> dict[str, Any]:
    return {"model": "seen", "messages": [{"role": "user", "content": "two words"}], "max_tokens": 3, **more}


def lines(cluster: Cluster) -> list[dict[str, Any]]:
    """The access log's, from the logs of every gateway so far."""
    found = []
    for line in cluster.log(GATEWAY, GATEWAY_DEPLOYMENT).splitlines():
        entry = json.loads(line)["message"] if line.startswith("{") else line.partition(" -- ")[2]
        if entry.startswith('{"at":'):
            found.append(json.loads(entry))
    return found


@both_proxies
def test_metrics_come_out_of_rays_own(yard_cluster: Cluster) -> None:
    """After an answer, two streams, one whose client left and a refusal: each count with its labels, where a Prometheus
    that asks Ray for targets finds it, and on the gateway's own ``/metrics``; the card's and
    Serve's counts of replicas are beside."""
    yard_cluster.deploy(SEEN)
    for stream in (False, True, True):
        assert yard_cluster.client.post(CHAT, json=ask(stream=stream)).status_code == 200
    with yard_cluster.client.stream("POST", CHAT, json=ask(stream=True, fake={"hang": 2})) as answer:
        next(answer.iter_lines())
    assert yard_cluster.client.post(CHAT, json=ask(model="nobody")).status_code == 404
    at = ("seen", CHAT)
    expected: dict[Sample, float] = {
        ("ray_modelyard_requests_total", *at, "2xx", "ok"): 3,
        ("ray_modelyard_requests_total", *at, "2xx", "client_left"): 1,
        ("ray_modelyard_aborts_total", *at, "streaming"): 1,
        ("ray_modelyard_tokens_total", *at, "prompt"): 8,
        ("ray_modelyard_tokens_total", *at, "generated"): 11,
        ("ray_modelyard_in_flight", *at): 0,
        ("ray_modelyard_queued", *at): 0,
        ("ray_modelyard_route_seconds_count", *at): 4,
        ("ray_modelyard_queue_seconds_count", *at): 4,
        ("ray_modelyard_engine_seconds_count", *at): 4,
        ("ray_modelyard_time_to_first_token_seconds_count", *at): 3,
        ("ray_modelyard_request_seconds_count", *at): 3,
        ("ray_modelyard_time_per_output_token_seconds_count", *at): 2,
    }

    refusal = ("ray_modelyard_requests_total", signals.OTHER, CHAT, "4xx", "model_not_found")
    for urls in ([yard_cluster.url], targets(yard_cluster)):
        found = scraped_until(expected, urls, OURS)
        assert {at: found.get(at) for at in expected} == expected
        assert found[refusal]
    beside = {SERVES: ("application", "deployment"), "ray_modelyard_engines": ("model",)}
    one: dict[Sample, float] = {(SERVES, "seen", MODEL_DEPLOYMENT): 1, ("ray_modelyard_engines", "seen"): 1}
    assert scraped_until(one, targets(yard_cluster), beside).items() >= one.items()


def test_rays_dashboard_knows_models_by_name(yard_cluster: Cluster) -> None:
    """Its list of actors and its Serve tab: what is the model's and what is the gateway's can be told apart."""
    yard_cluster.deploy(SEEN)
    actors = {actor["class_name"] for actor in yard_cluster.api.listed("actors") if actor["state"] == "ALIVE"}
    assert {"ServeReplica:seen:Model", "ServeReplica:seen:Card", "ServeReplica:gateway:Gateway"} <= actors
    assert {"gateway", "seen"} <= yard_cluster.details().keys()


@both_proxies
def test_the_client_and_the_log_are_told(yard_cluster: Cluster) -> None:
    """Server-Timing comes through the proxy; the gateway's log has one line per request, under the id that the client
    got, and none of Serve's beside it, nor any in the logs of the model."""
    yard_cluster.deploy(SEEN)
    for stream in (False, True):
        headers = {"x-request-id": f"seen-{stream}"}
        answer = yard_cluster.client.post(CHAT, json=ask(stream=stream), headers=headers)
        stages = dict(stage.strip().split(";dur=") for stage in answer.headers["server-timing"].split(","))
        assert stages.keys() == {"route", "queue", "upstream"}
        assert all(float(dur) >= 0 for dur in stages.values())
        assert answer.headers.get_list("x-request-id")[0] == f"seen-{stream}"
    yard_cluster.client.post(CHAT, json=ask(model="nobody"), headers={"x-request-id": "refused"})

    def told() -> list[dict[str, Any]]:
        return [line for line in lines(yard_cluster) if line["id"] in ("seen-False", "seen-True", "refused")]

    eventually("every request is told", lambda: len(told()) >= 3, 10)
    assert [(line["status"], line["outcome"], line["generated_tokens"]) for line in told()] == [
        (200, "ok", 3),
        (200, "ok", 3),
        (404, "refused", None),
    ]
    assert told()[0].keys() == set(FIELDS)
    assert told()[0]["replica"] in yard_cluster.pids("seen")
    assert "POST / 200" not in yard_cluster.log(GATEWAY, GATEWAY_DEPLOYMENT)
    assert not any("CALL" in yard_cluster.log("seen", deployment) for deployment in (MODEL_DEPLOYMENT, CARD_DEPLOYMENT))


def test_an_answer_has_one_id(yard_cluster: Cluster) -> None:
    """Ours, without Serve's beside it: of whole answers, streams, errors, and what is no request to a model."""
    yard_cluster.deploy(SEEN)

    def ids(**more: Any) -> list[str]:
        answer = yard_cluster.client.post(CHAT, json=ask(**more), headers={"x-request-id": "not clean"})
        return answer.headers.get_list("x-request-id")

    assert [ids(), ids(stream=True), ids(model="nobody")] == 3 * [["not-clean"]]
    assert len(yard_cluster.client.get("/v1/models").headers.get_list("x-request-id")) == 1


@pytest.fixture
def logged_as(yard_cluster: Cluster) -> Iterator[Callable[..., None]]:
    """``logged_as(**settings)`` deploys the gateway with these log settings of Serve's."""
    plain = {"name": GATEWAY, "import_path": GATEWAY_IMPORT_PATH, "route_prefix": "/"}

    def deploy(**settings: Any) -> None:
        yard_cluster.deploy(plain | ({"logging_config": settings} if settings else {}))

    yield deploy
    deploy()


def test_serves_log_settings_rule_the_access_log(yard_cluster: Cluster, logged_as: Callable[..., None]) -> None:
    """Those of the gateway's application, live: as JSON each line is the message, and without an access log there is
    none."""
    yard_cluster.deploy(SEEN)
    numbers = count()

    def told_of_one(line: Callable[[str], object]) -> Any:
        """Ask once: what ``line`` finds of it within 2 s, by its id."""
        name = f"one-{next(numbers)}"
        assert yard_cluster.client.post(CHAT, json=ask(), headers={"x-request-id": name}).status_code == 200
        with suppress(AssertionError):
            return eventually("it is told", lambda: line(name), 2)

    def in_json(name: str) -> bool:
        log = yard_cluster.log(GATEWAY, GATEWAY_DEPLOYMENT).splitlines()
        entries = [json.loads(entry) for entry in log if entry.startswith("{") and name in entry]
        return [json.loads(entry["message"])["id"] for entry in entries] == [name]

    def at_all(name: str) -> bool:
        return any(line["id"] == name for line in lines(yard_cluster))

    logged_as(encoding="JSON")
    eventually("lines in JSON", lambda: told_of_one(in_json))
    logged_as(enable_access_log=False)
    eventually("no lines", lambda: not told_of_one(at_all))
    logged_as()
    eventually("lines", lambda: told_of_one(at_all))


def test_what_the_status_page_shows_comes_from_gateways_and_engines(yard_cluster: Cluster) -> None:
    """The page through the proxy; and ``/ready``, with what the card heard of the engine, what this gateway has open
    and what failed."""
    yard_cluster.deploy(SEEN)
    page = yard_cluster.client.get("/status")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in page.headers["content-security-policy"]

    def told() -> dict[str, Any]:
        return dict(yard_cluster.client.get("/ready").json())

    def busy() -> bool:
        seen = told()["models"]["seen"]
        return seen["in_flight"] == 1 and seen["engines"] is not None and seen["engines"]["running"] == 1

    with yard_cluster.client.stream("POST", CHAT, json=ask(stream=True, fake={"hang": 2})) as answer:
        events = answer.iter_lines()  # kept: the answer is closed with it
        next(events)
        eventually("one request is in flight and in the engine", busy)
    yard_cluster.client.post(CHAT, json=ask(fake={"status": 400}), headers={"x-request-id": "refused"})
    newest = told()["failures"][0]
    assert (newest["id"], newest["model"], newest["status"], newest["reason"]) == ("refused", "seen", 400, "engine")
    assert told()["gateway"]
