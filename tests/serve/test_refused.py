"""`modelyard serve` on a machine that can never hold the file: refused before anything is deployed, nothing left."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.clusters import free_ports
from tests.serve.cluster import fake_app

pytestmark = pytest.mark.serve


def test_tensor_parallel_two_on_a_machine_without_gpus(tmp_path: Path) -> None:
    """Exit 1 with what is needed and what there is; the Ray that was started for it is stopped again."""
    http, gcs, dashboard, metrics, stats, fallback = free_ports(6)
    app = fake_app("tp2")
    app["args"] |= {"tensor_parallel_size": 2, "resources": {"num_cpus": 0.01}}
    gateway = {"name": "gateway", "import_path": "serve_app.gateway:app", "route_prefix": "/"}
    file = tmp_path / "fleet.yaml"
    file.write_text(json.dumps({"http_options": {"port": http}, "applications": [gateway, app]}))
    env = {**os.environ, "MODELYARD_HOME": str(tmp_path / "home"), "RAY_AUTH_MODE": "token", "CUDA_VISIBLE_DEVICES": ""}
    env |= {
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback),
    }
    env.pop("RAY_DASHBOARD_ADDRESS", None)
    command = [sys.executable, "-m", "serve_app.cli", "serve", str(file)]
    command += ["--ray-port", str(gcs), "--dashboard-port", str(dashboard)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=170)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "nothing was deployed: there is no room for all of it." in done.stderr
    assert "tp2: 0 of 1 replicas fit. It needs 2 GPUs of one node; the cluster has no GPU." in done.stderr
    assert "none left" in done.stdout
    assert not (tmp_path / "home" / "run" / "ray.json").exists()
