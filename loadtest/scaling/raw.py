"""Raw results as a file: a line about the run, then one line of JSON per replay."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from loadtest.scaling.outcome import Outcome, Series
from loadtest.scaling.study import Choice, Fixed, Found, Job, Modelyards
from loadtest.scaling.systems import ServeSettings

_KINDS = {"modelyard": Modelyards, "fixed": Fixed, "serve": ServeSettings}


def write(file: Path, about: dict[str, Any], found: Sequence[Found], with_series: Iterable[Job]) -> None:
    """``with_series``: the replays whose course over time is kept."""
    kept = set(with_series)
    lines = [json.dumps(about)]
    for one in sorted(found, key=lambda f: (f.job.scenario, f.job.seed, repr(f.job.choice))):
        kind = next(name for name, cls in _KINDS.items() if isinstance(one.job.choice, cls))
        row = asdict(one.job) | {"choice": {"kind": kind} | asdict(one.job.choice), "outcome": asdict(one.outcome)}
        if one.series is not None and one.job in kept:
            row["series"] = asdict(one.series)
        lines.append(json.dumps(row))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n")


def read(file: Path) -> tuple[dict[str, Any], list[Found]]:
    about, *rows = (json.loads(line) for line in file.read_text().splitlines())
    return about, [_found(row) for row in rows]


def _found(row: dict[str, Any]) -> Found:
    choice = dict(row["choice"])
    made: Choice = _KINDS[choice.pop("kind")](**choice)
    job = Job(row["scenario"], made, row["seed"], row["start_s"])
    series = Series(**row["series"]) if "series" in row else None
    return Found(job, Outcome(**row["outcome"]), series)
