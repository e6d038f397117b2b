"""Who decides how many replicas a model has: Modelyard's policy, Ray Serve's own, or nobody.

A system is asked at every tick of Serve's control loop and keeps its own view of the model, as old as it is in a
cluster. What Serve does around every policy is the same for all: without a running replica the first request makes it
want one.
"""

from collections import deque
from dataclasses import dataclass, field
from math import ceil
from typing import Protocol

from ray.serve.autoscaling_policy import default_autoscaling_policy
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from loadtest.scaling.fleet import Fleet, Replica
from serve_app import scaling
from serve_app.config import Scaling

# How often a replica reports to Serve's controller under Modelyard's policy, and over how long it averages tokens/s.
REPORT_S = 1.0
TOKENS_OVER_S = 10


# Serve forgives so much in the comparison of delays.
DELAY_EPSILON_S = 1e-6


class System(Protocol):
    @property
    def first(self) -> int:
        """Replicas that run when the replay begins."""

    def wanted(self, now: float) -> int:
        """How many replicas its model should have at ``now``, s. Asked at every tick."""


@dataclass
class Static:
    """As many as it was given, always."""

    first: int

    def wanted(self, now: float) -> int:
        return self.first


@dataclass
class Modelyard:
    """``serve_app.scaling.decide`` on reports that are up to a second old."""

    fleet: Fleet
    settings: Scaling = field(default_factory=Scaling)
    state: scaling.State = field(default_factory=scaling.State)
    signals: scaling.Signals | None = None
    _next: float = 0.0
    _tokens: dict[Replica, deque[int]] = field(default_factory=dict)

    @property
    def first(self) -> int:
        return self.fleet.spec.least

    def wanted(self, now: float) -> int:
        fleet = self.fleet
        if now >= self._next:
            self._next += REPORT_S
            self.signals = self._report()
        if not fleet.running and fleet.requests:
            return max(1, fleet.wanted)
        bounds = scaling.Fleet(len(fleet.running), fleet.wanted, fleet.spec.least, fleet.spec.most)
        wanted, self.state = scaling.decide(self.signals, bounds, self.settings, self.state, now)
        return wanted

    def _report(self) -> scaling.Signals:
        fleet, pool = self.fleet, self.fleet.pool
        self._tokens = {r: self._tokens.get(r) or deque(maxlen=TOKENS_OVER_S + 1) for r in fleet.running}
        engines = []
        for replica, tokens in self._tokens.items():
            engine = replica.engine
            tokens.append(engine.tokens)
            engines.append(
                scaling.EngineStats(
                    running=engine.running,
                    waiting=len(engine.waiting),
                    kv_usage=engine.kv_usage,
                    tokens_s=(tokens[-1] - tokens[0]) / TOKENS_OVER_S,
                )
            )
        placeable = max(0, pool.free - pool.pending)
        return scaling.Signals.of(engines, len(fleet.held), fleet.spec.engine.slots, placeable)


@dataclass(frozen=True)
class ServeSettings:
    """Of Serve's ``autoscaling_config``, with its defaults."""

    target: float = 2.0
    up_s: float = 30.0
    down_s: float = 600.0
    look_back_s: float = 30.0
    interval_s: float = 10.0


@dataclass
class Serve:
    """Serve's default policy (the function itself) on the average that its controller would give it: callers record
    their requests every fifth of the look-back, send what they recorded every interval, and the controller takes
    the mean over time, from when the youngest replica's first record came in. Then its delays."""

    fleet: Fleet
    settings: ServeSettings = ServeSettings()
    _records: deque[tuple[float, float, int]] = field(default_factory=deque)
    _sent: list[tuple[float, float, int]] = field(default_factory=list)
    _next_record: float = 0.0
    _next_send: float = 0.0
    _turn: int = 0  # 1: the policy wants more, -1: fewer
    _turn_since: float = 0.0

    def __post_init__(self) -> None:
        s, spec = self.settings, self.fleet.spec
        self._record_every = min(0.2 * s.look_back_s, s.interval_s)
        self._config = AutoscalingConfig(
            min_replicas=spec.least,
            max_replicas=spec.most,
            target_ongoing_requests=s.target,
            upscale_delay_s=s.up_s,
            downscale_delay_s=s.down_s,
        )

    @property
    def first(self) -> int:
        return self.fleet.spec.least

    def wanted(self, now: float) -> int:
        fleet, s = self.fleet, self.settings
        if now >= self._next_record:
            self._next_record += self._record_every
            self._records.append((now, float(fleet.requests), len(fleet.running)))
        if now >= self._next_send:
            self._next_send += s.interval_s
            while self._records and self._records[0][0] < now - s.look_back_s:
                self._records.popleft()
            self._sent = list(self._records)
        if not fleet.running and fleet.requests:
            return max(1, fleet.wanted)
        return self.decide(now, self._mean(now))

    def decide(self, now: float, requests: float) -> int:
        """``requests``: what the controller's average comes to."""
        desired, _ = default_autoscaling_policy(self.context(now, requests))
        decided = self._delayed(ceil(desired), self.fleet.wanted, now)
        return max(self.fleet.spec.least, min(self.fleet.spec.most, decided))

    def context(self, now: float, requests: float) -> AutoscalingContext:
        fleet = self.fleet
        return AutoscalingContext(
            deployment_id=None,
            deployment_name=fleet.spec.name,
            app_name=fleet.spec.name,
            current_num_replicas=len(fleet.running),
            target_num_replicas=fleet.wanted,
            running_replicas=[],
            total_num_requests=requests,
            total_queued_requests=None,
            aggregated_metrics=None,
            raw_metrics=None,
            capacity_adjusted_min_replicas=fleet.spec.least,
            capacity_adjusted_max_replicas=fleet.spec.most,
            policy_state={},
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=now,
            config=self._config,
        )

    def _mean(self, now: float) -> float:
        """Requests, averaged over what was sent, the last value until now."""
        sent = self._sent
        joined = [i for i in range(1, len(sent)) if sent[i][2] > sent[i - 1][2]]
        sent = sent[joined[-1] :] if joined else sent
        if not sent:
            return 0.0
        ends = [at for at, _, _ in sent[1:]] + [max(now, sent[-1][0] + 1e-3)]
        total = sum(value * (end - at) for (at, value, _), end in zip(sent, ends, strict=True))
        return total / (ends[-1] - sent[0][0])

    def _delayed(self, desired: int, target: int, now: float) -> int:
        """A direction must hold without a break for its delay; zero is reached from one only."""
        turn = (desired > target) - (desired < target)
        if turn != self._turn:
            self._turn, self._turn_since = turn, now
        delay = self.settings.up_s if turn > 0 else self.settings.down_s
        if not turn or now - self._turn_since + DELAY_EPSILON_S < delay:
            return target
        self._turn = 0
        return desired if turn > 0 or target == 1 else max(1, desired)
