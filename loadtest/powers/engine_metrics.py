"""What vLLM tells of itself: its metrics, from where Ray exports them, and the size of its KV cache, from its log."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from serve_app.ray_api import RayApi

# Ray's prefix, and what it makes of vLLM's "vllm:".
_PREFIX = "ray_vllm_"
# Ours → vLLM's; counters end in _total, or not, by Ray's release.
COUNTERS = {
    "drafts": "spec_decode_num_drafts",
    "draft_tokens": "spec_decode_num_draft_tokens",
    "accepted_tokens": "spec_decode_num_accepted_tokens",
    "prefix_queries": "prefix_cache_queries",
    "prefix_hits": "prefix_cache_hits",
    "preemptions": "num_preemptions",
    "generated": "generation_tokens",
}
GAUGES = {"running": "num_requests_running", "waiting": "num_requests_waiting", "kv_usage": "kv_cache_usage_perc"}
# Of an engine's log. vLLM's metric of it does not reach Ray's.
_SERVED = re.compile(r"served_model_name=\[?'?([\w-]+)")
_KV_CACHE = re.compile(r"KV cache size: ([\d,]+) tokens")
# How often Ray's processes tell their metrics; ten seconds by default.
REPORT_INTERVAL_S = 0.5
SETTINGS = {"RAY_metrics_report_interval_ms": str(round(1000 * REPORT_INTERVAL_S))}


@dataclass(frozen=True)
class Look:
    """One look at all engines of a cluster. ``counters`` are sums over them; ``gauges`` too, but for ``kv_usage``, of
    which it is the highest."""

    counters: Mapping[str, float]
    gauges: Mapping[str, float]


def look(api: RayApi) -> Look:
    """Now, or up to ``REPORT_INTERVAL_S`` ago. httpx.HTTPError, RayApiError: not to be had."""
    texts = (httpx.get(f"http://{to}/metrics", trust_env=False, timeout=10).text for to in api.metrics_targets())
    return read(texts)


def read(texts: Iterable[str]) -> Look:
    """From what Prometheus would scrape."""
    counters: defaultdict[str, float] = defaultdict(float)
    gauges: defaultdict[str, float] = defaultdict(float)
    for name, value in _samples(texts):
        for ours, theirs in COUNTERS.items():
            if name.removesuffix("_total") == theirs:
                counters[ours] += value
        for ours, theirs in GAUGES.items():
            if name == theirs:
                gauges[ours] = max(gauges[ours], value) if ours == "kv_usage" else gauges[ours] + value
    return Look(dict(counters), dict(gauges))


def kv_tokens(logs: Iterable[str]) -> dict[str, int]:
    """The tokens that each engine's KV cache holds, by model."""
    found = ((_SERVED.search(log), _KV_CACHE.search(log)) for log in logs)
    return {served[1]: int(size[1].replace(",", "")) for served, size in found if served and size}


def _samples(texts: Iterable[str]) -> Iterator[tuple[str, float]]:
    """vLLM's, without Ray's prefix. Lines of other metrics are many, and are not parsed."""
    for text in texts:
        lines = "".join(f"{line}\n" for line in text.splitlines() if line.startswith(_PREFIX))
        for family in text_string_to_metric_families(lines):
            for sample in family.samples:
                yield sample.name.removeprefix(_PREFIX), sample.value
