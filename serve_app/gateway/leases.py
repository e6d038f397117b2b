"""Leases on one model's replicas, pooled like database connections.

A lease is one open streaming call to the model through its Serve handle (what Serve counts) together with one HTTP
connection to the replica that it chose (where the bytes go). A freed lease is kept for a moment and given to the next
request, so under load no Serve call is on a request's path; an idle one is let go, so Serve's counts stay true.

Who waits is served in the order of ``admission``. While nobody waits, a request that would rather go to one replica
(``affinity``) gets an idle lease there, or a new one. One owner (the gateway's event loop) and no locks.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Any

from serve_app import errors
from serve_app.admission import FairQueue, Ticket
from serve_app.config import RequestLimits
from serve_app.gateway.affinity import Affinity
from serve_app.gateway.held import HeldReport
from serve_app.gateway.lease import Lease
from serve_app.gateway.pulses import Pulses
from serve_app.gateway.upstream import Connection
from serve_app.lease import Counted
from serve_app.prefixes import NOTHING, Prefix
from serve_app.replica_watch import ReplicaWatch
from serve_app.routing import pick_idle

logger = logging.getLogger("ray.serve")

KEEP_IDLE_S = 1.0
# Leases being asked for at once: enough to fill a replica quickly, few enough not to storm Serve's router when a
# thousand requests wait for a model that is starting.
MAX_OPENING = 32
OPEN_RETRY_S = 0.2
# A call that Serve gave to a replica that froze in that moment would wait for ever: after so long it is made anew.
OPEN_TIMEOUT_S = 5.0
# Where all replicas are full Serve lets a call wait: for a replica of its own choice a request waits so long at most.
PREFERRED_S = 0.25
IMPATIENT_S = 0.05
FALLBACK_RETRY_AFTER_S = 10.0
# A replica that broke a connection is passed over for so long where there are others: it is mostly about to end.
SUSPECT_S = 1.0
# How long a lease that is let go waits for the count of an aborted request.
COUNT_S = 2.0

ANYBODY = Ticket()


class LeasePool:
    """``lease_stream(preferred)`` starts a new lease call, on that replica if it has room; ``replicas()`` says how many
    run; ``ready_in_s()`` when one probably will; ``tell_held(requests)`` tells the model's card how many wait here."""

    def __init__(
        self,
        name: str,
        lease_stream: Callable[[str], Any],
        *,
        affinity: Affinity,
        limits: Callable[[], RequestLimits],
        replicas: Callable[[], int],
        ready_in_s: Callable[[], float | None],
        tell_held: Callable[[int], Awaitable[object]],
        watch: ReplicaWatch,
        keep_idle_s: float = KEEP_IDLE_S,
    ) -> None:
        self._name = name
        self._lease_stream = lease_stream
        self._affinity = affinity
        self._limits = limits
        self._replicas = replicas
        self._ready_in_s = ready_in_s
        self._watch_replicas = watch
        self._keep_idle_s = keep_idle_s
        self._idle: deque[Lease] = deque()
        self._busy: dict[str, set[Lease]] = {}  # by replica
        self._waiters: FairQueue[asyncio.Future[Lease]] = FairQueue()
        self._held = HeldReport(lambda: len(self._waiters), tell_held)
        self._openers: set[asyncio.Task[None]] = set()  # for whoever is next
        self._preferring: dict[asyncio.Task[Lease | None], str] = {}  # each for one request, by the replica it prefers
        self._reaper: asyncio.TimerHandle | None = None
        self._watchers: set[asyncio.Task[None]] = set()
        self._pulses = Pulses(limits, lambda replica: self._busy.get(replica, ()), self._holds, self._silenced)
        self._leaving: set[str] = set()
        self._hold_s = 1.0  # moving average of how long a request keeps its lease
        self._closed: errors.ModelyardError | None = None
        self._empty_until = -math.inf  # by what Serve's router says; infinite while it says that no replica runs
        loop = asyncio.get_running_loop()

        def hop(running: frozenset[str]) -> None:  # from the thread of Serve's router
            loop.call_soon_threadsafe(self._running_changed, running)

        self._unsubscribe = watch.subscribe(name, hop)

    @property
    def in_use(self) -> int:
        return sum(map(len, self._busy.values()))

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    @property
    def idle(self) -> int:
        return len(self._idle)

    def report(self) -> dict[str, int]:
        """What is held and at work for this model; all of it is 0 a moment after its last request."""
        return {
            "in_use": self.in_use,
            "waiting": self.waiting,
            "idle": self.idle,
            "openers": len(self._openers) + len(self._preferring),
            "watchers": len(self._watchers),
            "pulses": len(self._pulses.tasks),
        }

    @property
    def cold(self) -> bool:
        """No replica runs: the model is asleep or starting."""
        return not (self._watch_replicas.running(self._name) or self._replicas())

    def was_cold(self, since: float) -> bool:
        """No replica runs, or none did at some time after ``since``, on ``time.monotonic``."""
        return self.cold or self._empty_until >= since

    @property
    def patience_s(self) -> float:
        """How long a request may wait here now."""
        return self._limits().hold_s if self.cold else self._limits().wait_s

    async def acquire(
        self,
        since: float,
        ticket: Ticket = ANYBODY,
        at_most_s: float = math.inf,
        prefix: Callable[[], Prefix] = lambda: NOTHING,
    ) -> Lease:
        """A lease for one request, which has waited ``since`` then (on the event loop's clock). ``prefix``: how it
        begins; asked for where there is a choice.

        Raises ``TooManyRequests`` (``Unavailable`` while no replica runs) when too many wait: at once, or when it must
        go for another key's; ``Unavailable`` when it has waited for ``patience_s`` or ``at_most_s``. Who was admitted
        before may always wait: those are never more than the replicas had places.
        """
        if self._closed is not None:
            raise self._closed
        lease = await self._at_once(prefix, at_most_s) or await self._in_turn(since, ticket, at_most_s)
        self._affinity.given(lease.grant.replica, self._loads(), prefix)
        return lease

    async def _at_once(self, prefix: Callable[[], Prefix], at_most_s: float) -> Lease | None:
        """Where nobody waits: one on the replica that the request prefers, else an idle one where that is fair."""
        if self._waiters:
            return None
        preferred = self._affinity.preferred(self._loads(), prefix)
        lease = self._take_idle(preferred)
        if lease is None and preferred is not None and len(self._preferring) < MAX_OPENING:
            lease = await self._open_for_one(preferred, min(at_most_s, PREFERRED_S))
        if lease is None and preferred is not None and not self._waiters:
            lease = self._take_idle(None)
        return self._start_use(lease) if lease is not None else None

    def _idle_at(self, preferred: str | None) -> int | None:
        """Where in ``_idle`` one on ``preferred`` is; None: where the one is that any request may have."""
        idle = [lease.grant.replica for lease in self._idle]
        if preferred is not None:
            return idle.index(preferred) if preferred in idle else None
        return pick_idle(idle, {replica: len(leases) for replica, leases in self._busy.items()}, self._replicas())

    def _take_idle(self, preferred: str | None) -> Lease | None:
        if (at := self._idle_at(preferred)) is None:
            return None
        lease = self._idle[at]
        del self._idle[at]
        return lease

    async def _open_for_one(self, preferred: str, within_s: float) -> Lease | None:
        """A new lease for the caller alone, on ``preferred`` if it has room; None: there was none in time, or there is
        an idle one elsewhere: its slot may be the only one that is free."""
        opener = asyncio.create_task(self._new_lease(preferred))
        self._preferring[opener] = preferred
        opener.add_done_callback(self._preferring.pop)
        loop = asyncio.get_running_loop()
        until = loop.time() + within_s
        try:
            while (left := until - loop.time()) > 0:
                await asyncio.wait([opener], timeout=min(left, IMPATIENT_S))
                if opener.done():
                    return None if opener.cancelled() else opener.result()
                if self._idle_at(None) is not None:
                    break
        except BaseException:
            opener.add_done_callback(self._give_away)
            raise
        finally:
            opener.cancel()
        return None

    def _give_away(self, opener: "asyncio.Task[Lease | None]") -> None:
        if not opener.cancelled() and (lease := opener.result()) is not None:
            self._offer(lease)

    def _loads(self) -> dict[str, int]:
        """Requests of this gateway, under way or about to be, by replica that may get more."""
        running = self._watch_replicas.running(self._name) or frozenset()
        opening = Counter(self._preferring.values())
        return {
            replica: len(self._busy.get(replica, ())) + opening[replica]
            for replica in running
            if not self._watch_replicas.is_shunned(self._name, replica)
        }

    async def _in_turn(self, since: float, ticket: Ticket, at_most_s: float) -> Lease:
        if self._closed is not None:
            raise self._closed
        self._make_room(ticket)
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[Lease] = loop.create_future()
        self._waiters.push(ticket, waiter)
        self._held.begin()
        self._open_more()
        try:
            while not waiter.done():
                left = since + min(self.patience_s, at_most_s) - loop.time()
                if left <= 0:
                    raise TimeoutError
                await asyncio.wait([waiter], timeout=left)
            return waiter.result()
        except BaseException as error:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.release(waiter.result())  # served in the very moment in which its request gave up
            else:
                self._leave(waiter)
            if isinstance(error, TimeoutError):
                raise self._unavailable(f"No replica of {self._name} could take the request in time.") from None
            raise

    def release(self, lease: Lease) -> None:
        """The request is over; its lease serves the next one if its connection still can."""
        self._hold_s += 0.1 * (time.monotonic() - lease.since - self._hold_s)
        lease.on_leaving = None
        replica = lease.grant.replica
        self._busy[replica].discard(lease)
        if not self._busy[replica]:
            del self._busy[replica]
        usable = lease.connection.reusable and replica not in self._leaving
        if lease.ended or not usable or self._closed is not None:
            self._let_go(lease)
            self._open_more()
        else:
            self._offer(lease)

    def suspect(self, replica: str) -> None:
        """It broke a connection: give its leases to nobody for a moment."""
        self._shun(replica, SUSPECT_S)

    def elsewhere(self, replica: str) -> bool:
        """Whether another replica runs that could take over."""
        return bool((self._watch_replicas.running(self._name) or frozenset()) - {replica})

    def refuse_waiting(self, reason: errors.ModelyardError) -> None:
        """Whoever waits gets ``reason``."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(reason)
        self._waiters.clear()
        for opener in self._openers:
            opener.cancel()

    async def close(self, reason: errors.ModelyardError) -> None:
        """Let go of everything; whoever waits gets ``reason``."""
        self._closed = reason
        self._unsubscribe()
        self.refuse_waiting(reason)
        while self._idle:
            self._let_go(self._idle.pop())
        self._held.close()
        self._affinity.close()
        ours = (*self._openers, *self._preferring, *self._pulses.tasks.values())
        for task in ours:
            task.cancel()
        pending = [*ours, *self._watchers]
        if pending:
            await asyncio.wait(pending, timeout=5)

    def _make_room(self, ticket: Ticket) -> None:
        """Raises where too many wait and none of them goes for ``ticket``."""
        limits = self._limits()
        if ticket.admitted or len(self._waiters) < (limits.hold_requests if self.cold else limits.max_waiting):
            return
        full = self._full()
        evicted = self._waiters.evict_for(ticket)
        if evicted is None:
            raise full
        evicted.set_exception(full)

    def _full(self) -> errors.ModelyardError:
        waiting = len(self._waiters)
        if self.cold:
            return self._unavailable(f"No replica of {self._name} runs yet, and {waiting} requests wait.")
        return errors.TooManyRequests(
            f"Too many requests wait for {self._name}: {waiting}.", retry_after_s=self._queue_s
        )

    def _unavailable(self, message: str) -> errors.Unavailable:
        if self.cold:
            retry_after_s = self._ready_in_s() or FALLBACK_RETRY_AFTER_S
        else:
            retry_after_s = max(FALLBACK_RETRY_AFTER_S, self._queue_s)
        return errors.Unavailable(message, retry_after_s=retry_after_s)

    @property
    def _queue_s(self) -> float:
        """When those that wait now will probably have been served."""
        return self._hold_s * len(self._waiters) / max(1, self.in_use)

    def _start_use(self, lease: Lease) -> Lease:
        lease.since = time.monotonic()
        self._busy.setdefault(lease.grant.replica, set()).add(lease)
        return lease

    def _offer(self, lease: Lease) -> None:
        """Give a usable lease to whoever is next, else keep it for a moment."""
        while (waiter := self._waiters.pop()) is not None:
            if not waiter.done():
                waiter.set_result(self._start_use(lease))
                return
        lease.idle_since = time.monotonic()
        self._idle.append(lease)
        if self._reaper is None:
            self._reaper = asyncio.get_running_loop().call_later(self._keep_idle_s, self._reap)

    def _reap(self) -> None:
        self._reaper = None
        old = time.monotonic() - self._keep_idle_s
        self._drop_idle(lambda lease: lease.idle_since <= old)
        if self._idle:
            wait = self._idle[0].idle_since - old
            self._reaper = asyncio.get_running_loop().call_later(max(0.01, wait), self._reap)

    def _drop_idle(self, which: Callable[[Lease], bool]) -> None:
        for lease in [lease for lease in self._idle if which(lease)]:
            self._idle.remove(lease)
            self._let_go(lease)

    def _leave(self, waiter: "asyncio.Future[Lease]") -> None:
        self._waiters.remove(waiter)
        # Fewer waiters need fewer new leases; a call that waits in Serve's own queue must not stay behind.
        surplus = len(self._openers) - len(self._waiters)
        for opener in list(self._openers)[: max(0, surplus)]:
            opener.cancel()

    def _open_more(self) -> None:
        if self._closed is not None:
            return
        # One call is enough to wake a model, and stays alone until it has an answer.
        most = 1 if self.cold else MAX_OPENING
        while len(self._openers) < min(len(self._waiters), most):
            opener = asyncio.create_task(self._open())
            self._openers.add(opener)
            opener.add_done_callback(self._opened)

    def _opened(self, opener: "asyncio.Task[None]") -> None:
        self._openers.discard(opener)
        self._open_more()

    async def _open(self) -> None:
        """One new lease from Serve, offered to the waiters. Whoever still waits without one asks anew."""
        if (lease := await self._new_lease("")) is not None:
            self._offer(lease)

    async def _new_lease(self, preferred: str) -> Lease | None:
        """None: every replica is full, or there is none, or the one that Serve chose was lost; after a moment."""
        stream = self._lease_stream(preferred)
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                grant = await anext(stream)
                connection = await Connection.open(grant.host, grant.port)
        except asyncio.CancelledError:
            await _end_stream(stream)
            raise
        except TimeoutError:
            await _end_stream(stream)
            return None
        except Exception as error:
            # A replica that died while we asked, a restart, an application being deleted: ask again, a little later,
            # for as long as somebody waits. Their deadlines end it.
            await _end_stream(stream)
            logger.info("no lease on %s yet: %r", self._name, error)
            await asyncio.sleep(OPEN_RETRY_S)
            return None
        lease = Lease(grant, connection, stream)
        running = self._watch_replicas.running(self._name)
        if running is not None and grant.replica not in running:
            self._let_go(lease)  # it began to leave while we asked
            await asyncio.sleep(OPEN_RETRY_S)
            return None
        watcher = asyncio.create_task(self._watch(lease))
        self._watchers.add(watcher)  # the loop itself keeps only a weak reference
        watcher.add_done_callback(self._watchers.discard)
        self._pulses.feel(grant)
        return lease

    async def _watch(self, lease: Lease) -> None:
        """Wait for the replica's side of the lease to end: it died, or it is leaving."""
        with contextlib.suppress(Exception):
            async for event in lease.stream:
                if isinstance(event, Counted):
                    if (tell := lease.counting.pop(event.number, None)) is not None:
                        tell(event)
                    if lease.ended and not lease.counting:
                        break
        if lease.ended:
            lease.stream.cancel()
        lease.ended = True
        with contextlib.suppress(ValueError):
            self._idle.remove(lease)
            lease.connection.close()

    def _let_go(self, lease: Lease) -> None:
        lease.connection.close()
        if not lease.ended:
            lease.ended = True
            if lease.counting:  # of an aborted request: told in a moment, on this stream
                asyncio.get_running_loop().call_later(COUNT_S, lease.stream.cancel)
            else:
                lease.stream.cancel()

    # Replicas that leave

    def _running_changed(self, running: frozenset[str]) -> None:
        """Serve says which replicas may get new requests: the others are leaving, or gone."""
        if not running:
            self._empty_until = math.inf
        elif self._empty_until == math.inf:
            self._empty_until = time.monotonic()
        before = self._leaving
        here = {*self._busy, *(lease.grant.replica for lease in self._idle)}
        self._leaving = here - running
        self._drop_idle(lambda lease: lease.grant.replica in self._leaving)
        for replica in self._leaving - before:
            asyncio.get_running_loop().call_later(self._limits().grace_s, self._grace_is_over, replica)

    def _grace_is_over(self, replica: str) -> None:
        if replica in self._leaving:
            for lease in tuple(self._busy.get(replica, ())):
                if lease.on_leaving is not None:
                    lease.on_leaving()

    # Replicas that fall silent

    def _holds(self, replica: str) -> bool:
        return replica in self._busy or any(lease.grant.replica == replica for lease in self._idle)

    def _silenced(self, replica: str, silence_s: float) -> None:
        logger.warning("replica %s of %s has been silent for %g s: its requests move", replica, self._name, silence_s)
        self._shun(replica, 10 * silence_s)

    def _shun(self, replica: str, seconds: float) -> None:
        """Take no lease on ``replica`` for so long, where another one runs."""
        self._drop_idle(lambda lease: lease.grant.replica == replica)
        if self.elsewhere(replica):
            self._watch_replicas.shun(self._name, replica, time.monotonic() + seconds)


async def _end_stream(stream: Any) -> None:
    """Cancel a lease call and wait until Serve has taken it back."""
    stream.cancel()
    with contextlib.suppress(Exception, asyncio.CancelledError):
        async with asyncio.timeout(2):
            async for _ in stream:
                pass
