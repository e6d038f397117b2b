"""The faults: what is killed, stopped, scaled and redeployed, in an order that a seed decides."""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import psutil

from serve_app.config import GATEWAY_DEPLOYMENT, MODEL_DEPLOYMENT
from serve_app.ray_api import RayApiError
from tests.chaos.judge import Fault
from tests.chaos.processes import Seen, Stopped, engines, lives
from tests.serve.cluster import GATEWAY, Cluster, eventually

KILL_REPLICA = "kill replica"
KILL_ENGINE = "kill engine"
STOP_REPLICA = "stop replica"
STOP_ENGINE = "stop engine"
KILL_GATEWAY = "kill gateway"
SCALE = "scale to 1 and back"
SCALE_DOWN = "scale to 1"
SCALE_UP = "scale to all"
REDEPLOY = "redeploy"
ALL = (KILL_REPLICA, KILL_ENGINE, STOP_REPLICA, STOP_ENGINE, KILL_GATEWAY, SCALE, REDEPLOY)

PAUSE_S = (2.0, 4.0)
# Each takes the answers under way on it along: enough to see the others unharmed.
GATEWAY_KILLS = 2
# A stress, not an absence: no replica or gateway is taken away while fewer of them than this are well.
WELL = 2
# A line of a gateway's access log.
SERVED = re.compile(r'gateway_Gateway (\S+) \S+ -- \{"at":.*"status":200,')
LOOK_S = 0.25
# How long the product has until it must have replaced everything that was stopped, and be whole again.
WHOLE_S = 120.0


def schedule(random: Random, kinds: Sequence[str]) -> Iterator[str]:
    """Endless rounds, each with every kind once in an order of its own; scaling down is followed by scaling up."""
    gateway_kills = 0
    while True:
        for kind in random.sample(kinds, len(kinds)):
            if kind == SCALE:
                yield SCALE_DOWN
                yield SCALE_UP
            elif kind != KILL_GATEWAY or gateway_kills < GATEWAY_KILLS:
                gateway_kills += kind == KILL_GATEWAY
                yield kind


