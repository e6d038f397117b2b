"""What is seen of a real engine's requests."""

from collections import Counter

import pytest

from tests.engine.ask import GENERATING, body
from tests.serve.cluster import Cluster, eventually
from tests.serve.scrape import Sample, scraped, scraped_until, targets

pytestmark = pytest.mark.engine

OURS = {"ray_modelyard_tokens_total": ("model", "route", "what")}
GENERATED, KV_USE = "ray_vllm_generation_tokens_total", "ray_vllm_kv_cache_usage_perc"
VLLMS = {GENERATED: ("model_name",), KV_USE: ("model_name",)}


def test_tokens_are_the_engines(engines: Cluster) -> None:
    """On every generating route, streamed or not, ours are what vLLM says in its usage; its own metrics are beside ours
    in Ray's."""
    expected: Counter[Sample] = scraped([engines.url], OURS)
    generated = 0
    for path in GENERATING:
        asked = body(path, "What is the sea?", 8, temperature=0)
        usage = engines.client.post(path, json=asked).json()["usage"]
        assert engines.client.post(path, json=asked | {"stream": True}).status_code == 200
        tokens = {
            "prompt": usage.get("prompt_tokens") or usage["input_tokens"],
            "generated": usage.get("completion_tokens") or usage["output_tokens"],
        }
        for what, count in tokens.items():
            expected["ray_modelyard_tokens_total", "chat", path, what] += 2 * count
        generated += 2 * tokens["generated"]
    assert scraped_until(expected, [engines.url], OURS) == expected
    eventually("vLLM's are there", lambda: scraped(targets(engines), VLLMS)[GENERATED, "chat"] >= generated)
    assert (KV_USE, "chat") in scraped(targets(engines), VLLMS)
