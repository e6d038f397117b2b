"""A real Prometheus for tests, with the configurations and alerts of deployments/prometheus."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from loadtest.clusters import free_ports

FOLDER = Path(__file__).resolve().parents[1] / "deployments" / "prometheus"
HOST = "127.0.0.1"
PATIENCE_S = 60.0
# Not shipped: the configurations name them.
SECRETS = ("ray_token", "gateway_key")

_NOT_THERE = "is not installed (Debian: apt-get install prometheus)"
needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason=f"Prometheus {_NOT_THERE}")
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason=f"promtool {_NOT_THERE}")


def shipped(name: str) -> dict[str, Any]:
    """One of its files, read."""
    return dict(yaml.safe_load((FOLDER / name).read_text()))


def copied(to: Path, secret: str) -> Path:
    """A copy of the folder, with ``secret`` where it wants one."""
    folder = shutil.copytree(FOLDER, to / "prometheus")
    for name in SECRETS:
        (folder / name).write_text(secret)
    return folder


@contextmanager
def prometheus(folder: Path, config: dict[str, Any]) -> Iterator[httpx.Client]:
    """In a ``copied`` folder, with a ``shipped`` configuration, changed; it scrapes more often."""
    config["global"] = {"scrape_interval": "5s", "evaluation_interval": "5s"}
    (folder / "test.yml").write_text(yaml.safe_dump(config))
    (port,) = free_ports(1)
    address = f"{HOST}:{port}"
    command = ["prometheus", "--config.file=test.yml", "--storage.tsdb.path=data", f"--web.listen-address={address}"]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(command, cwd=folder, stdout=log, stderr=log) as process,
        httpx.Client(base_url=f"http://{address}", timeout=30, trust_env=False) as client,
    ):
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not _ready(client):
                if process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"Prometheus does not run: {(folder / 'log').read_text()}")
                time.sleep(0.1)
            yield client
        finally:
            process.kill()


def _ready(client: httpx.Client) -> bool:
    try:
        return client.get("/-/ready").is_success
    except httpx.TransportError:
        return False


def found(client: httpx.Client, expression: str) -> list[dict[str, Any]]:
    """The series with numbers in them, now."""
    answer = client.get("/api/v1/query", params={"query": expression}).raise_for_status().json()
    return [series for series in answer["data"]["result"] if series["value"][1] != "NaN"]
