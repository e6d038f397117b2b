"""What this process knows of each model's replicas beyond what it asked: who runs now, and whom to avoid for a while.

Serve's request router (``serve_app.router``) hears first that a replica starts to stop, although its process still
answers, and tells it here; the gateway listens. The other way round, the gateway marks a replica that has gone silent,
and the router passes it over. The two live in different threads of one process, on different event loops.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable

logger = logging.getLogger("ray.serve")

Callback = Callable[[frozenset[str]], None]


class ReplicaWatch:
    """Running and shunned replicas by application. Replica ids are those of ``Grant.replica``. Thread safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # For writers and their callbacks, so that subscribers see updates in order; reads need none. Re-entrant: a
        # callback may unsubscribe.
        self._lock = threading.RLock()
        self._running: dict[str, frozenset[str]] = {}
        self._callbacks: dict[str, tuple[Callback, ...]] = {}
        self._shunned: dict[tuple[str, str], float] = {}

    def __reduce__(self) -> str:
        """Pickled as the name ``WATCH``. Serve pickles deployments and routers by value, with the globals that they
        use: each would get a copy of its own, and they would not hear each other."""
        return "WATCH"

    def running(self, app: str) -> frozenset[str] | None:
        """Ids of the replicas of ``app`` that may get new requests; None before Serve has said so once, which it does
        shortly after this process' first call to the model."""
        return self._running.get(app)

    def subscribe(self, app: str, callback: Callback) -> Callable[[], None]:
        """Call ``callback`` with every new set, from whatever thread says it: it must hop to its own loop, and return
        at once. Not called with the present set: ask ``running`` afterwards. Returns what ends the subscription."""
        with self._lock:
            self._callbacks[app] = (*self._callbacks.get(app, ()), callback)

        def unsubscribe() -> None:
            with self._lock:
                left = tuple(c for c in self._callbacks.get(app, ()) if c is not callback)
                if left:
                    self._callbacks[app] = left
                else:
                    self._callbacks.pop(app, None)

        return unsubscribe

    def update(self, app: str, replica_ids: Iterable[str]) -> None:
        """These replicas run, and no others. Subscribers hear of it where it is new."""
        now = frozenset(replica_ids)
        with self._lock:
            if self._running.get(app) == now:
                return
            self._running[app] = now
            for callback in self._callbacks.get(app, ()):
                try:
                    callback(now)
                except Exception:  # a listener's fault must not stop Serve's router, whose thread this is
                    logger.exception("a listener to the replicas of %s failed", app)

    def shun(self, app: str, replica_id: str, until: float) -> None:
        """Choose ``replica_id`` for no new lease before ``until`` (on ``time.monotonic``). A later call replaces the
        mark, so a time in the past lifts it."""
        now = self._clock()
        with self._lock:
            kept = {key: end for key, end in self._shunned.items() if end > now}
            kept[app, replica_id] = until
            self._shunned = kept

    def is_shunned(self, app: str, replica_id: str) -> bool:
        shunned = self._shunned
        # Asked for every replica and every lease: mostly there are no marks at all.
        return bool(shunned) and shunned.get((app, replica_id), 0.0) > self._clock()


# The one of this process: the router and the gateway do not know each other.
WATCH = ReplicaWatch()
