"""A real Ray with Serve for tests: started, asked and ended through the same code as ``modelyard serve`` uses."""

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from loadtest.clusters import free_ports, private_environment
from serve_app import local_cluster
from serve_app.config import (
    CARD_DEPLOYMENT,
    GATEWAY_DEPLOYMENT,
    GATEWAY_IMPORT_PATH,
    MODEL_DEPLOYMENT,
    MODEL_IMPORT_PATH,
    QUEUE_DEPTH,
)
from serve_app.local_cluster import Session
from serve_app.ray_api import RayApi

# For tests in which the proxy has a part: connections that stay, break, or leave.
both_proxies = pytest.mark.parametrize("yard_cluster", ["haproxy", "python-proxy"], indirect=True)

PATIENCE_S = 90.0
GATEWAY = "gateway"
PROBE = "probe"
PREFIX = "/probe"


def eventually(what: str, true: Callable[[], Any], within_s: float = PATIENCE_S) -> Any:
    """Wait for ``true`` to return something; fail with ``what`` after ``within_s`` seconds."""
    deadline = time.monotonic() + within_s
    while not (value := true()):
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(0.1)
    return value


def fake_app(
    name: str,
    *,
    replicas: int | None = 1,
    also_known_as: tuple[str, ...] = (),
    limits: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    overcommit: int = 8,
    bounds: tuple[int, int] | None = None,
    scaling: dict[str, Any] | None = None,
    **script: Any,
) -> dict[str, Any]:
    """A model application on the scripted engine. ``bounds``: it scales between so many replicas."""
    card: dict[str, Any] = {"also_known_as": list(also_known_as)} | ({"limits": limits} if limits else {})
    card |= {"scaling": scaling} if scaling else {}
    model: dict[str, Any] = {"name": MODEL_DEPLOYMENT, "graceful_shutdown_timeout_s": 2}
    if bounds:
        policy = {"policy_function": QUEUE_DEPTH}
        # Short, so that the pending call that woke a model is soon forgotten: these models sleep after seconds.
        window = {"metrics_interval_s": 0.5, "look_back_period_s": 1.0}
        model["autoscaling_config"] = {"min_replicas": bounds[0], "max_replicas": bounds[1], "policy": policy, **window}
    else:
        model["num_replicas"] = replicas
    args: dict[str, Any] = {"source": {"fake": script}, "resources": {"num_gpus": 0, "num_cpus": 0.01}}
    args |= {"overcommit": overcommit} | ({"engine": engine} if engine else {})
    return {
        "name": name,
        "import_path": MODEL_IMPORT_PATH,
        "route_prefix": None,
        "args": args,
        "deployments": [model, {"name": CARD_DEPLOYMENT, "user_config": card}],
    }


