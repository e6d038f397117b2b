"""Files of Ray's cluster launcher. Ray itself is not started."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from serve_app import ray_env

ROOT = Path(__file__).resolve().parent.parent
CLUSTERS = (ROOT / "cluster.yaml", *sorted((ROOT / "deployments").glob("cluster-*.yaml")))
each_cluster = pytest.mark.parametrize("file", CLUSTERS, ids=lambda file: file.name)
START_COMMANDS = ("head_start_ray_commands", "worker_start_ray_commands")


def cluster(file: Path) -> dict[str, Any]:
    found = yaml.safe_load(file.read_text())
    assert isinstance(found, dict)
    return found


@each_cluster
def test_a_cluster_file_is_what_the_launcher_accepts(file: Path) -> None:
    """Ray's own preparation and schema take it, and refuse it with a misspelt key."""
    validate_config(prepare_config(cluster(file)))
    with pytest.raises(jsonschema.ValidationError):
        validate_config(prepare_config(cluster(file) | {"worker_start_ray_comands": []}))


@each_cluster
def test_nodes_get_what_an_installation_needs(file: Path) -> None:
    """Each file that is sent to the nodes is in the repository, or Ray's token; Ray puts no command of its own between,
    which would start it without our environment."""
    sent = dict(cluster(file)["file_mounts"])
    assert sent.pop("~/.ray/auth_token") == "~/.ray/auth_token"
    assert all((ROOT / local).exists() for local in sent.values())
    prepared = prepare_config(cluster(file))
    for commands in START_COMMANDS:
        assert prepared[commands] == cluster(file)[commands]


@pytest.mark.parametrize("commands", START_COMMANDS)
@each_cluster
def test_ray_starts_with_the_environment(file: Path, commands: str, tmp_path: Path) -> None:
    """Run as the launcher runs them, one shell per line, the lines start Ray once, with all that `modelyard env` says;
    the head waits for others, and they join it."""
    programs = tmp_path / "modelyard" / ".venv-gpu" / "bin"
    programs.mkdir(parents=True)
    (programs / "activate").write_text(f"PATH={programs}:$PATH\n")
    scripts = {
        "ray": f'echo "$@" >> {tmp_path}/asked; [ "$1" != start ] || env > {tmp_path}/environment',
        "pkill": "exit 1",  # none was there
        "modelyard": f'exec {sys.executable} -m serve_app.cli "$@"',
    }
    for name, script in scripts.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    shell = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "RAY_HEAD_IP": "10.0.0.10"}
    for line in cluster(file)[commands]:
        subprocess.run(["bash", "-c", line], env=shell, check=True, timeout=60)
    stopped, started = (tmp_path / "asked").read_text().splitlines()
    assert stopped == "stop"
    assert started.startswith("start --head " if commands.startswith("head") else "start --address=10.0.0.10:6379")
    environment = (tmp_path / "environment").read_text().splitlines()
    for setting in (*ray_env.SETTINGS, *ray_env.COMMANDS):
        assert f"{setting.name}={setting.value}" in environment
