"""Where the policies of one Serve controller leave each other what they know, by application.

Serve pickles the policies themselves by value, each with a copy of its module's globals; this module is imported.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

# Signals this old say nothing about now.
STALE_S = 10.0


@dataclass(frozen=True, slots=True)
class Told:
    """``stamp``: the teller's own time, to tell new from old. ``at``: when it was heard, on ``time.monotonic``."""

    numbers: Mapping[str, float]
    stamp: float
    at: float


_BOARD: dict[str, Told] = {}


def tell(app: str, numbers: Mapping[str, float], stamp: float) -> None:
    before = _BOARD.get(app)
    if before is None or stamp != before.stamp:
        _BOARD[app] = Told(numbers, stamp, time.monotonic())


def read(app: str) -> Mapping[str, float] | None:
    """The newest numbers of ``app``; None where there are none, or none that are fresh."""
    told = _BOARD.get(app)
    return told.numbers if told is not None and time.monotonic() - told.at < STALE_S else None
