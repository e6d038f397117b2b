"""What a Prometheus would read."""

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.cluster import Cluster, eventually

Sample = tuple[str, ...]  # its name, then the values of its labels


def targets(cluster: Cluster) -> list[str]:
    """Where Ray tells a Prometheus to look."""
    told = cluster.api._checked("GET", "/api/prometheus/sd").json()
    return [f"http://{address}" for target in told for address in target["targets"]]


def scraped(urls: Iterable[str], wanted: Mapping[str, tuple[str, ...]]) -> Counter[Sample]:
    """The samples whose names are ``wanted``, by the labels named there, summed over the others."""
    found: Counter[Sample] = Counter()
    for url in urls:
        for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", trust_env=False).text):
            for name, labels, value, *_ in family.samples:
                if name in wanted:
                    found[name, *(labels[label] for label in wanted[name])] += value  # type: ignore[assignment]
    return found


def scraped_until(
    expected: Mapping[Sample, float], urls: Iterable[str], wanted: Mapping[str, tuple[str, ...]]
) -> Counter[Sample]:
    """``scraped``, once ``expected`` is in it, or when that takes too long."""
    found: Counter[Sample] = Counter()

    def complete() -> bool:
        nonlocal found
        found = scraped(urls, wanted)
        return expected.items() <= found.items()

    with suppress(AssertionError):
        eventually("everything is told", complete)
    return found
