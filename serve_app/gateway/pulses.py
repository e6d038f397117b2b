"""Finds replicas that fall silent: each one at work is asked for a sign of life, and each answer must go on."""

import asyncio
from collections.abc import Callable, Collection

from serve_app.config import RequestLimits
from serve_app.gateway.lease import Lease
from serve_app.gateway.upstream import Connection, ConnectionBroken, Silent
from serve_app.lease import ALIVE_PATH, LEASE_HEADER, Grant

# How often a replica at work is asked for a sign of life.
PULSE_S = 1.0


class Pulses:
    """One model's. ``busy(replica)``: the leases on it that requests use now; ``holds(replica)``: whether there are any
    leases on it; ``silenced(replica, seconds)`` is told of one that gave no sign for so long. ``tasks`` are by replica.

    Requests on what is silent are interrupted with ``Silent``.
    """

    def __init__(
        self,
        limits: Callable[[], RequestLimits],
        busy: Callable[[str], Collection[Lease]],
        holds: Callable[[str], bool],
        silenced: Callable[[str, float], None],
    ) -> None:
        self._limits = limits
        self._busy = busy
        self._holds = holds
        self._silenced = silenced
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def feel(self, grant: Grant) -> None:
        """A lease on its replica was taken: look at it, for as long as there are any."""
        if grant.replica not in self.tasks:
            self.tasks[grant.replica] = asyncio.create_task(self._pulse(grant))

    async def _pulse(self, grant: Grant) -> None:
        connection: Connection | None = None
        try:
            while self._holds(grant.replica):
                limits = self._limits()
                if busy := self._busy(grant.replica):
                    token = next(iter(busy)).grant.token
                    head = f"GET {ALIVE_PATH} HTTP/1.1\r\nhost: {grant.host}\r\n".encode()
                    head += LEASE_HEADER + b": " + token.encode() + b"\r\n\r\n"
                    try:
                        async with asyncio.timeout(limits.silence_s):
                            if connection is None or not connection.reusable:
                                connection = await Connection.open(grant.host, grant.port)
                            await connection.request(head, b"")
                            await connection.read()
                    except TimeoutError:
                        self._silenced(grant.replica, limits.silence_s)
                        for lease in tuple(self._busy(grant.replica)):
                            lease.connection.interrupt(Silent(f"silent for {limits.silence_s:g} s"))
                    except ConnectionBroken:
                        connection = None  # it died, which its leases and requests notice by themselves
                    self._look_for_gaps(grant.replica, limits.token_gap_s)
                await asyncio.sleep(min(PULSE_S, limits.silence_s / 2))
        finally:
            del self.tasks[grant.replica]
            if connection is not None:
                connection.close()

    def _look_for_gaps(self, replica: str, token_gap_s: float) -> None:
        old = asyncio.get_running_loop().time() - token_gap_s
        for lease in tuple(self._busy(replica)):
            connection = lease.connection
            if connection.answering and not connection.paused and connection.last_data < old:
                connection.interrupt(Silent(f"no token for {token_gap_s:g} s"))
