"""Whatever a client sends, it gets an answer that its protocol knows, and the gateway keeps nothing of it."""

import os
from pathlib import Path
from typing import Any

import pytest

from serve_app.gateway.app import GatewayApp
from tests.fuzz.run import MOST_GROWTH, Outcome, run


def well(outcome: Outcome) -> None:
    print(f"\n{outcome}")
    assert outcome.good, str(outcome)
    seen = {status for _, status in outcome.statuses}
    assert seen >= {"200", "400", "401", "404", "405", "415", "503", "left"}, "the cases reach too little"


async def test_a_thousand_requests(tmp_path: Path) -> None:
    """No 5xx but 503 with Retry-After, every error in its envelope, every stream ended, nothing left open or in memory;
    short."""
    well(await run(1000, seed=1, folder=tmp_path))


async def test_a_leak_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run fails where the gateway keeps 4 KB of each request: the bound on memory does not hold of itself."""
    kept: list[bytes] = []
    answer = GatewayApp._answer

    async def leaky(self: GatewayApp, *args: Any) -> None:
        kept.append(os.urandom(4096))
        await answer(self, *args)

    monkeypatch.setattr(GatewayApp, "_answer", leaky)
    outcome = await run(400, seed=1, folder=tmp_path)
    assert not outcome.good
    assert not outcome.faults
    assert min(outcome.grown.values()) > MOST_GROWTH


@pytest.mark.fuzz
async def test_many_requests(tmp_path: Path) -> None:
    """The same for REQUESTS (20,000) of the seed SEED (1): `make fuzz`."""
    requests, seed = int(os.environ.get("REQUESTS", "20000")), int(os.environ.get("SEED", "1"))
    well(await run(requests, seed, tmp_path, progress=True))
