"""How long prompts and answers are: quantiles of Azure's two traces, so that no trace is needed to draw from them.

``lengths.json`` is made by ``python -m loadtest.load lengths`` from AzureLLMInferenceDataset2023 of
github.com/Azure/AzurePublicDataset (CC BY 4.0). Prompts and answers are drawn apart: that long prompts have other
answers than short ones is lost.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from loadtest.figures import percentile
from loadtest.scaling.engine import Request
from loadtest.scaling.traces import between

FILE = Path(__file__).with_name("lengths.json")
SOURCE = "AzureLLMInferenceDataset2023, github.com/Azure/AzurePublicDataset, CC BY 4.0"
STEPS = 100


@dataclass(frozen=True)
class Lengths:
    """Tokens at every hundredth, from the shortest to the longest."""

    prompt: Sequence[int]
    output: Sequence[int]

    def draw(self, random: Random) -> tuple[int, int]:
        """A prompt's and an answer's tokens."""
        return _draw(self.prompt, random), _draw(self.output, random)


def _draw(quantiles: Sequence[int], random: Random) -> int:
    return round(between(list(enumerate(quantiles)), random.random() * (len(quantiles) - 1)))


def load(file: Path = FILE) -> dict[str, Lengths]:
    """By service: ``chat`` and ``code``."""
    services = json.loads(file.read_text())["services"]
    return {name: Lengths(**service) for name, service in services.items()}


def table(traces: Mapping[str, Sequence[Request]]) -> dict[str, Any]:
    """What ``FILE`` has, of the whole ``traces`` by service."""
    services = {
        name: {
            "prompt": _quantiles([request.prompt for request in requests]),
            "output": _quantiles([request.output for request in requests]),
        }
        for name, requests in traces.items()
    }
    return {"source": SOURCE, "services": services}


def _quantiles(values: Sequence[int]) -> list[int]:
    ordered = sorted(values)
    return [int(percentile(ordered, step / STEPS)) for step in range(STEPS + 1)]
