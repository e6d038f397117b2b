"""Which engines to start for the rows that are wanted, and which of them at once. No clock, no processes."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.powers.rows import Row, Variant
from serve_app.config import ModelArgs
from serve_app.planning.engine_settings import UTILIZATION


@dataclass(frozen=True)
class Start:
    """``models``: the ``args`` of each model's entry. ``takes``: the rows that are measured on it, and what each calls
    this variant."""

    models: tuple[Mapping[str, Any], ...]
    takes: tuple[tuple[Row, str], ...]

    def __str__(self) -> str:
        row, variant = self.takes[0]
        more = f" and {len(self.takes) - 1} more" if len(self.takes) > 1 else ""
        return f"{row.name}, {variant}{more}"

    @property
    def share(self) -> float:
        """Of one GPU's memory; 0: it needs none."""
        args = [ModelArgs.model_validate(dict(one)) for one in self.models]
        on_gpus = [one for one in args if one.resources.num_gpus]
        if any(one.workers > 1 for one in on_gpus):
            return 1.0
        return sum(one.gpu_memory_utilization or UTILIZATION for one in on_gpus)


def missing(row: Row, known: Iterable[Mapping[str, Any]]) -> list[Variant]:
    """The variants of ``row`` that ``known``, lines of raw values, does not have; those that failed are missing too."""
    have = {(line["row"], line["variant"]) for line in known if "failed" not in line}
    return [variant for variant in row.variants if (row.name, variant.name) not in have]


def starts(rows: Iterable[Row], known: Sequence[Mapping[str, Any]]) -> list[Start]:
    """One for all variants, of whatever row, whose models are the same; in the order of the rows."""
    takes: dict[str, list[tuple[Row, str]]] = {}
    models = {}
    for row in rows:
        for variant in missing(row, known):
            key = json.dumps(variant.models, sort_keys=True, default=dict)
            takes.setdefault(key, []).append((row, variant.name))
            models[key] = variant.models
    return [Start(models[key], tuple(found)) for key, found in takes.items()]


def waves(rows: Iterable[Row], known: Sequence[Mapping[str, Any]], at_once: int) -> list[list[Start]]:
    """Starts that follow each other, together: ``at_once`` at most, and no more than fit on one GPU."""
    found: list[list[Start]] = []
    for start in starts(rows, known):
        if found and len(found[-1]) < at_once and sum(one.share for one in found[-1]) + start.share <= 1.0:
            found[-1].append(start)
        else:
            found.append([start])
    return found
