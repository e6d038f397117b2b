"""What is replayed: engines like an H200 with a model of 7 to 8 billion parameters, and loads for them.

The engines' step times are rounded from what such models did on one H200 (bfloat16): about 5 ms for a step of one
sequence, 25,000 to 30,000 prompt tokens per second, and the KV cache that is left on the GPU (docs/planning.md).
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.scaling import traces
from loadtest.scaling.engine import EngineSpec, Request
from loadtest.scaling.fleet import ModelSpec

HOUR = 3600.0
START_S = 108.0
TRACES = "MODELYARD_TRACES"
# Grouped-query attention as in Llama-3.1-8B, and full attention as in CodeLlama-7B, whose cache holds a quarter.
CHAT = EngineSpec(step_s=5e-3, sequence_s=30e-6, kv_token_s=36e-9, prompt_token_s=40e-6, kv_tokens=850_000)
CODE = EngineSpec(step_s=4.6e-3, sequence_s=30e-6, kv_token_s=146e-9, prompt_token_s=34e-6, kv_tokens=225_000)


@dataclass(frozen=True)
class Scenario:
    models: Mapping[ModelSpec, Sequence[Request]]
    gpus: int
    seconds: float = HOUR


def names() -> list[str]:
    known = ["constant", "burst", "ramp", "diurnal"]
    return known + (["azure-1x", "azure-5x", "azure-20x"] if os.environ.get(TRACES) else [])


def scenario(name: str, seed: int) -> Scenario:
    """By one of ``names``. Requests are filled in by a replay: each needs scenarios of its own."""
    if name.startswith("azure-"):
        speed = int(name.removeprefix("azure-").removesuffix("x"))
        gpus = {1: 4, 5: 12, 20: 32}[speed]
        found = traces.azure(Path(os.environ[TRACES]), speed, HOUR)
        most = gpus * 3 // 4
        models = {
            ModelSpec("chat", CHAT, 1, most, START_S): found["chat"],
            ModelSpec("code", CODE, 1, most, START_S): found["code"],
        }
        return Scenario(models, gpus)
    rate = {
        "constant": traces.constant(40),
        "burst": traces.bursts(5, 50, HOUR, seed),
        "ramp": traces.ramp(3, 80, HOUR),
        "diurnal": traces.diurnal(3, 90, HOUR),
    }[name]
    return Scenario({ModelSpec("chat", CHAT, 1, 8, START_S): traces.synthetic(rate, HOUR, seed)}, 8)
