"""Whatever a client sends, it gets an answer that its protocol knows, and the gateway keeps nothing of it."""

import os
from pathlib import Path

import pytest

from tests.fuzz.run import Outcome, run


def well(outcome: Outcome) -> None:
    print(f"\n{outcome}")
    assert outcome.good, str(outcome)
    seen = {status for _, status in outcome.statuses}
    assert seen >= {"200", "400", "401", "404", "405", "415", "503", "left"}, "the cases reach too little"


async def test_a_thousand_requests(tmp_path: Path) -> None:
    """No 5xx but 503 with Retry-After, every error in its envelope, every stream ended, nothing left open; short."""
    well(await run(1000, seed=1, folder=tmp_path))


@pytest.mark.fuzz
async def test_many_requests(tmp_path: Path) -> None:
    """The same for REQUESTS (20,000) of the seed SEED (1): `make fuzz`."""
    requests, seed = int(os.environ.get("REQUESTS", "20000")), int(os.environ.get("SEED", "1"))
    well(await run(requests, seed, tmp_path, progress=True))
