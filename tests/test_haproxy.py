"""modelyard-haproxy: Ray's HAProxy as Serve starts it, where few files may be opened."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from loadtest.clusters import free_ports
from serve_app import haproxy, open_files
from tests.serve.cluster import eventually

CONFIG = """
global
    maxconn {most}
defaults
    mode http
    option splice-request
    timeout connect 5s
    timeout client 5s
    timeout server 5s
frontend front
    bind 127.0.0.1:{port}
    http-request return status 200
"""
FILES = 2000


@contextmanager
def started(command: list[str], folder: Path, most: int) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """HAProxy with a configuration that wants ``most`` connections, and its port; it may open ``FILES`` files. What it
    says is in ``folder``."""
    (port,) = free_ports(1)
    config = folder / "haproxy.cfg"
    config.write_text(CONFIG.format(most=most, port=port))
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen(
            [*command, "-db", "-f", str(config)],
            env=os.environ | {haproxy.MAXCONN: str(most)},
            stderr=said,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FILES // 2, FILES)),
        )
    try:
        yield process, port
    finally:
        process.kill()
        process.wait()


def test_haproxy_alone_does_not_start(tmp_path: Path) -> None:
    """Why the program lowers the number at all."""
    with started([haproxy.bundled()], tmp_path, 5000) as (process, _):
        assert process.wait(20) == 1
    assert "FD limit" in (tmp_path / "said").read_text()


@pytest.mark.parametrize("most", [5000, 200])
def test_it_takes_as_many_connections_as_it_may(tmp_path: Path, most: int) -> None:
    """It starts and answers either way; fewer than asked for are said in a line with what to do."""
    with started([sys.executable, "-c", "from serve_app.haproxy import main; main()"], tmp_path, most) as (
        process,
        port,
    ):

        def answers() -> bool:
            try:
                return httpx.get(f"http://127.0.0.1:{port}/", trust_env=False).status_code == 200
            except httpx.TransportError:
                assert process.poll() is None, (tmp_path / "said").read_text()
                return False

        eventually("it answers", answers)
    said = (tmp_path / "said").read_text()
    assert ("takes 600 connections at once" in said) is (most == 5000), said
    assert (open_files.REMEDY in said) is (most == 5000)
