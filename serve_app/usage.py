"""What each key used of each model on each day: the sums, and the lines of the files that keep them. Pure.

Days are those of UTC, written as 2026-11-30, so that they sort as text.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, date, datetime

from serve_app import errors

# Longest that one question may ask about.
MAX_DAYS = 366


@dataclass(frozen=True, slots=True)
class Use:
    """Of requests that are over. ``errors``: those that ended in one, which a client that left is not. ``uncounted``:
    those that reached an engine that could not tell what they cost: their tokens are missing in the sums."""

    requests: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    uncounted: int = 0

    def __add__(self, other: "Use") -> "Use":
        return Use(
            self.requests + other.requests,
            self.errors + other.errors,
            self.prompt_tokens + other.prompt_tokens,
            self.generated_tokens + other.generated_tokens,
            self.uncounted + other.uncounted,
        )


NOTHING = Use()
FIELDS = tuple(field.name for field in fields(Use))

# Of one day, by the names of key (empty: no keys were configured) and model.
Day = dict[tuple[str, str], Use]
# ``told(key, model, use)``: of one request, once.
Told = Callable[[str, str, Use], None]


def day_of(unix_s: float) -> str:
    """The day of a time in Unix seconds."""
    return datetime.fromtimestamp(unix_s, UTC).date().isoformat()


def add(day: Day, key: str, model: str, use: Use) -> None:
    day[key, model] = day.get((key, model), NOTHING) + use


def text(day: Mapping[tuple[str, str], Use]) -> str:
    """One line of JSON per key and model; ``read`` takes it back."""
    rows = ({"key": key, "model": model} | asdict(use) for (key, model), use in day.items())
    return "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)


def read(lines: Iterable[str], into: Day) -> None:
    """Add the ``lines`` of a file. Raises ``ValueError`` where it is damaged."""
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            # Another version's file may know more or less of a request.
            add(into, row["key"], row["model"], Use(*(row.get(field, 0) for field in FIELDS)))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"line {number} is no usage: {error!r}") from error


def answer(days: Mapping[str, Day], since: str, until: str, key: str | None, complete: bool) -> bytes:
    """What ``/usage`` answers, as JSON; docs/observability.md describes it. ``key``: of this one alone."""
    rows = (
        {"day": day, "key": name or None, "model": model} | asdict(use)
        for day, sums in sorted(days.items())
        for (name, model), use in sorted(sums.items())
        if key in (None, name)
    )
    head = json.dumps({"since": since, "until": until, "complete": complete})
    # Row by row: one call for a year of a large fleet would keep the interpreter from all that streams.
    return f'{head[:-1]}, "usage": [{", ".join(map(json.dumps, rows))}]}}'.encode()


def span(since: str | None, until: str | None, today: str) -> tuple[str, str]:
    """First and last day of a question, both included; by default the month until ``today``, or until ``until``. Raises
    ``InvalidRequest``."""
    last = date.fromisoformat(today) if until is None else _day("until", until)
    first = last.replace(day=1) if since is None else _day("since", since)
    if first > last:
        raise errors.InvalidRequest(f"since: {first} is after {last}.", param="since")
    if (last - first).days >= MAX_DAYS:
        raise errors.InvalidRequest(f"since: ask about {MAX_DAYS} days at most.", param="since")
    return first.isoformat(), last.isoformat()


def _day(name: str, written: str) -> date:
    try:
        return datetime.strptime(written, "%Y-%m-%d").date()
    except ValueError:
        what = f"{name}: {written[:32]!r} is no day; write it like 2026-11-30."
        raise errors.InvalidRequest(what, param=name) from None