class Monkey:
    """``app``: the model's application with so many replicas, in its so-manieth version.

    ``done``: every fault of the first round has been. One thread runs it.
    """

    def __init__(
        self,
        cluster: Cluster,
        app: Callable[[int, int], dict[str, Any]],
        replicas: int,
        seed: int,
        kinds: Sequence[str],
        tell: Callable[[str], None],
    ) -> None:
        self._cluster = cluster
        self._app = app
        self._name: str = app(replicas, 0)["name"]
        self._replicas = replicas
        self._random = Random(f"{seed}/faults")
        self._kinds = kinds
        self._tell = tell
        self._version = 0
        self._hit: dict[str, str] = {}  # what was done to which replica
        self.seen = Seen()
        self.stopped = Stopped()
        self.faults: list[Fault] = []
        self.trouble: list[str] = []
        self.done = False

    @property
    def gateway_kills(self) -> list[Fault]:
        return [fault for fault in self.faults if fault.kind == KILL_GATEWAY]

    def run(self, enough: Callable[[], bool]) -> None:
        """One fault after another until the first round is through and ``enough``."""
        first_round = len(self._kinds) + (SCALE in self._kinds)
        try:
            for number, kind in enumerate(schedule(self._random, self._kinds)):
                self.done = number >= first_round
                if self.done and enough():
                    break
                self._wait(self._random.uniform(*PAUSE_S))
                while not self._act(kind):
                    self._look()
        except Exception as error:
            self.trouble.append(f"the faults ended early: {error!r}")
        finally:
            self.done = True

    def settle(self) -> list[str]:
        """Ask for all replicas and wait until they are well; what was hit and the product did not replace."""
        self._deploy(self._replicas)
        deadline = time.monotonic() + WHOLE_S
        whole, left = False, [""]
        while (not whole or left) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
            self._look()
            running = self._running(self._name, MODEL_DEPLOYMENT)
            whole = len(running) == self._replicas and self._settled()
            left = self._not_replaced(running)
        self.stopped.kill()
        if not whole:
            self.trouble.append(f"the model was not whole within {WHOLE_S:g} s")
        return left

    def orphans(self, within_s: float = 15.0) -> tuple[str, ...]:
        """Processes of former replicas that are still there after so long."""
        deadline = time.monotonic() + within_s
        while (found := self.seen.orphans(self._look())) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        return tuple(found.values())

    def _not_replaced(self, running: dict[str, int]) -> list[str]:
        """Stopped processes that live, and replicas that run although they or their engine were killed or stopped."""
        return sorted({*self.stopped.left(), *(what for name, what in self._hit.items() if name in running)})

    def _act(self, kind: str) -> bool:
        """False where the victim had ended by itself."""
        try:
            self._do(kind)
        except psutil.NoSuchProcess:
            return False
        return True

    def _do(self, kind: str) -> None:
        victim = what = ""
        if kind == KILL_GATEWAY:
            pids = self._when(f"{WELL} gateways answer", self._gateways)
            victim, pid = self._random.choice(sorted(pids.items()))
            process, what = psutil.Process(pid), f"gateway {victim}"
        elif kind in (KILL_REPLICA, KILL_ENGINE, STOP_REPLICA, STOP_ENGINE):
            pids = self._when(f"{WELL} replicas are well", self._well)
            victim, pid = self._random.choice(sorted(pids.items()))
            process, what = psutil.Process(pid), f"replica {victim}"
            if kind in (KILL_ENGINE, STOP_ENGINE):
                found = engines(pid)
                if not found:
                    self.trouble.append(f"{kind}: replica {victim} has no engine process of its own")
                    return
                process, what = self._random.choice(found), f"engine of {what}"
            self._hit[victim] = what
        elif kind == SCALE_DOWN:
            self._when(f"{WELL} replicas are well", self._well)
        began = time.monotonic()
        if kind in (STOP_REPLICA, STOP_ENGINE):
            self.stopped.stop(process, what)
        elif victim:
            process.kill()
            eventually("a killed process is gone", lambda: not lives(process))
        elif kind == SCALE_DOWN:
            self._deploy(1)
        else:
            self._version += kind == REDEPLOY
            self._deploy(self._replicas)
        self.faults.append(Fault(kind, began, time.monotonic(), what))
        self._tell(f"{kind}{': ' + what if what else ''}")

    def _deploy(self, replicas: int) -> None:
        self._cluster.deploy(self._app(replicas, self._version), wait=False)

    def _when(self, what: str, pids: Callable[[], dict[str, int]]) -> dict[str, int]:
        found: dict[str, int] = eventually(what, lambda: self._look() and pids(), WHOLE_S)
        return found

    def _well(self) -> dict[str, int]:
        """The replicas that run and were left alone so far, where they are enough to spare one."""
        running = self._running(self._name, MODEL_DEPLOYMENT)
        well = {name: pid for name, pid in running.items() if name not in self._hit}
        return well if len(well) >= WELL else {}

    def _gateways(self) -> dict[str, int]:
        """The gateways that have answered requests already, where one can be spared. HAProxy learns of a gateway later
        than Serve: the log says who gets requests."""
        serving = set(SERVED.findall(self._cluster.log(GATEWAY, GATEWAY_DEPLOYMENT)))
        running = {name: pid for name, pid in self._running(GATEWAY, GATEWAY_DEPLOYMENT).items() if name in serving}
        return running if len(running) >= WELL else {}

    def _settled(self) -> bool:
        try:
            state = self._cluster.api.state().application(self._name)
        except RayApiError:
            return False
        return state is not None and state.status == "RUNNING"

    def _running(self, app: str, deployment: str) -> dict[str, int]:
        try:
            return self._cluster.pids(app, deployment)
        except (RayApiError, KeyError):  # the dashboard is as short of CPU as everybody else
            return {}

    def _look(self) -> list[tuple[str, int]]:
        """Remember every process that is a replica's now."""
        try:
            apps = self._cluster.details()
        except RayApiError:
            return []
        found = [
            (replica["replica_id"], replica["pid"])
            for app, deployment in ((self._name, MODEL_DEPLOYMENT), (GATEWAY, GATEWAY_DEPLOYMENT))
            for replica in apps[app]["deployments"].get(deployment, {}).get("replicas", ())
            if replica.get("pid")
        ]
        self.seen.look(found)
        return found

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._look()
            time.sleep(LOOK_S)
