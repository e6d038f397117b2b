"""Leases on one model's replicas, pooled like database connections.

A lease is one open streaming call to the model through its Serve handle (what Serve counts) together with one HTTP
connection to the replica that it chose (where the bytes go). A freed lease is kept for a moment and given to the next
request, so under load no Serve call is on a request's path; an idle one is let go, so Serve's counts stay true.

Who waits is served in order of arrival. One owner (the gateway's event loop) and no locks.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from serve_app import errors
from serve_app.config import RequestLimits
from serve_app.gateway.upstream import Connection
from serve_app.lease import Grant
from serve_app.routing import pick_idle

logger = logging.getLogger("ray.serve")

KEEP_IDLE_S = 1.0
# Leases being asked for at once: enough to fill a replica quickly, few enough not to storm Serve's router when a
# thousand requests wait for a model that is starting.
MAX_OPENING = 32
OPEN_RETRY_S = 0.2
FALLBACK_RETRY_AFTER_S = 10.0


@dataclass(slots=True, eq=False)
class Lease:
    grant: Grant
    connection: Connection
    stream: Any  # Serve's response generator: closing it ends the lease
    ended: bool = False
    idle_since: float = 0.0
    since: float = 0.0  # when its present request began


class LeasePool:
    """``model`` leases. ``lease_stream()`` starts a new lease call; ``replicas()`` says how many replicas run."""

    def __init__(
        self,
        name: str,
        lease_stream: Callable[[], Any],
        *,
        limits: Callable[[], RequestLimits],
        replicas: Callable[[], int],
        start_s: Callable[[], float | None],
        keep_idle_s: float = KEEP_IDLE_S,
    ) -> None:
        self._name = name
        self._lease_stream = lease_stream
        self._limits = limits
        self._replicas = replicas
        self._start_s = start_s
        self._keep_idle_s = keep_idle_s
        self._idle: deque[Lease] = deque()
        self._in_use: Counter[str] = Counter()
        self._waiters: deque[asyncio.Future[Lease]] = deque()
        self._openers: set[asyncio.Task[None]] = set()
        self._reaper: asyncio.TimerHandle | None = None
        self._watchers: set[asyncio.Task[None]] = set()
        self._hold_s = 1.0  # moving average of how long a request keeps its lease
        self._closed: errors.ModelyardError | None = None

    @property
    def in_use(self) -> int:
        return sum(self._in_use.values())

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    @property
    def idle(self) -> int:
        return len(self._idle)

    async def acquire(self, deadline: float) -> Lease:
        """A lease for one request. ``deadline``: on the event loop's clock.

        Raises ``TooManyRequests`` at once when too many wait, ``Unavailable`` when the deadline passes first.
        """
        if self._closed is not None:
            raise self._closed
        if not self._waiters:
            at = pick_idle([lease.grant.replica for lease in self._idle], self._in_use, self._replicas())
            if at is not None:
                lease = self._idle[at]
                del self._idle[at]
                return self._start_use(lease)
        if len(self._waiters) >= self._limits().max_waiting:
            raise errors.TooManyRequests(
                f"Too many requests wait for {self._name}: {len(self._waiters)}.",
                retry_after_s=self._hold_s * len(self._waiters) / max(1, self.in_use),
            )
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[Lease] = loop.create_future()
        self._waiters.append(waiter)
        self._open_more()
        try:
            async with asyncio.timeout_at(deadline):
                return await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.release(waiter.result())  # served in the very moment in which its request gave up
            else:
                self._leave(waiter)
            if isinstance(error, TimeoutError):
                raise self._unavailable() from None
            raise

    def release(self, lease: Lease) -> None:
        """The request is over; its lease serves the next one if its connection still can."""
        self._hold_s += 0.1 * (time.monotonic() - lease.since - self._hold_s)
        self._in_use[lease.grant.replica] -= 1
        if not self._in_use[lease.grant.replica]:
            del self._in_use[lease.grant.replica]
        if lease.ended or not lease.connection.reusable or self._closed is not None:
            self._let_go(lease)
            self._open_more()
        else:
            self._offer(lease)

    async def close(self, reason: errors.ModelyardError) -> None:
        """Let go of everything; whoever waits gets ``reason``."""
        self._closed = reason
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(reason)
        self._waiters.clear()
        while self._idle:
            self._let_go(self._idle.pop())
        for opener in self._openers:
            opener.cancel()
        pending = [*self._openers, *self._watchers]
        if pending:
            await asyncio.wait(pending, timeout=5)

    def _unavailable(self) -> errors.Unavailable:
        usual = self._start_s()
        return errors.Unavailable(
            f"No replica of {self._name} could take the request in time.",
            retry_after_s=usual if usual is not None and self._replicas() == 0 else FALLBACK_RETRY_AFTER_S,
        )

    def _start_use(self, lease: Lease) -> Lease:
        lease.since = time.monotonic()
        self._in_use[lease.grant.replica] += 1
        return lease

    def _offer(self, lease: Lease) -> None:
        """Give a usable lease to whoever waits longest, else keep it for a moment."""
        while self._waiters:
            waiter = self._waiters.popleft()
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
        for lease in [lease for lease in self._idle if lease.idle_since <= old]:
            self._idle.remove(lease)
            self._let_go(lease)
        if self._idle:
            wait = self._idle[0].idle_since - old
            self._reaper = asyncio.get_running_loop().call_later(max(0.01, wait), self._reap)

    def _leave(self, waiter: "asyncio.Future[Lease]") -> None:
        with contextlib.suppress(ValueError):
            self._waiters.remove(waiter)
        # Fewer waiters need fewer new leases; a call that waits in Serve's own queue must not stay behind.
        surplus = len(self._openers) - len(self._waiters)
        for opener in list(self._openers)[: max(0, surplus)]:
            opener.cancel()

    def _open_more(self) -> None:
        if self._closed is not None:
            return
        while len(self._openers) < min(len(self._waiters), MAX_OPENING):
            opener = asyncio.create_task(self._open())
            self._openers.add(opener)
            opener.add_done_callback(self._opened)

    def _opened(self, opener: "asyncio.Task[None]") -> None:
        self._openers.discard(opener)
        self._open_more()

    async def _open(self) -> None:
        """One new lease from Serve, offered to the waiters. Waits as long as somebody waits for it."""
        stream = self._lease_stream()
        try:
            grant = await anext(stream)
            connection = await Connection.open(grant.host, grant.port)
        except asyncio.CancelledError:
            await _end_stream(stream)
            raise
        except Exception as error:
            # A replica that died while we asked, a restart, an application being deleted: ask again, a little later,
            # for as long as somebody waits. Their deadlines end it.
            await _end_stream(stream)
            logger.info("no lease on %s yet: %r", self._name, error)
            await asyncio.sleep(OPEN_RETRY_S)
            return
        lease = Lease(grant, connection, stream)
        watcher = asyncio.create_task(self._watch(lease))
        self._watchers.add(watcher)  # the loop itself keeps only a weak reference
        watcher.add_done_callback(self._watchers.discard)
        self._offer(lease)

    async def _watch(self, lease: Lease) -> None:
        """Wait for the replica's side of the lease to end: it died, or it is leaving."""
        with contextlib.suppress(Exception):
            async for _event in lease.stream:
                pass
        lease.ended = True
        with contextlib.suppress(ValueError):
            self._idle.remove(lease)
            lease.connection.close()

    def _let_go(self, lease: Lease) -> None:
        lease.connection.close()
        if not lease.ended:
            lease.ended = True
            lease.stream.cancel()


async def _end_stream(stream: Any) -> None:
    """Cancel a lease call and wait until Serve has taken it back."""
    stream.cancel()
    with contextlib.suppress(Exception, asyncio.CancelledError):
        async with asyncio.timeout(2):
            async for _ in stream:
                pass
