"""One model as the simulator sees it: a gateway that holds requests, and replicas that start, run and leave on GPUs
which the models share."""

from collections import deque
from dataclasses import dataclass, field
from random import Random

from loadtest.scaling.engine import Engine, EngineSpec, Request
from serve_app.config import ModelArgs, RequestLimits

LIMITS = RequestLimits()
OVERCOMMIT: int = ModelArgs.model_fields["overcommit"].default


@dataclass(frozen=True)
class ModelSpec:
    """``least``, ``most``: bounds of its replicas; it begins with ``least``. ``start_s``: how long a replica takes to
    start, give or take a tenth. A replica takes one GPU."""

    name: str
    engine: EngineSpec
    least: int
    most: int
    start_s: float


@dataclass
class Pool:
    """The GPUs that all models share. ``pending``: replicas that wait for one."""

    gpus: int
    used: int = 0
    pending: int = 0

    @property
    def free(self) -> int:
        return self.gpus - self.used


@dataclass(slots=True, eq=False)
class Replica:
    engine: Engine
    ready_s: float
    left_s: float | None = None  # since when it is leaving


@dataclass(eq=False)
class Fleet:
    """Times in seconds. ``wanted``: what was decided last. ``held``: requests that wait at the gateway."""

    spec: ModelSpec
    pool: Pool
    random: Random
    wanted: int = 0
    held: deque[Request] = field(default_factory=deque)
    starting: list[Replica] = field(default_factory=list)
    running: list[Replica] = field(default_factory=list)
    leaving: list[Replica] = field(default_factory=list)
    ended: int = 0
    refused: int = 0
    gpu_s: float = 0.0

    def begin(self, replicas: int) -> None:
        """With ``replicas`` that run already."""
        self.wanted = replicas
        self.running = [Replica(Engine(self.spec.engine, 0.0), 0.0) for _ in range(self.wanted)]
        self.pool.used += self.wanted

    @property
    def placed(self) -> int:
        """Replicas that hold a GPU and are wanted."""
        return len(self.starting) + len(self.running)

    @property
    def requests(self) -> int:
        """As the callers count them: at the gateway and on replicas that are not leaving."""
        return len(self.held) + sum(r.engine.requests for r in self.running)

    def arrive(self, request: Request) -> None:
        """As at one gateway with the limits' defaults; they are wider while no replica runs."""
        cold = not self.running
        request.deadline_s = request.at_s + (LIMITS.hold_s if cold else LIMITS.wait_s)
        if len(self.held) >= (LIMITS.hold_requests if cold else LIMITS.max_waiting):
            self._refuse(request)
        else:
            self.held.append(request)

    def advance(self, now: float, step_s: float) -> None:
        """From ``now`` to ``now + step_s``: give held requests to replicas, and let the engines run."""
        if self.held:
            self._dispatch(now)
        until = now + step_s
        for replica in self.running:
            if replica.engine.requests:
                self.ended += len(replica.engine.advance(until))
        if self.leaving:
            self._leave(until)
        if self.starting:
            ready = [r for r in self.starting if r.ready_s <= until]
            self.starting = [r for r in self.starting if r.ready_s > until]
            self.running += ready
        self.gpu_s += step_s * (len(self.starting) + len(self.running) + len(self.leaving))

    def scale(self, wanted: int, now: float) -> None:
        """Those that start go before those that run, and of these the emptiest."""
        self.pool.pending -= max(0, self.wanted - self.placed)
        self.wanted = wanted
        while self.placed > wanted:
            if self.starting:
                self.starting.pop()
                self.pool.used -= 1
            else:
                emptiest = min(self.running, key=lambda r: r.engine.requests)
                self.running.remove(emptiest)
                emptiest.left_s = now
                self.leaving.append(emptiest)
        while self.placed < wanted and self.pool.free > 0:
            ready = now + self.spec.start_s * self.random.uniform(0.9, 1.1)
            self.starting.append(Replica(Engine(self.spec.engine, ready), ready))
            self.pool.used += 1
        self.pool.pending += max(0, wanted - self.placed)

    def _dispatch(self, now: float) -> None:
        """In order of arrival, each to the replica with the fewest requests, up to its slots."""
        most = self.spec.engine.slots + OVERCOMMIT
        while self.held:
            request = self.held[0]
            if request.deadline_s <= now:
                self._refuse(self.held.popleft())
                continue
            engine = min((r.engine for r in self.running), key=lambda e: e.requests, default=None)
            if engine is None or engine.requests >= most:
                return
            engine.add(self.held.popleft(), max(now, request.at_s))

    def _leave(self, now: float) -> None:
        """A replica that leaves keeps its requests for the grace; then they move to others, computed anew there."""
        still = []
        for replica in self.leaving:
            self.ended += len(replica.engine.advance(now))
            assert replica.left_s is not None
            if now - replica.left_s >= LIMITS.grace_s:
                moved = replica.engine.clear()
                for request in reversed(moved):
                    request.deadline_s = now + LIMITS.wait_s
                    self.held.appendleft(request)
            if replica.engine.requests:
                still.append(replica)
            else:
                self.pool.used -= 1
        self.leaving = still

    def _refuse(self, request: Request) -> None:
        request.refused = True
        self.refused += 1
