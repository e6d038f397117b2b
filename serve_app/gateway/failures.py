"""What went wrong lately with requests to this gateway, in memory: for people who look, not for counting."""

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass

# Of each model, so that one whose requests all fail hides no other's.
KEPT = 20


@dataclass(frozen=True, slots=True)
class Failure:
    """A request to ``model`` that ended in an error, before its answer or in it. Nothing of what was asked is in it.

    ``at``: when it ended, Unix time in seconds. ``reason``: as in the metrics. ``id``: the request's; may be empty.
    """

    at: float
    model: str
    route: str
    status: int
    reason: str
    id: str


class Failures:
    """The last ``KEPT`` of each model. What named no model that exists is not kept: anybody could flood it."""

    def __init__(self) -> None:
        self._last: defaultdict[str, deque[Failure]] = defaultdict(lambda: deque(maxlen=KEPT))

    def add(self, failure: Failure) -> None:
        self._last[failure.model].append(failure)

    def of(self, models: Iterable[str]) -> list[Failure]:
        """Those of ``models``, the newest first."""
        kept = (failure for model in models for failure in self._last.get(model, ()))
        return sorted(kept, key=lambda failure: failure.at, reverse=True)
