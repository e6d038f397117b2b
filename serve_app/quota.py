"""Requests and tokens per minute of one key on one model. Pure: the time is given in.

The truth is in one place, the model's card: a ``Ledger`` with two token buckets per key. Each gateway replica draws
from it into a ``Purse``, as much as a request needs and a twentieth of the limit more, so that most requests ask
nobody. What is drawn is gone from the ledger, so all gateways together never spend more than the limit; a purse that
is not used is given back after a moment.
"""

from dataclasses import dataclass, field

MINUTE_S = 60.0
# What a gateway draws beyond what it needs, as a share of the limit per minute.
SPARE = 0.05


@dataclass(frozen=True, slots=True)
class Amount:
    """Requests, and tokens of prompts and answers together."""

    requests: float = 0.0
    tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Per minute, and at once after a minute of silence; None: unlimited."""

    requests: float | None = None
    tokens: float | None = None

    def __bool__(self) -> bool:
        return self.requests is not None or self.tokens is not None


UNLIMITED = Limits()


@dataclass(frozen=True, slots=True)
class Drawn:
    """``granted``: what the gateway may spend. ``left``: what the ledger has still. ``wait_s``: 0 where all of it was
    granted, else in how long it could be."""

    granted: Amount
    left: Amount
    wait_s: float = 0.0


@dataclass(slots=True)
class _Bucket:
    level: float
    at: float

    def fill(self, limit: float, now: float) -> None:
        self.level = min(limit, self.level + limit / MINUTE_S * max(0.0, now - self.at))
        self.at = now


@dataclass(slots=True)
class Ledger:
    """Buckets by key and kind. One that is full again is forgotten."""

    _buckets: dict[tuple[str, str], _Bucket] = field(default_factory=dict)

    def draw(self, key: str, limits: Limits, need: Amount, spare: Amount, now: float) -> Drawn:
        """``need`` of both kinds or nothing, and as much of ``spare`` as there is. Negative needs give back.

        A need larger than a limit is granted by a full bucket, which is in debt then: else nothing so large would ever
        run.
        """
        kinds = [
            (name, limit, wanted, more)
            for name, limit, wanted, more in (
                ("requests", limits.requests, need.requests, spare.requests),
                ("tokens", limits.tokens, need.tokens, spare.tokens),
            )
            if limit is not None
        ]
        found = {name: self._bucket(key, name, limit, now) for name, limit, _, _ in kinds}
        waits = [(min(wanted, limit) - found[name].level) / limit * MINUTE_S for name, limit, wanted, _ in kinds]
        wait_s = max(waits, default=0.0)
        granted = {"requests": need.requests, "tokens": need.tokens} if wait_s <= 0 else {}
        for name, limit, _, more in kinds if granted else ():
            bucket = found[name]
            bucket.level = min(limit, bucket.level - granted[name])
            extra = min(more, max(0.0, bucket.level))
            bucket.level -= extra
            granted[name] += extra
        left = {name: bucket.level for name, bucket in found.items()}
        for name, limit, _, _ in kinds:
            if found[name].level >= limit:
                del self._buckets[key, name]
        return Drawn(Amount(**granted), Amount(**left), max(0.0, wait_s))

    def _bucket(self, key: str, kind: str, limit: float, now: float) -> _Bucket:
        bucket = self._buckets.setdefault((key, kind), _Bucket(limit, now))
        bucket.fill(limit, now)
        return bucket


@dataclass(slots=True)
class Purse:
    """What one gateway has drawn for one key on one model and not spent; below 0 where answers were longer than
    estimated."""

    requests: float = 0.0
    tokens: float = 0.0
    left: Amount = Amount()  # in the ledger, as it said last
    refused_until: float = 0.0
    ready_at: float = 0.0
    used_at: float = 0.0

    def covers(self, limits: Limits, tokens: float) -> bool:
        """One more request of so many tokens."""
        return (limits.requests is None or self.requests >= 1) and (limits.tokens is None or self.tokens >= tokens)

    def need(self, limits: Limits, tokens: float) -> Amount:
        """What a request lacks."""
        return Amount(
            0.0 if limits.requests is None else 1 - self.requests,
            0.0 if limits.tokens is None else tokens - self.tokens,
        )

    def add(self, drawn: Drawn) -> None:
        self.requests += drawn.granted.requests
        self.tokens += drawn.granted.tokens
        self.left = drawn.left

    def spend(self, requests: float, tokens: float) -> None:
        self.requests -= requests
        self.tokens -= tokens


def spare(limits: Limits) -> Amount:
    # Whole requests: parts of one at every gateway would be nobody's.
    return Amount(SPARE * (limits.requests or 0.0) // 1, SPARE * (limits.tokens or 0.0))