class Cluster:
    """One Ray head with the gateway on it. ``haproxy``: whether Serve runs in HAProxy mode."""

    def __init__(self, session: Session, http_port: int, haproxy: bool) -> None:
        self.session = session
        self.haproxy = haproxy
        self.http_port = http_port
        self.gcs_port = session.ports[1]
        self.url = f"http://127.0.0.1:{http_port}"
        self.api = RayApi(session.dashboard)
        self.client = httpx.Client(base_url=self.url, timeout=60, trust_env=False)
        self._apps: dict[str, dict[str, Any]] = {}

    def deploy(self, *apps: dict[str, Any], wait: bool = True) -> None:
        """Add or replace applications, as ``serve deploy`` of the longer file would."""
        self._apps |= {app["name"]: app for app in apps}
        self._put()
        if wait:
            for app in apps:
                self.wait_running(app["name"])

    def remove(self, *names: str) -> None:
        for name in names:
            self._apps.pop(name, None)
        self._put()

    def _put(self) -> None:
        http = {"host": "127.0.0.1", "port": self.http_port}
        config = {"proxy_location": "EveryNode", "http_options": http, "applications": list(self._apps.values())}
        self.api.deploy(config)

    def wait_running(self, name: str) -> None:
        try:
            eventually(f"{name} runs", lambda: (a := self.api.state().application(name)) and a.status == "RUNNING")
        except AssertionError as error:
            raise AssertionError(f"{error}; last seen {self.details().get(name)}") from None
        if name not in (GATEWAY, PROBE):
            eventually(f"the gateway lists {name}", lambda: name in self.ready()["models"], 20)

    def ready(self) -> dict[str, Any]:
        answer = self.client.get("/ready")
        return dict(answer.json()) if answer.is_success else {"models": {}}

    def wait_state(self, name: str, state: str, within_s: float = PATIENCE_S) -> dict[str, Any]:
        def entry() -> dict[str, Any] | None:
            found: dict[str, Any] | None = self.ready()["models"].get(name)
            return found if found and found["state"] == state else None

        found: dict[str, Any] = eventually(f"{name} is {state}", entry, within_s)
        return found

    def details(self) -> dict[str, Any]:
        """Ray's own picture of all applications, replicas and their processes."""
        return dict(self.api._checked("GET", "/api/serve/applications/").json()["applications"])

    def pids(self, app: str, deployment: str = MODEL_DEPLOYMENT) -> dict[str, int]:
        """Process id by replica id of the running replicas."""
        # While Serve builds an application anew it lists no deployments, though they run on.
        replicas = self.details()[app]["deployments"].get(deployment, {"replicas": []})["replicas"]
        return {r["replica_id"]: r["pid"] for r in replicas if r["state"] == "RUNNING"}

    def nodes(self) -> set[str]:
        """Ray's ids of the nodes that live."""
        listed = self.api._checked("GET", "/api/v0/nodes").json()["data"]["result"]["result"]
        return {node["node_id"] for node in listed if node["state"] == "ALIVE"}

    def gateway_pids(self) -> dict[str, int]:
        return self.pids(GATEWAY, GATEWAY_DEPLOYMENT)

    def reports(self, app: str, deployment: str = MODEL_DEPLOYMENT) -> list[dict[str, Any]]:
        """``report`` of every running replica."""
        wanted = len(self.pids(app, deployment))
        found: dict[str, dict[str, Any]] = {}

        def all_answered() -> bool:
            answer = self.client.get(f"{PREFIX}/{app}/report/{deployment}", timeout=10)
            if answer.is_success:
                found[answer.json()["replica"]] = answer.json()
            return len(found) >= wanted

        eventually(f"every replica of {app} reports", all_answered)
        return list(found.values())

    def held_by_gateways(self, app: str) -> int:
        """Leases, waiting requests and tasks of all gateways for ``app``."""
        reports = self.reports(GATEWAY, GATEWAY_DEPLOYMENT)
        return sum(sum(report["models"].get(app, {}).values()) for report in reports)

    def wait_quiet(self, app: str, within_s: float = 10.0) -> list[dict[str, Any]]:
        """Until no lease is held and nothing runs on any replica of ``app`` and for it in any gateway; the last reports
        of the replicas."""
        reports: list[dict[str, Any]] = []
        held = 0

        def quiet() -> bool:
            nonlocal held
            reports[:] = self.reports(app)
            if any(r["leases"] or r["busy"] or r["engine"]["running"] for r in reports):
                return False
            held = self.held_by_gateways(app)
            return not held

        try:
            eventually(f"{app} is quiet", quiet, within_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; last seen {reports}, {held} held in gateways") from None
        return reports

    def log(self, app: str, deployment: str) -> str:
        folder = Path(self.session.session_dir) / "logs" / "serve"
        return "".join(p.read_text() for p in sorted(folder.glob(f"replica_{app}_{deployment}_*.log")))

    async def leave_after(self, seconds: float, body: dict[str, Any], path: str = "/v1/chat/completions") -> None:
        """A client that closes its connection after ``seconds``, before its answer is complete."""
        # Not to verify saves the loading of certificates, which takes longer than some of these requests.
        async with httpx.AsyncClient(base_url=self.url, timeout=60, trust_env=False, verify=False) as client:
            try:
                async with asyncio.timeout(seconds):
                    await client.post(path, json=body)
            except TimeoutError:
                return
        raise AssertionError("the answer was complete before the client left")


@contextmanager
def cluster(home: Path, *, haproxy: bool) -> Iterator[Cluster]:
    """Start Ray with the gateway, connect this process to it, and end all of it afterwards."""
    http, gcs, dashboard, metrics, stats, fallback = free_ports(6)
    changed = {
        "MODELYARD_HOME": str(home),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
        "RAY_AUTH_MODE": "token",
    }
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    session = local_cluster.new_session(gcs, dashboard, (http, gcs, dashboard))
    try:
        env = private_environment(session, plain=not haproxy, metrics=metrics, stats=stats, fallback=fallback)
        session = local_cluster.start(session, gcs, dashboard, env)
        running = Cluster(session, http, haproxy)
        running.deploy(
            {"name": GATEWAY, "import_path": GATEWAY_IMPORT_PATH, "route_prefix": "/"},
            {"name": PROBE, "import_path": "tests.serve.probe:app", "route_prefix": PREFIX},
        )
        eventually("the gateway answers", lambda: _answers(running))
        yield running
    finally:
        ended = local_cluster.end(session)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value
        assert ended.left == (), "processes survived the end of the cluster"


def _answers(running: Cluster) -> bool:
    try:
        return running.client.get("/ready").status_code == 200
    except httpx.TransportError:
        return False


def children(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


@contextmanager
def two_gateways(cluster: Cluster, **more: Any) -> Iterator[None]:
    """``more``: Serve's options for them."""
    plain = {"name": GATEWAY, "import_path": GATEWAY_IMPORT_PATH, "route_prefix": "/"}
    # They ask for a whole CPU each, and here are two in all. The override takes the place of the deployment's options.
    options = {"num_cpus": 0.1, "runtime_env": {"env_vars": {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}}}
    deployment = {"name": GATEWAY_DEPLOYMENT, "num_replicas": 2, "ray_actor_options": options} | more
    cluster.deploy(plain | {"deployments": [deployment]})
    eventually("two gateways", lambda: len(cluster.gateway_pids()) == 2)
    try:
        yield
    finally:
        cluster.deploy(plain)
        eventually("one gateway", lambda: len(cluster.gateway_pids()) == 1)
