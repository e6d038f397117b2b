"""Names and labels of our metrics, once. They go through Ray's own metrics, so one scrape has everything.

Gateways tell Ray ``OF_GATEWAYS``, and have them in their own ``/metrics`` with ``OF_MODELS``. Cards tell Ray
``OF_CARDS``.

Every label has few values: models, names and adapters that the configuration knows (``OTHER`` stands for what it does
not), our routes, and words of ours. What clients write is never one. docs/observability.md is the table.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

# In the place of a model that a request names and nobody knows, and where it named none.
OTHER = "other"

# In seconds. Generation takes milliseconds on a small model and minutes for a long answer of a large one.
TO_FIRST_TOKEN_S = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2.5, 5, 10, 20, 40, 80, 160, 320)
WHOLE_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 240, 480, 960, 1920)
ROUTE_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
QUEUE_S = (0.001, 0.005, 0.02, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
COLD_S = (0.5, 1, 2.5, 5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 300, 600, 1200)
PER_TOKEN_S = (0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1, 2.5)


@dataclass(frozen=True)
class Metric:
    """``bounds``: of a histogram's buckets, ascending."""

    name: str
    description: str
    labels: tuple[str, ...]
    kind: Literal["counter", "gauge", "histogram"] = "counter"
    bounds: tuple[float, ...] = ()


# ``note(metric, *labels, value=1.0)``: a counter grows by ``value``, a gauge by a value that may be negative, and a
# histogram gets one observation.
Note = Callable[..., None]

ROUTED = ("model", "route")

REQUESTS = Metric(
    "modelyard_requests_total",
    "Requests that are over. status: 2xx, 4xx or 5xx, as the client got it (4xx where it left before); reason: ok, "
    "client_left, an error's code, or engine for the engine's own errors.",
    (*ROUTED, "status", "reason"),
)
ABORTS = Metric(
    "modelyard_aborts_total",
    "Requests whose client left. stage: arriving, waiting (for a replica), answering (nothing of the answer was sent "
    "yet) or streaming.",
    (*ROUTED, "stage"),
)
TOKENS = Metric(
    "modelyard_tokens_total",
    "Tokens as the replicas counted them, those of aborted requests included. what: prompt or generated.",
    (*ROUTED, "what"),
)
IN_FLIGHT = Metric("modelyard_in_flight", "Requests that are with a replica.", ROUTED, "gauge")
QUEUED = Metric("modelyard_queued", "Requests that wait for a place at a replica.", ROUTED, "gauge")
HELD_COLD = Metric(
    "modelyard_held_cold", "Requests that began to wait while no replica of their model ran.", ROUTED, "gauge"
)
ROUTE_TIME = Metric(
    "modelyard_route_seconds",
    "From the arrival of a request until it waits for a replica: reading its body, what its model means, its quota.",
    ROUTED,
    "histogram",
    ROUTE_S,
)
QUEUE_TIME = Metric(
    "modelyard_queue_seconds",
    "How long requests waited for a replica, all waits of one request together, also of those that gave up.",
    ROUTED,
    "histogram",
    QUEUE_S,
)
COLD_TIME = Metric(
    "modelyard_cold_seconds",
    "The part of modelyard_queue_seconds that requests waited where no replica of the model ran: it slept, started or "
    "had died. Only of requests that had such a wait.",
    ROUTED,
    "histogram",
    COLD_S,
)
ENGINE_TIME = Metric(
    "modelyard_engine_seconds",
    "How long the replica that a request was with last had it, by that replica's clock, also of aborted requests.",
    ROUTED,
    "histogram",
    WHOLE_S,
)
FIRST_TOKEN_TIME = Metric(
    "modelyard_time_to_first_token_seconds",
    "From the arrival of a request to the first event of its stream. Streams only.",
    ROUTED,
    "histogram",
    TO_FIRST_TOKEN_S,
)
WHOLE_TIME = Metric(
    "modelyard_request_seconds",
    "From the arrival of a request to the end of its answer. Only of those that got all of it.",
    ROUTED,
    "histogram",
    WHOLE_S,
)
TOKEN_TIME = Metric(
    "modelyard_time_per_output_token_seconds",
    "Mean time between two tokens of a stream: from its first event to its end, by the tokens after the first. Only of "
    "streams that got to their end.",
    ROUTED,
    "histogram",
    PER_TOKEN_S,
)
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

OF_GATEWAYS = (
    REQUESTS,
    ABORTS,
    TOKENS,
    IN_FLIGHT,
    QUEUED,
    HELD_COLD,
    ROUTE_TIME,
    QUEUE_TIME,
    COLD_TIME,
    ENGINE_TIME,
    FIRST_TOKEN_TIME,
    WHOLE_TIME,
    TOKEN_TIME,
    MOVES,
    FALLBACKS,
    BROKEN_STREAMS,
)

REPLICAS = Metric("modelyard_replicas", "Replicas that answer, as this gateway knows it.", ("model",), "gauge")
MODEL_STATE = Metric(
    "modelyard_model_state",
    "1 for the state that the model is in, 0 for the others. state: ready, starting, asleep or failed.",
    ("model", "state"),
    "gauge",
)

SCALING_QUEUE = Metric(
    "modelyard_scaling_queue",
    "Requests that wait in engines and at gateways: what scaling goes by.",
    ("model",),
    "gauge",
)
ENGINES = Metric("modelyard_engines", "Engines that have told lately what they have to do.", ("model",), "gauge")
KV_USAGE = Metric("modelyard_kv_usage", "Mean share of the engines' KV cache that is in use.", ("model",), "gauge")

OF_CARDS = (SCALING_QUEUE, ENGINES, KV_USAGE)
OF_MODELS = (REPLICAS, MODEL_STATE)

ALL = (*OF_GATEWAYS, *OF_CARDS, *OF_MODELS)
