"""Fixtures of the tiers that need Ray: one cluster per mode and run, shared by every test."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

# Ray reads this when it is imported: a driver that is told 127.0.0.1 would otherwise go to the host's other address,
# where a cluster of this machine alone does not listen.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
# Likewise read once: the clusters of the tests ask for Ray's token, as clusters do by default.
os.environ.setdefault("RAY_AUTH_MODE", "token")

if TYPE_CHECKING:
    from tests.serve.cluster import Cluster


@pytest.fixture(scope="session", params=["haproxy", "python-proxy"])
def yard_cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Cluster]":
    """Ray Serve with the gateway, in HAProxy mode and on Serve's own proxy (without process-group cleanup)."""
    # Imported here: the fast tier must not pay for Ray.
    from tests.serve.cluster import cluster

    with cluster(tmp_path_factory.mktemp("home"), haproxy=request.param == "haproxy") as running:
        yield running
