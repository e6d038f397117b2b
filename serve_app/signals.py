"""Names and labels of our metrics, once. They go through Ray's own metrics, so one scrape has everything."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    name: str
    description: str
    labels: tuple[str, ...]


MOVES = Metric(
    "modelyard_moves_total",
    "Requests that another replica went on with. what: request (no byte was sent yet) or stream; why: broken, silent "
    "or leaving.",
    ("model", "what", "why"),
)
FALLBACKS = Metric(
    "modelyard_fallbacks_total",
    "Requests that went on to another model of their name, since this one could not serve.",
    ("model", "to"),
)
BROKEN_STREAMS = Metric("modelyard_broken_streams_total", "Streams that broke and could not be continued.", ("model",))
