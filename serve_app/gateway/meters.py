"""Where a gateway's notes of its requests go: Ray's metrics, and with them its own (``exposition``)."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from ray.util import metrics

from serve_app.signals import Metric, Note


def both(one: Note, other: Note) -> Note:
    def note(metric: Metric, *labels: str, value: float = 1.0) -> None:
        one(metric, *labels, value=value)
        other(metric, *labels, value=value)

    return note


def in_ray(wanted: Sequence[Metric]) -> Note:
    """``signals.Note`` into Ray's metrics, whose names begin with ``ray_`` where they are scraped."""
    write = {metric.name: _writer(metric) for metric in wanted}

    def note(metric: Metric, *labels: str, value: float = 1.0) -> None:
        write[metric.name](value, dict(zip(metric.labels, labels, strict=True)))

    return note


def _writer(metric: Metric) -> Any:
    """``write(value, tags)``."""
    if metric.kind == "counter":
        return metrics.Counter(metric.name, metric.description, metric.labels).inc
    if metric.kind == "histogram":
        return metrics.Histogram(metric.name, metric.description, list(metric.bounds), metric.labels).observe
    gauge = metrics.Gauge(metric.name, metric.description, metric.labels)
    now: dict[tuple[str, ...], float] = defaultdict(float)  # Ray's gauges are set, not moved

    def move(by: float, tags: dict[str, str]) -> None:
        at = tuple(tags.values())
        now[at] += by
        gauge.set(now[at], tags)

    return move
