"""How a request's text begins, and which replicas have probably seen that beginning. Pure.

An engine reuses what it computed for the longest beginning that it has in its cache. So a prefix is a chain of hashes:
each covers all text up to its end, and equal hashes mean equal text from the first byte on. They are the same in every
process, so gateways may tell them each other.
"""

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice

# A prefix has so many blocks at most, of at most so many bytes: doubled after every DOUBLE_AFTER, so the first 1 KiB is
# seen finely and 255 KiB are seen in all.
MOST_BLOCKS = 32
FIRST_BYTES = 256
DOUBLE_AFTER = 4
# Blocks that a memory keeps, about 200 bytes each: thousands of conversations.
MOST_KNOWN = 65_536
# Requests of which gateways tell each other, 300 bytes each at most; what is older is passed on to nobody.
MOST_PASSED_ON = 4096
# A gateway that was not heard of for so long is not there.
SILENT_GATEWAY_S = 5.0

# A replica, and the hashes of what it was given.
News = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Prefix:
    """``hashes[i]`` covers the first ``ends[i]`` bytes (or tokens: only their ratio counts)."""

    hashes: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.hashes) != len(self.ends):
            raise ValueError(f"{len(self.hashes)} hashes, but {len(self.ends)} ends")


NOTHING = Prefix()


def of_text(parts: Iterable[bytes]) -> Prefix:
    """``parts``: the prompt, or the messages of a chat in order. A block ends with its part, so that a chat's next turn
    begins with all blocks of the turn before."""
    digest = blake2b(digest_size=8)
    hashes: list[int] = []
    ends: list[int] = []
    seen = 0
    for part in parts:
        left = memoryview(part)
        while left:
            if len(hashes) == MOST_BLOCKS:
                return Prefix(tuple(hashes), tuple(ends))
            size = FIRST_BYTES << len(hashes) // DOUBLE_AFTER
            block, left = left[:size], left[size:]
            seen += len(block)
            digest.update(block)
            hashes.append(int.from_bytes(digest.digest()))
            ends.append(seen)
    return Prefix(tuple(hashes), tuple(ends))


def of_session(name: bytes) -> Prefix:
    """Requests of one session belong together, whatever their text."""
    return Prefix((int.from_bytes(blake2b(name, digest_size=8, person=b"session").digest()),), (1,))


def of_adapter(name: str, prefix: Prefix) -> Prefix:
    """``prefix`` of a request to a LoRA adapter. What an engine has computed for it is of no use to others; and whoever
    has the adapter at all has half of what counts."""
    own = blake2b(name.encode(), digest_size=8, person=b"adapter").digest()
    hashes = [own, *(blake2b(block.to_bytes(8), digest_size=8, key=own).digest() for block in prefix.hashes)]
    half = prefix.ends[-1] if prefix.ends else 1
    return Prefix(tuple(map(int.from_bytes, hashes)), (half, *(half + end for end in prefix.ends)))


class Memory:
    """Which replicas were given which blocks. Bounded: the blocks that were used longest ago are forgotten."""

    def __init__(self, most: int = MOST_KNOWN) -> None:
        self._most = most
        self._replicas: OrderedDict[int, tuple[str, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._replicas)

    def remember(self, hashes: Sequence[int], replica: str, running: Collection[str]) -> None:
        """``replica`` was given a prefix, by whichever gateway. Replicas that are not ``running`` are forgotten."""
        # Deepest first: a block is of no use without those before it, so it must be forgotten before them.
        for block in reversed(hashes):
            known = self._replicas.get(block, ())
            if replica not in known or any(r not in running for r in known):
                self._replicas[block] = (*(r for r in known if r in running and r != replica), replica)
            self._replicas.move_to_end(block)
        while len(self._replicas) > self._most:
            self._replicas.popitem(last=False)

    def held(self, prefix: Prefix) -> dict[str, float]:
        """The share of ``prefix`` that each replica was given before, from its beginning on; more than 0."""
        held: dict[str, float] = {}
        for block, end in zip(prefix.hashes, prefix.ends, strict=True):
            known = self._replicas.get(block)
            if known is None:
                break
            for replica in known:
                held[replica] = end / prefix.ends[-1]
        return held


@dataclass(frozen=True, slots=True)
class Passed:
    """``news``: what other gateways told. ``upto``: to be said the next time. ``alone``: there is no other gateway."""

    news: tuple[News, ...]
    upto: int
    alone: bool


class Exchange:
    """Passes on between gateways what each gave to which replica."""

    def __init__(self, most: int = MOST_PASSED_ON) -> None:
        self._log: deque[tuple[str, News]] = deque(maxlen=most)
        self._count = 0  # of all that were ever told
        self._heard: dict[str, float] = {}

    def swap(self, gateway: str, news: Iterable[News], upto: int, now: float) -> Passed:
        """``gateway`` tells its news and gets what others told since ``upto``: what it was last told, at first 0.
        ``now``: seconds, monotonic."""
        self._heard = {g: at for g, at in self._heard.items() if at > now - SILENT_GATEWAY_S} | {gateway: now}
        told = [(gateway, one) for one in news]
        self._log.extend(told)
        self._count += len(told)
        # An ``upto`` that is ahead is of an exchange that is gone: this one has told it nothing yet.
        fresh = self._count - (upto if upto <= self._count else 0)
        since = islice(self._log, max(0, len(self._log) - fresh), None)
        others = tuple(one for teller, one in since if teller != gateway)
        return Passed(others, self._count, len(self._heard) == 1)
