"""Nothing is lost on real Ray Serve: replicas and engines that are killed, stopped, scaled down and updated."""

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from serve_app.config import MODEL_DEPLOYMENT
from tests.serve.cluster import Cluster, eventually, fake_app
from tests.sse import events

pytestmark = pytest.mark.serve
CHAT = "/v1/chat/completions"
LIMITS = {"silence_s": 2.0, "grace_s": 1.0}


def asked(model: str, tokens: int, **more: Any) -> dict[str, Any]:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    return (
        {"model": model, "messages": [{"role": "user", "content": "two words"}], "max_tokens": tokens} | options | more
    )


def assert_whole(text: str, tokens: int) -> None:
    seen = events(text)
    assert [event["error"] for event in seen if "error" in event] == []
    assert len({event["id"] for event in seen}) == 1
    content = "".join(c["delta"].get("content", "") for e in seen for c in e["choices"])
    assert content == "".join(f"t{i} " for i in range(tokens))
    assert seen[-1]["usage"]["completion_tokens"] == tokens


class Reader(threading.Thread):
    """A client that reads one stream, while the test does something to whoever makes it."""

    def __init__(self, cluster: Cluster, body: dict[str, Any], url: str) -> None:
        super().__init__(daemon=True)
        self._cluster = cluster
        self._body = body
        self._url = url
        self.text = ""
        self.status = 0
        self.largest_gap_s = 0.0

    def run(self) -> None:
        with self._cluster.client.stream("POST", self._url + CHAT, json=self._body) as answer:
            self.status = answer.status_code
            last = time.monotonic()
            for part in answer.iter_text():
                self.largest_gap_s = max(self.largest_gap_s, time.monotonic() - last)
                last = time.monotonic()
                self.text += part

    def whole(self, tokens: int) -> None:
        self.join(90)
        assert not self.is_alive(), "the stream hangs"
        assert self.status == 200, self.text
        assert_whole(self.text, tokens)


def start_reading(cluster: Cluster, body: dict[str, Any], url: str = "") -> Reader:
    """``url``: of another endpoint than the cluster's usual one."""
    reader = Reader(cluster, body, url)
    reader.start()
    eventually("the stream has begun", lambda: "t3 " in reader.text)
    return reader


def fingerprints(text: str) -> list[tuple[str, str]]:
    """Process ids of replica and engine, by event."""
    return re.findall(r'"system_fingerprint":"(\d+)-(\w+)"', text)


class Maker:
    """The processes that made the last event of a stream, as the scripted engine says in every event."""

    def __init__(self, text: str) -> None:
        self.replica, self.engine = fingerprints(text)[-1]

    def replica_process(self) -> psutil.Process:
        return psutil.Process(int(self.replica))

    def engine_process(self) -> psutil.Process:
        return psutil.Process(int(self.engine))


def kill_replica(maker: Maker) -> None:
    maker.replica_process().kill()


def kill_engine(maker: Maker) -> None:
    maker.engine_process().kill()


def stop_replica(maker: Maker) -> None:
    maker.replica_process().suspend()


def stop_engine(maker: Maker) -> None:
    maker.engine_process().suspend()


@pytest.mark.parametrize("harm", [kill_replica, kill_engine, stop_engine, stop_replica])
def test_a_stream_survives_its_replica(yard_cluster: Cluster, harm: Callable[[Maker], None]) -> None:
    """Killed or stopped, replica or engine: the client's stream goes on where it was, the replica is replaced, nothing
    is left of the old one and no count stays."""
    app = fake_app("pairs", replicas=2, token_interval_s=0.1, process=True, limits=LIMITS)
    # Shorter than the product's own, by which a frozen replica is replaced in test_updates.
    app["deployments"][0] |= {"health_check_period_s": 1, "health_check_timeout_s": 3}
    yard_cluster.deploy(app)
    eventually("two replicas", lambda: len(yard_cluster.pids("pairs")) == 2)
    reader = start_reading(yard_cluster, asked("pairs", 40))
    maker = Maker(reader.text)
    old = [maker.replica_process(), maker.engine_process()]
    harm(maker)
    reader.whole(40)
    assert Maker(reader.text).replica != maker.replica
    eventually("it is replaced", lambda: int(maker.replica) not in yard_cluster.pids("pairs").values())
    eventually("two replicas again", lambda: len(yard_cluster.pids("pairs")) == 2)
    eventually("nothing of the old one is left", lambda: not any(p.is_running() for p in old), 20)
    yard_cluster.wait_quiet("pairs")


def test_shrinking_waits_for_no_answer(yard_cluster: Cluster) -> None:
    """Two replicas become one under a stream of many seconds: it moves within the grace, without a break, and the
    replica is gone long before the answer would have ended on it."""
    app = fake_app("shrinking", replicas=2, token_interval_s=0.05, limits=LIMITS)
    app["deployments"][0]["graceful_shutdown_timeout_s"] = 60
    yard_cluster.deploy(app)
    eventually("two replicas", lambda: len(yard_cluster.pids("shrinking")) == 2)
    readers = [start_reading(yard_cluster, asked("shrinking", 300)) for _ in range(4)]
    before = yard_cluster.pids("shrinking")
    app["deployments"][0]["num_replicas"] = 1
    yard_cluster.deploy(app, wait=False)
    eventually("one process is gone", lambda: sum(map(psutil.pid_exists, before.values())) == 1, 20)
    assert all(reader.is_alive() for reader in readers)
    for reader in readers:
        reader.whole(300)
    yard_cluster.wait_quiet("shrinking")


def test_an_update_moves_long_streams(yard_cluster: Cluster) -> None:
    """`serve deploy` of a changed entry that means the same tokens: the stream ends on the new version."""
    app = fake_app("updated", replicas=2, token_interval_s=0.05, limits=LIMITS)
    app["deployments"][0] |= {"graceful_shutdown_timeout_s": 60, "max_surge_percent": 100}
    yard_cluster.deploy(app)
    before = yard_cluster.pids("updated")
    readers = [start_reading(yard_cluster, asked("updated", 400)) for _ in range(2)]
    app["args"]["overcommit"] = 9
    yard_cluster.deploy(app, wait=False)
    eventually(
        "only new replicas", lambda: (now := yard_cluster.pids("updated")) and not {*now.values()} & {*before.values()}
    )
    for reader in readers:
        reader.whole(400)
    assert sum(report["engine"]["resumed"] for report in yard_cluster.wait_quiet("updated")) >= 2
    assert MODEL_DEPLOYMENT in yard_cluster.details()["updated"]["deployments"]
