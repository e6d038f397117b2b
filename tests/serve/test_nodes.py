"""A node that leaves: what its clients notice. More than one node on one machine: see ``nodes``."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import httpx
import psutil
import pytest

from serve_app.config import GATEWAY_DEPLOYMENT, MODEL_DEPLOYMENT
from tests.serve.cluster import GATEWAY, Cluster, eventually, fake_app
from tests.serve.nodes import Node, node
from tests.serve.test_gateways import two_gateways
from tests.serve.test_moving import CHAT, Maker, Reader, asked, assert_whole, fingerprints, start_reading

pytestmark = pytest.mark.serve
GRACE_S = 8.0
INTERVAL_S = 0.05
LONG, SHORT = 400, 60  # tokens: far longer than the grace, and well within it
ASKERS = 4
# How soon callers know what Serve's controller has decided.
TOLD_S = 2.0


@contextmanager
def one_replica_per_node(cluster: Cluster) -> Iterator[tuple[Node, int]]:
    """The model ``spread`` with a replica on the head and one on another node; that node, and its replica's process."""
    app = fake_app("spread", replicas=2, token_interval_s=INTERVAL_S, limits={"grace_s": GRACE_S})
    # 60 s are the product's own.
    app["deployments"][0] |= {"max_replicas_per_node": 1, "graceful_shutdown_timeout_s": 60}
    with node(cluster, num_cpus=1) as other:
        cluster.deploy(app)
        eventually("two replicas", lambda: len(cluster.pids("spread")) == 2)
        (pid,) = (replica["pid"] for replica in replicas(cluster) if replica.get("node_id") == other.id)
        yield other, pid
    cluster.remove("spread")


def replicas(cluster: Cluster) -> list[dict[str, Any]]:
    return list(cluster.details()["spread"]["deployments"][MODEL_DEPLOYMENT]["replicas"])


def streams_of(cluster: Cluster, replica: int, tokens: int, url: str = "") -> list[Reader]:
    """Streams that have begun, at least two of which ``replica`` makes, the last one among them."""
    readers: list[Reader] = []
    while sum(made_by(reader) == replica for reader in readers) < 2:
        assert len(readers) < 20, "no stream is made there"
        readers.append(start_reading(cluster, asked("spread", tokens), url))
    return readers


def made_by(reader: Reader) -> int:
    return int(Maker(reader.text).replica)


def new_request(cluster: Cluster, url: str = "") -> int:
    """The replica that answers one; it must succeed. ``url``: of another endpoint than the cluster's usual one."""
    answer = cluster.client.post(url + CHAT, json=asked("spread", 2))
    assert answer.status_code == 200, answer.text
    return int(Maker(answer.text).replica)


def test_a_node_that_is_told_to_stop(yard_cluster: Cluster) -> None:
    """SIGTERM of `ray start --block`, with a replica, a gateway and a proxy on the node: its replica gets no new
    request, streams that end within the grace end where they were, the others go on elsewhere; those that came through
    the node's own proxy and gateway too. Every request that is sent meanwhile succeeds."""
    with one_replica_per_node(yard_cluster) as (leaving, replica), two_gateways(yard_cluster, max_replicas_per_node=1):
        eventually("the node's own proxy answers", lambda: answers(leaving.url))
        long = streams_of(yard_cluster, replica, LONG) + streams_of(yard_cluster, replica, LONG, leaving.url)
        short = streams_of(yard_cluster, replica, SHORT)
        at_its_side = [reader for reader in long if made_by(reader) == replica]
        assert short[-1].is_alive()
        leaving.main.terminate()
        stopping_at = None
        new: list[tuple[float, int]] = []  # when each request was sent, and who answered it
        while psutil.pid_exists(replica):
            if stopping_at is None and replica not in yard_cluster.pids("spread").values():
                stopping_at = time.monotonic()
            new.append((time.monotonic(), new_request(yard_cluster)))
        assert stopping_at is not None
        later = {maker for at, maker in new if at > stopping_at + TOLD_S}
        assert later
        assert replica not in later
        for reader in short:
            reader.whole(SHORT)
            assert len(set(fingerprints(reader.text))) == 1
        for reader in long:
            reader.whole(LONG)
        assert all(made_by(reader) != replica for reader in at_its_side)
        leaving.end()
        new_request(yard_cluster)


