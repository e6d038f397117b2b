"""What is replayed: which models, on how many GPUs, under which load.

The two engines are a Llama-3.1-8B (grouped attention, 128 KiB of KV cache per token) and a CodeLlama-7B (512 KiB) in
bfloat16 on one H200. KV cache: as vLLM reported it (``results/plan-accuracy-h200-2026-11-30.jsonl``). Times: reading
16 GB of weights and the cache at three quarters of 4.8 TB/s, 2 FLOP per parameter and prompt token at 400 TFLOP/s, and
30 µs per sequence for everything else; a CodeLlama step for one sequence was measured at 4.6 ms
(``results/gpu-first-light-2026-11-29.txt``). A full engine then does some 20,600 tokens/s of the synthetic chat load,
15 requests/s.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from loadtest.scaling import traces
from loadtest.scaling.engine import EngineSpec, Request
from loadtest.scaling.fleet import ModelSpec

LLAMA_8B = EngineSpec(step_s=5e-3, sequence_s=30e-6, kv_token_s=36e-9, prompt_token_s=40e-6, kv_tokens=919_824)
CODELLAMA_7B = EngineSpec(step_s=4.6e-3, sequence_s=30e-6, kv_token_s=146e-9, prompt_token_s=34e-6, kv_tokens=235_216)

# The usual start of a replica on a GPU host (README); 20 to 45 s where nothing has to be compiled.
START_S = 108.0
HOUR_S = 3600.0
TRACES = "MODELYARD_TRACES"


@dataclass(frozen=True)
class Scenario:
    """``models`` makes each model's requests, in order of arrival, from a seed (if ``seeded``). ``gpus``: shared."""

    name: str
    what: str
    gpus: int
    seconds: float
    models: Callable[[int], Mapping[ModelSpec, Sequence[Request]]]
    seeded: bool = True


def scenarios(start_s: float = START_S) -> dict[str, Scenario]:
    """All of them, by name. ``start_s``: how long a replica takes to start."""
    one = ModelSpec("chat", LLAMA_8B, 1, 8, start_s)

    def chat(
        name: str,
        what: str,
        rate: Callable[[int], Callable[[float], float]],
        seconds: float,
        spec: ModelSpec = one,
    ) -> Scenario:
        return Scenario(
            name, what, spec.most, seconds, lambda seed: {spec: traces.synthetic(rate(seed), seconds, seed)}
        )

    def azure(speed: int, gpus: int) -> Scenario:
        specs = {
            "chat": replace(one, most=gpus * 3 // 4),
            "code": ModelSpec("code", CODELLAMA_7B, 1, gpus * 3 // 4, start_s),
        }

        def models(_: int) -> Mapping[ModelSpec, Sequence[Request]]:
            found = traces.azure(Path(os.environ[TRACES]), speed, HOUR_S)
            return {specs[name]: requests for name, requests in found.items()}

        what = f"Azure's chat and code traces at {speed} times their speed, on {gpus} shared GPUs"
        return Scenario(f"azure-{speed}x", what, gpus, HOUR_S, models, seeded=False)

    def hit(at: float) -> float:
        return 270.0 if 1200 <= at < 2400 else 90.0

    every = [
        chat("constant", "40 requests/s from the first second on", lambda _: traces.constant(40), HOUR_S),
        chat("ramp", "from 3 to 80 requests/s in 30 minutes, and down", lambda _: traces.ramp(3, 80, HOUR_S), HOUR_S),
        chat(
            "diurnal",
            "between 3 and 80 requests/s: a day in two hours",
            lambda _: traces.diurnal(3, 80, 2 * HOUR_S),
            2 * HOUR_S,
        ),
        chat(
            "burst",
            "5 requests/s, and 50 for one to five minutes now and then",
            lambda seed: traces.bursts(5, 50, 2 * HOUR_S, seed),
            2 * HOUR_S,
        ),
        chat(
            "small",
            "1 request/s, and 12 now and then: one replica is enough",
            lambda seed: traces.bursts(1, 12, 2 * HOUR_S, seed),
            2 * HOUR_S,
        ),
        chat(
            "step",
            "90 requests/s, and 270 for 20 minutes, on up to 64 GPUs",
            lambda _: hit,
            HOUR_S,
            replace(one, least=4, most=64),
        ),
        azure(1, 4),
        azure(5, 16),
        azure(20, 48),
    ]
    return {scenario.name: scenario for scenario in every}


def available(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """``names`` without those whose traces are not here, and those."""
    missing = [name for name in names if name.startswith("azure") and not os.environ.get(TRACES)]
    return [name for name in names if name not in missing], missing


def many(models: int, gpus: int, seconds: float, start_s: float = START_S) -> Scenario:
    """``models`` models, each with a day of its own in the hour, that together use about half of ``gpus``."""
    highest = 15.0 * gpus / models

    def requests(seed: int) -> Mapping[ModelSpec, Sequence[Request]]:
        random = Random(seed)
        made = {}
        for number in range(models):
            rate = traces.diurnal(0.02 * highest, random.uniform(0.2, 1.0) * highest, HOUR_S)
            shift = random.uniform(0, HOUR_S)
            spec = ModelSpec(f"model-{number}", LLAMA_8B, 1, max(2, 4 * gpus // models), start_s)
            made[spec] = traces.synthetic(lambda at, r=rate, s=shift: r(at + s), seconds, seed + number)  # type: ignore[misc]
        return made

    return Scenario("many", f"{models} models on {gpus} GPUs", gpus, seconds, requests)
