"""Fixtures of the tiers that need Ray: one cluster per mode and run, shared by every test."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import hypothesis
import pytest

# No test depends on the machine's speed, and none on chance: a commit passes or fails every time. `make fuzz` draws
# other examples, and many more, by its seed.
hypothesis.settings.register_profile("same-examples", deadline=None, derandomize=True)
hypothesis.settings.register_profile("many-examples", deadline=None, max_examples=2000)
hypothesis.settings.load_profile("same-examples")

if TYPE_CHECKING:
    from tests.serve.cluster import Cluster


@pytest.fixture(scope="session", params=["haproxy"])
def yard_cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Cluster]":
    """Ray Serve with the gateway, in HAProxy mode. Parametrised with "python-proxy": on Serve's own proxy, without
    anything that `modelyard env` sets."""
    # Imported here: the fast tier must not pay for Ray.
    from tests.serve.cluster import cluster

    with cluster(tmp_path_factory.mktemp("home"), haproxy=request.param == "haproxy") as running:
        yield running