def end_its_raylet(node: Node) -> None:
    """Its processes end with it."""
    node.raylet().terminate()


def kill_all_of_it(node: Node) -> None:
    """As a machine that loses its power."""
    node.end()


@pytest.mark.parametrize("harm", [end_its_raylet, kill_all_of_it])
def test_a_node_that_ends(yard_cluster: Cluster, harm: Callable[[Node], None]) -> None:
    """Every stream of its replica goes on elsewhere, every new request succeeds."""
    with one_replica_per_node(yard_cluster) as (leaving, replica):
        readers = streams_of(yard_cluster, replica, LONG // 2)
        harm(leaving)
        while any(reader.is_alive() for reader in readers):
            new_request(yard_cluster)
        for reader in readers:
            reader.whole(LONG // 2)
            assert made_by(reader) != replica
        yard_cluster.wait_quiet("spread")


class Asker(threading.Thread):
    """A client that asks for one stream after the other. ``failed``: when each was sent that was not answered whole,
    and why."""

    def __init__(self, cluster: Cluster, enough: threading.Event) -> None:
        super().__init__(daemon=True)
        self._client = cluster.client
        self._enough = enough
        self.answered = 0
        self.failed: list[tuple[float, str]] = []

    def run(self) -> None:
        while not self._enough.is_set():
            sent = time.monotonic()
            try:
                assert_whole(self._client.post(CHAT, json=asked("spread", SHORT)).raise_for_status().text, SHORT)
                self.answered += 1
            except (httpx.HTTPError, AssertionError) as error:
                self.failed.append((sent, repr(error)))


@contextmanager
def asking(cluster: Cluster) -> Iterator[list[Asker]]:
    """Several clients that ask without a pause until the end of the block, and have been answered at its beginning."""
    enough = threading.Event()
    askers = [Asker(cluster, enough) for _ in range(ASKERS)]
    for asker in askers:
        asker.start()
    try:
        eventually("they are answered", lambda: all(asker.answered for asker in askers))
        yield askers
    finally:
        enough.set()
        for asker in askers:
            asker.join(90)
    assert not any(asker.is_alive() for asker in askers), "a request hangs"


def on_node(cluster: Cluster, node: Node, app: str, deployment: str) -> int | None:
    """The process of the running replica there."""
    there = cluster.details()[app]["deployments"].get(deployment, {"replicas": []})["replicas"]
    return next((r["pid"] for r in there if r.get("node_id") == node.id and r["state"] == "RUNNING"), None)


def test_a_node_that_is_killed_and_joins_again(yard_cluster: Cluster) -> None:
    """kill -9 of all that a node runs, under load, with a replica, a gateway and HAProxy on it, in a cluster that asks
    for Ray's token. Every stream that a client asks for after its death is whole, at all times until another node has
    joined in its place, which has a replica, a gateway and HAProxy again; through that HAProxy its own replica answers.
    A node with another token does not get in."""
    assert httpx.get(f"{yard_cluster.session.dashboard}/api/v0/nodes", trust_env=False).status_code == 401
    with (
        one_replica_per_node(yard_cluster) as (lost, _),
        two_gateways(yard_cluster, max_replicas_per_node=1),
        ExitStack() as later,
    ):
        eventually("the node's own proxy answers", lambda: answers(lost.url))
        with asking(yard_cluster) as askers:
            lost.end()
            dead_at = time.monotonic()
            eventually("Ray knows", lambda: lost.id not in yard_cluster.nodes())
            stranger = node(yard_cluster, num_cpus=1, env={"RAY_AUTH_TOKEN": "another"})
            with pytest.raises(AssertionError, match="InvalidAuthToken"), stranger:
                pass
            joined = later.enter_context(node(yard_cluster, num_cpus=1))
            there = partial(on_node, yard_cluster, joined)
            replica = eventually("a replica there", lambda: there("spread", MODEL_DEPLOYMENT))
            eventually("a gateway there", lambda: there(GATEWAY, GATEWAY_DEPLOYMENT))
            eventually("its proxy answers", lambda: answers(joined.url))
            eventually("its replica answers there", lambda: new_request(yard_cluster, joined.url) == replica)
        assert [failure for asker in askers for failure in asker.failed if failure[0] > dead_at] == []


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", trust_env=False).is_success
    except httpx.TransportError:
        return False
