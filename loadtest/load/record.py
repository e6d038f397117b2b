"""What a load test keeps: every answer, and what the endpoint said of itself meanwhile. One JSON file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from loadtest.load.scenario import Scenario, Target


class Answer(NamedTuple):
    """One request. ``came``: when it was due, in s from the test's begin. Other times are in ms and count from then.

    ``late``: how much later the client sent it. ``first``, ``last``: its tokens; where it failed, ``last`` is when.
    ``gap``: the longest time between two of its events. ``tokens``, ``prompt``: by the answer's own usage. ``error``:
    what kind, empty for an answer that is whole.
    """

    traffic: str
    came: float
    late: float
    first: float | None
    last: float
    gap: float
    tokens: int
    prompt: int
    events: int
    error: str

    @property
    def ended(self) -> float:
        """Seconds from the test's begin to its last token, or to when it failed."""
        return self.came + self.last / 1000

    @property
    def itl(self) -> float | None:
        """Mean ms between two tokens (inter-token latency; others call it TPOT). Events often have several."""
        if self.first is None or self.tokens < 2:
            return None
        return (self.last - self.first) / (self.tokens - 1)

    def miss(self, target: Target) -> str:
        """Why it is not good; empty if it is."""
        if self.error or self.first is None:
            return "failed"
        if self.first > target.ttft_ms:
            return "first token late"
        if (self.itl or 0.0) > target.itl_ms:
            return "tokens slow"
        return ""


class Sample(NamedTuple):
    """What ``/ready`` said of one model, ``at`` s from the test's begin. ``held``: requests that wait at gateways.
    ``waiting``: those in its engines' own queues; None: no engine told."""

    at: float
    model: str
    state: str
    replicas: int
    held: int
    waiting: int | None


@dataclass(frozen=True)
class Run:
    """A whole test. ``seconds``: how long requests came, less than the scenario's where it was interrupted. ``left``:
    requests that were then open, and are in no figure."""

    name: str
    about: Mapping[str, Any]
    scenario: Scenario
    seconds: float
    left: int
    answers: Sequence[Answer]
    samples: Sequence[Sample]

    @property
    def whole(self) -> bool:
        return self.seconds >= self.scenario.seconds


def write(file: Path, run: Run, report: Mapping[str, Any]) -> None:
    """``report``: the figures, which are there to be read and are made anew from the rest."""
    document = {
        "name": run.name,
        "about": run.about,
        "scenario": run.scenario.model_dump(mode="json"),
        "seconds": run.seconds,
        "left": run.left,
        "report": report,
        "fields": {"answers": Answer._fields, "samples": Sample._fields},
        "answers": run.answers,
        "samples": run.samples,
    }
    # One row a line.
    parts = [f"{json.dumps(key)}: {_rows(value)}" for key, value in document.items()]
    file.write_text("{" + ",\n".join(parts) + "}\n")


def _rows(value: Any) -> str:
    if not isinstance(value, list):
        return json.dumps(value)
    return "[\n" + ",\n".join(json.dumps(each) for each in value) + "\n]"


def read(file: Path) -> Run:
    """Raises ``ValueError`` where it is no such file, ``OSError``."""
    try:
        document = json.loads(file.read_text())
        return Run(
            document["name"],
            document["about"],
            Scenario.model_validate(document["scenario"]),
            document["seconds"],
            document["left"],
            [Answer(*row) for row in document["answers"]],
            [Sample(*row) for row in document["samples"]],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is no load test's result: {error}") from error
