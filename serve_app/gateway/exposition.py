"""``/metrics``: what one gateway replica counts, for a Prometheus that does not ask Ray for its targets."""

from collections.abc import Callable, Iterator

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector

from serve_app.catalog import Catalog, State
from serve_app.signals import MODEL_STATE, OF_GATEWAYS, REPLICAS, Metric

# Which gateway replica it is that counts: a scrape asks one of them.
GATEWAY_LABEL = "gateway"
# As Ray's, so that a query finds either.
PREFIX = "ray_"


class Exposition:
    """``gateway``: this replica's id. ``catalog``: what models it knows now. ``note``: a ``signals.Note``."""

    def __init__(self, gateway: str, catalog: Callable[[], Catalog]) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # Ray has none either
        self.gateway = gateway
        self._registry = CollectorRegistry()
        self._registry.register(_Models(gateway, catalog))
        self._metrics = {metric.name: self._made(metric) for metric in OF_GATEWAYS}
        self._write: dict[tuple[str, ...], Callable[[float], None]] = {}  # by metric and labels

    def note(self, metric: Metric, *labels: str, value: float = 1.0) -> None:
        at = (metric.name, *labels)
        if at not in self._write:
            series = self._metrics[metric.name].labels(self.gateway, *labels)
            self._write[at] = series.observe if isinstance(series, Histogram) else series.inc
        self._write[at](value)

    def text(self, accept: str) -> tuple[bytes, str]:
        """All of it, and its content type, in the format that the header ``accept`` prefers."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def _made(self, metric: Metric) -> Counter | Gauge | Histogram:
        name, labels = PREFIX + metric.name, (GATEWAY_LABEL, *metric.labels)
        if metric.kind == "histogram":
            return Histogram(name, metric.description, labels, buckets=metric.bounds, registry=self._registry)
        kind = Counter if metric.kind == "counter" else Gauge
        return kind(name, metric.description, labels, registry=self._registry)


class _Models(Collector):
    """What is so in the moment of the scrape."""

    def __init__(self, gateway: str, catalog: Callable[[], Catalog]) -> None:
        self._gateway = gateway
        self._catalog = catalog

    def collect(self) -> Iterator[GaugeMetricFamily]:
        replicas, states = _family(REPLICAS), _family(MODEL_STATE)
        for name, model in self._catalog().models.items():
            replicas.add_metric([self._gateway, name], model.replicas)
            for state in State:
                states.add_metric([self._gateway, name, state], float(model.state is state))
        yield from (replicas, states)


def _family(metric: Metric) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + metric.name, metric.description, labels=[GATEWAY_LABEL, *metric.labels])
