"""Processes that die, and what is left of them: nothing, and soon a successor."""

import os
import signal
import threading
import time
from collections.abc import Callable

import httpx
import psutil
import pytest

from tests.engine.ask import CHAT, COMPLETIONS, assert_answers, capital
from tests.engine.conftest import START_S, chat_app
from tests.serve.cluster import Cluster, children, eventually
from tests.sse import events

pytestmark = pytest.mark.engine


def one_replica(cluster: Cluster, app: str = "chat") -> int:
    (pid,) = cluster.pids(app).values()
    return pid


def engine_processes(pid: int) -> list[psutil.Process]:
    """The engine's own processes below a replica."""
    found = [child for child in children(pid) if "VLLM::" in " ".join(child.cmdline())]
    assert found, f"no engine below {pid}: {children(pid)}"
    return found


def living(processes: list[psutil.Process]) -> list[psutil.Process]:
    def lives(process: psutil.Process) -> bool:
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return [process for process in processes if lives(process)]


class Asking(threading.Thread):
    """A client that asks one thing after another until it is told to stop. Nothing may hang."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._client = httpx.Client(base_url=url, timeout=90, trust_env=False)
        self._enough = threading.Event()
        self.answers: list[tuple[int, bool, str]] = []  # status, whether Retry-After was there, body
        self.failures: list[str] = []

    def run(self) -> None:
        while not self._enough.is_set():
            try:
                answer = self._client.post(CHAT, json=capital(max_tokens=2))
                self.answers.append((answer.status_code, "retry-after" in answer.headers, answer.text))
            except httpx.HTTPError as error:
                self.failures.append(repr(error))
            time.sleep(0.3)

    def stop(self) -> None:
        self._enough.set()
        self.join(95)
        assert not self.is_alive()
        self._client.close()
        assert self.failures == []
        assert [answer for answer in self.answers if answer[0] != 200 and answer[:2] != (503, True)] == []


def recover(cluster: Cluster, kill: Callable[[], None], engine: list[psutil.Process]) -> tuple[float, float]:
    """Kill, then wait for the successor: seconds until the old engine was gone and until the model answered."""
    before = one_replica(cluster)
    asking = Asking(cluster.url)
    asking.start()
    killed = time.monotonic()
    kill()
    gone: list[float] = []

    def successor() -> bool:
        if not gone and not living(engine):
            gone.append(time.monotonic() - killed)
        up = [pid for pid in cluster.pids("chat").values() if pid != before]
        assert not up or not living(engine), "the successor is up while the old engine lives"
        return bool(up)

    eventually("a successor", successor, START_S)
    eventually("an answer", lambda: cluster.client.post(CHAT, json=capital(max_tokens=2)).status_code == 200, 30)
    took = time.monotonic() - killed
    asking.stop()
    return gone[0], took


def usual_start_s(cluster: Cluster) -> float:
    return float(cluster.ready()["models"]["chat"]["usual_start_s"])


def test_a_killed_replica_leaves_no_engine(engines: Cluster, record_property: Callable[[str, object], None]) -> None:
    """kill -9 of the replica: its engine is gone before the successor is up, requests meanwhile wait or get 503 with
    Retry-After, and the model answers again within twice its own usual start."""
    assert_answers(engines.client)
    usual, replica = usual_start_s(engines), one_replica(engines)
    gone, took = recover(engines, lambda: os.kill(replica, signal.SIGKILL), engine_processes(replica))
    numbers = f"usual start {usual:.1f} s, engine gone after {gone:.1f} s, answered again after {took:.1f} s"
    record_property("recovery", numbers)
    print(numbers)
    assert took < 2 * usual
    assert_answers(engines.client)


def test_a_killed_engine_is_replaced(engines: Cluster, record_property: Callable[[str, object], None]) -> None:
    """kill -9 of the engine's process alone, and no other replica: a stream under way waits for the successor and goes
    on there, requests meanwhile wait or get 503 with Retry-After, nothing hangs, and the model answers again within
    twice its own usual start."""
    usual, replica = usual_start_s(engines), one_replica(engines)
    engine = engine_processes(replica)

    lines: list[str] = []

    def read() -> None:
        request = {"model": "chat", "prompt": "The sea", "max_tokens": 150, "ignore_eos": True, "stream": True}
        # It waits as long as a start takes, without a byte.
        with engines.client.stream("POST", COMPLETIONS, json=request, timeout=START_S) as answer:
            lines.extend(answer.iter_lines())

    def kill_in_a_stream() -> None:
        reader.start()
        eventually("the engine computes", lambda: engines.reports("chat")[0]["engine"]["running"], 10)
        engine[0].kill()

    reader = threading.Thread(target=read, daemon=True)
    gone, took = recover(engines, kill_in_a_stream, [psutil.Process(replica), *engine])
    reader.join(START_S)
    assert not reader.is_alive()
    assert text_of_completion("\n".join(lines)), "an empty stream"
    assert not [line for line in lines if line.startswith('data: {"error"')]
    numbers = f"usual start {usual:.1f} s, replica gone after {gone:.1f} s, answered again after {took:.1f} s"
    record_property("recovery", numbers)
    print(numbers)
    assert took < 2 * usual
    assert_answers(engines.client)


def at_work(replicas: list[int]) -> int:
    """The replica whose engine computes."""

    def seconds(pid: int) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in engine_processes(pid))

    before = {pid: seconds(pid) for pid in replicas}
    time.sleep(0.5)
    return max(replicas, key=lambda pid: seconds(pid) - before[pid])


def test_a_killed_replicas_stream_goes_on(engines: Cluster) -> None:
    """kill -9 of one of two real replicas in the middle of a greedy stream in float32: the client gets the text of an
    undisturbed run, as one stream."""
    twins = chat_app() | {"name": "twins"}
    twins["args"]["engine"] |= {"dtype": "float32"}
    twins["args"]["resources"] = {"num_gpus": 0, "num_cpus": 0}  # beside the other models of this cluster
    twins["deployments"] = [{"name": "Model", "num_replicas": 2}, {"name": "Card", "user_config": {}}]
    engines.deploy(twins, wait=False)
    eventually("two replicas", lambda: len(engines.pids("twins")) == 2, START_S)
    eventually("they answer", lambda: engines.client.get("/ready", params={"model": "twins"}).status_code == 200)
    story = {"model": "twins", "prompt": "The sea", "max_tokens": 100, "temperature": 0, "stream": True}
    undisturbed = text_of_completion(engines.client.post(COMPLETIONS, json=story))
    parts = []
    with engines.client.stream("POST", COMPLETIONS, json=story) as answer:
        for line in answer.iter_lines():
            parts.append(line)
            if len(parts) == 20:
                os.kill(at_work(list(engines.pids("twins").values())), signal.SIGKILL)
    assert text_of_completion("\n".join(parts)) == undisturbed
    assert "of twins: the replica closed" in engines.log("gateway", "Gateway"), "not the replica at work was killed"
    engines.remove("twins")


def text_of_completion(answer: httpx.Response | str) -> str:
    stream = answer if isinstance(answer, str) else answer.text
    return "".join(choice["text"] for event in events(stream) for choice in event["choices"])


def test_a_removed_model_leaves_no_process(engines: Cluster) -> None:
    """A graceful stop ends the replica's whole process tree."""
    replica = one_replica(engines, "embed")
    processes = [psutil.Process(replica), *engine_processes(replica)]
    engines.remove("embed")
    eventually("all processes of embed ended", lambda: not living(processes), 60)
    assert_answers(engines.client)
