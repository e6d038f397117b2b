"""What a model's card knows: how starts went, who runs, what its engines and its gateways have to do. No Ray here.

One writer per fact: Serve writes the settings, replicas write their starts and their engines' numbers, gateways write
how many requests they hold.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable

from serve_app.config import CardSettings
from serve_app.lease import CardView, StartReport
from serve_app.scaling import EngineStats, Signals

STARTS_KEPT = 5
# Replicas and gateways that were not heard of for so long are not counted any more.
SILENT_REPLICA_S = 15.0
SILENT_NUMBERS_S = 5.0


class CardMemory:
    """``slots``: requests that one engine runs at once. ``clock``: seconds, monotonic."""

    def __init__(self, slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = CardSettings()
        self._slots = slots
        self._clock = clock
        self._newest = StartReport("", at=0.0)
        self._described = StartReport("", at=0.0)  # the newest that succeeded
        self._start_s: dict[str, float] = {}  # by replica, newest last
        self._heard: dict[str, float] = {}  # when each replica last said that it runs
        self._loading: dict[str, tuple[str, float]] = {}  # by replica
        self._engines: dict[str, tuple[EngineStats, float]] = {}  # by replica
        self._held: dict[str, tuple[int, float]] = {}  # by gateway
        self._waking_since: float | None = None
        self._wake_s: deque[float] = deque(maxlen=STARTS_KEPT)
        self._created = int(time.time())

    def view(self) -> CardView:
        start_s = [*self._start_s.values()]
        return CardView(
            also_known_as=self.settings.also_known_as,
            adapters=self.settings.adapters,
            limits=self.settings.limits,
            routing=self.settings.routing,
            facts=self._described.facts,
            start_s=statistics.median(start_s) if start_s else None,
            wake_s=statistics.median(self._wake_s) if self._wake_s else None,
            waking_for_s=None if self._waking_since is None else self._clock() - self._waking_since,
            error=self._newest.error,
            loading=self._loading_now(),
            alive=len(self._lately(self._heard)),
            held=self._held_now(),
            load=self.signals().load,
            created=self._created,
        )

    def started(self, start: StartReport) -> None:
        """A replica says how its start went. Saying it again changes nothing, and the newest start is what counts:
        old replicas that still answer do not hide that their successors cannot start."""
        self._loading.pop(start.replica, None)
        if start.at >= self._newest.at:
            self._newest = start
        if start.facts is not None and start.at >= self._described.at:
            self._described = start
        if start.error is None:
            new = start.replica not in self._start_s
            self._heard = self._lately(self._heard) | {start.replica: self._clock()}
            if new and self._waking_since is not None:
                self._wake_s.append(self._clock() - self._waking_since)
                self._waking_since = None
        if start.seconds is not None:
            self._start_s[start.replica] = start.seconds
            while len(self._start_s) > STARTS_KEPT:
                del self._start_s[next(iter(self._start_s))]

    def loading(self, replica: str, progress: str) -> None:
        """How far the start of ``replica`` is."""
        self._loading[replica] = (progress, self._clock())

    def engine(self, replica: str, stats: EngineStats) -> None:
        self._engines[replica] = (stats, self._clock())

    def held(self, gateway: str, requests: int, asleep: bool) -> None:
        """``gateway`` holds so many requests for this model. ``asleep``: the model slept when the first of them came,
        so that the time until it answers is what a person waits who wakes it."""
        now = self._clock()
        if requests:
            self._held[gateway] = (requests, now)
        else:
            self._held.pop(gateway, None)
        if not self._held_now():
            # Nobody waits any more, so how long it takes is not seen.
            self._waking_since = None
        elif asleep and self._waking_since is None:
            self._waking_since = now

    def signals(self, placeable: int | None = None) -> Signals:
        since = self._clock() - SILENT_NUMBERS_S
        self._engines = {replica: found for replica, found in self._engines.items() if found[1] > since}
        engines = (stats for stats, _ in self._engines.values())
        return Signals.of(engines, held=self._held_now(), slots=self._slots, placeable=placeable)

    def _held_now(self) -> int:
        since = self._clock() - SILENT_NUMBERS_S
        self._held = {gateway: found for gateway, found in self._held.items() if found[1] > since}
        return sum(requests for requests, _ in self._held.values())

    def _loading_now(self) -> str:
        """Of the replica that told last, in case of several."""
        since = self._clock() - SILENT_NUMBERS_S
        self._loading = {replica: found for replica, found in self._loading.items() if found[1] > since}
        return max(self._loading.values(), key=lambda found: found[1], default=("", 0.0))[0]

    def _lately(self, heard: dict[str, float]) -> dict[str, float]:
        since = self._clock() - SILENT_REPLICA_S
        return {replica: at for replica, at in heard.items() if at > since}
