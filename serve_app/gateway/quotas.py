"""A gateway's side of the keys' quotas: it draws on the ledgers in the models' cards and settles with what was used.

A request is charged an estimate when it comes, and what the replicas counted when it is over: for an aborted one that
is what was generated until then.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from serve_app import errors, quota
from serve_app.gateway.tally import Tally
from serve_app.keys import Caller
from serve_app.quota import Amount, Drawn, Limits, Purse

logger = logging.getLogger("ray.serve")

# A card that does not answer in time lets the request in: quotas are no reason to fail.
DRAW_TIMEOUT_S = 1.0
# After a refusal the card is not asked again for so long, however many requests come.
REFUSED_S = 0.2
# A purse that nobody used for so long goes back.
KEEP_S = 1.0

RATE_LIMIT_HEADERS = tuple(
    f"x-ratelimit-{what}-{kind}" for kind in ("requests", "tokens") for what in ("limit", "remaining", "reset")
)

Draw = Callable[[str, str, Limits, Amount, Amount], Awaitable[Drawn]]


@dataclass(eq=False)
class Charge:
    """One request's. ``headers``: what its client is told of its quota. ``tally``: what it costs in truth."""

    model: str
    caller: Caller
    estimate: float
    tally: Tally
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)


class Quotas:
    """``draw(model, key, limits, need, more)``: one call to the model's card."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw
        self._purses: dict[tuple[str, str], Purse] = {}
        self._locks: dict[tuple[str, str], asyncio.Lock] = {}
        self._limits: dict[tuple[str, str], Limits] = {}
        self._unsettled = 0
        self._giving: asyncio.Task[None] | None = None

    @property
    def open(self) -> int:
        """Requests that are not settled, and purses that are not given back."""
        return self._unsettled + len(self._purses)

    async def enter(self, caller: Caller, model: str, tokens: float, tally: Tally) -> Charge:
        """Charge a request of about so many tokens; raises ``TooManyRequests``."""
        limits, at = caller.limits, (caller.name, model)
        purse = self._purse(caller, model)
        # More than a minute's worth is never in a purse: such a request needs the whole bucket.
        need = tokens if limits.tokens is None else min(tokens, limits.tokens)
        if not purse.covers(limits, need):
            async with self._locks.setdefault(at, asyncio.Lock()):
                if not purse.covers(limits, need):
                    await self._fill(purse, caller, model, limits, need)
        purse.spend(1, tokens)
        purse.used_at = time.monotonic()
        self._give_back_later()
        return Charge(model, caller, tokens, tally, headers=_headers(limits, purse))

    def settle(self, charge: Charge) -> None:
        """The request is over: charge what was used in place of the estimate, once that is known."""
        self._unsettled += 1
        charge.tally.then(lambda: self._settle(charge))

    async def _fill(self, purse: Purse, caller: Caller, model: str, limits: Limits, tokens: float) -> None:
        now = time.monotonic()
        if now < purse.refused_until:
            raise _exceeded(caller, model, limits, purse, purse.ready_at - now)
        need = purse.need(limits, tokens)
        try:
            drawn = await asyncio.wait_for(
                self._draw(model, caller.name, limits, need, quota.spare(limits)), DRAW_TIMEOUT_S
            )
        except Exception as error:
            logger.warning(
                "the quota of %s on %s cannot be asked for, so the request goes in: %r", caller.name, model, error
            )
            return
        purse.add(drawn)
        if drawn.wait_s > 0:
            now = time.monotonic()
            purse.refused_until, purse.ready_at = now + min(REFUSED_S, drawn.wait_s), now + drawn.wait_s
            raise _exceeded(caller, model, limits, purse, drawn.wait_s)

    def _purse(self, caller: Caller, model: str) -> Purse:
        at = (caller.name, model)
        self._limits[at] = caller.limits
        return self._purses.setdefault(at, Purse())

    def _settle(self, charge: Charge) -> None:
        self._unsettled -= 1
        # Only now: the one of its beginning may have been given back meanwhile.
        purse = self._purse(charge.caller, charge.model)
        if not charge.tally.asked:  # it reached no engine
            purse.spend(-1, -charge.estimate)
        elif charge.tally.used is not None:  # a replica that died counts nothing: then the estimate stands
            purse.spend(0, charge.tally.used - charge.estimate)
        purse.used_at = time.monotonic()
        self._give_back_later()

    def _give_back_later(self) -> None:
        if self._giving is None:
            self._giving = asyncio.create_task(self._give_back())

    async def _give_back(self) -> None:
        while self._purses:
            await asyncio.sleep(KEEP_S)
            for at, purse in list(self._purses.items()):
                if time.monotonic() - purse.used_at < KEEP_S:
                    continue
                limits = self._limits[at]
                returned = Amount(
                    0.0 if limits.requests is None else -purse.requests, 0.0 if limits.tokens is None else -purse.tokens
                )
                async with self._locks.setdefault(at, asyncio.Lock()):
                    with contextlib.suppress(Exception):
                        key, model = at
                        drawn = await asyncio.wait_for(
                            self._draw(model, key, limits, returned, Amount()), DRAW_TIMEOUT_S
                        )
                        if drawn.wait_s > 0:
                            continue  # a debt that the ledger cannot pay yet
                    if purse.used_at < time.monotonic() - KEEP_S:
                        for kept in (self._purses, self._locks, self._limits):
                            kept.pop(at, None)
        self._giving = None


def _exceeded(caller: Caller, model: str, limits: Limits, purse: Purse, wait_s: float) -> errors.TooManyRequests:
    error = errors.TooManyRequests(
        f"The key {caller.name!r} has used up its requests or tokens per minute on {model}.",
        code="rate_limit_exceeded",
        retry_after_s=wait_s,
    )
    error.headers = _headers(limits, purse)
    return error


def _headers(limits: Limits, purse: Purse) -> list[tuple[bytes, bytes]]:
    """The usual ones. ``reset``: when all of it is there again."""
    found = []
    for kind, limit, left in (
        ("requests", limits.requests, purse.requests + purse.left.requests),
        ("tokens", limits.tokens, purse.tokens + purse.left.tokens),
    ):
        if limit is not None:
            left = min(limit, max(0.0, left))
            reset_s = math.ceil((limit - left) / limit * quota.MINUTE_S)
            told = (("limit", f"{limit:.0f}"), ("remaining", f"{math.floor(left)}"), ("reset", f"{reset_s}s"))
            found += [(f"x-ratelimit-{what}-{kind}".encode(), value.encode()) for what, value in told]
    return found
