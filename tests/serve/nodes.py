"""More Ray nodes on this machine: as many raylets as a test wants, each with the resources that it declares."""

import itertools
import json
import secrets
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from loadtest.clusters import free_ports, private_environment
from serve_app import local_cluster
from serve_app.local_cluster import Session
from tests.serve.cluster import Cluster, eventually

START_S = 120.0
STOP_S = 10.0
# The last number of each node's own loopback address. The head's is 1.
_NUMBERS = itertools.count(2)


@dataclass(frozen=True)
class Node:
    """``id``: Ray's. ``main``: what a container or systemd runs, ``ray start --block``; its signals are the node's.
    ``url``: the endpoint on this node, which answers while a replica runs there."""

    id: str
    main: psutil.Process
    url: str
    session: Session

    def raylet(self) -> psutil.Process:
        (found,) = (child for child in self.main.children() if child.name() == "raylet")
        return found

    def end(self) -> None:
        """Kill what is left of it."""
        _end(self.session, 0)


@contextmanager
def node(
    cluster: Cluster,
    *,
    num_cpus: int,
    num_gpus: int = 0,
    resources: Mapping[str, int] | None = None,
    labels: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[Node]:
    """One more node of ``cluster``, until the end of the block; nothing of it survives, and Ray knows that it is gone.
    Its GPUs are only said to be there. ``env``: for Ray's processes on it."""
    metrics, stats, fallback, http = free_ports(4)
    with tempfile.TemporaryDirectory(prefix="modelyard-", dir="/tmp") as folder:
        # A mark of its own, so that its processes can be told from the cluster's.
        session = replace(cluster.session, id=secrets.token_hex(16), folder=folder, session_dir="")
        environment = private_environment(
            session, plain=not cluster.haproxy, metrics=metrics, stats=stats, fallback=fallback
        )
        # The cluster's own setting is Ray's switch for "one machine only".
        environment |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1", "RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(http)}
        # Not 127.0.0.1 for the cluster's address, nor for the node's: Ray would replace it by one of the network's.
        command = [str(Path(sysconfig.get_path("scripts")) / "ray"), "start", "--block", "--disable-usage-stats"]
        command += [f"--address=0.0.0.0:{cluster.gcs_port}", f"--node-ip-address=127.0.0.{next(_NUMBERS)}"]
        command += [f"--num-cpus={num_cpus}", f"--num-gpus={num_gpus}", f"--resources={json.dumps(resources or {})}"]
        command += ["--object-store-memory=100000000"]  # bytes; the default is a third of the machine's
        command += [f"--labels={','.join(f'{key}={value}' for key, value in (labels or {}).items())}"]
        before = cluster.nodes()
        try:
            with (Path(folder) / "ray-start.log").open("w") as log:
                main = psutil.Popen(
                    command, env=environment | dict(env or {}), stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )

                def joined() -> set[str]:
                    assert main.poll() is None, Path(log.name).read_text()
                    return cluster.nodes() - before

                (name,) = eventually("the node has joined", joined, START_S)
                yield Node(name, main, f"http://127.0.0.1:{http}", session)
        finally:
            print(Path(log.name).read_text())
            _end(session, STOP_S)
            # Ray takes some 15 s to find out that a node was killed. What is deployed meanwhile may be sent there.
            eventually("Ray knows that the node is gone", lambda: cluster.nodes() <= before)


def _end(session: Session, term_grace_s: float) -> None:
    local_cluster.end_processes(lambda: local_cluster.processes(session), term_grace_s)
    assert local_cluster.processes(session) == [], "processes survived the end of a node"
