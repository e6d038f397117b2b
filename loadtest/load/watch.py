"""What the endpoint says of itself while it is under load: replicas and queues by model, from ``/ready``."""

from collections.abc import Callable, Mapping
from typing import Any

import gevent
import httpx

from loadtest.load.record import Sample
from serve_app.endpoint import address_of

EVERY_S = 1.0
TIMEOUT_S = 5.0


def watch(url: str, key: str, models: set[str], now: Callable[[], float], note: Callable[[Sample], None]) -> None:
    """Ask every second, for ever, and ``note`` what it says of ``models``; kill the greenlet to end it. What does not
    answer, or is no Modelyard gateway, gives no samples: the load goes on."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=address_of(url), headers=headers, trust_env=False) as client:
        while True:
            at = now()
            for sample in look(client, models, at):
                note(sample)
            gevent.sleep(max(0.0, at + EVERY_S - now()))


def look(client: httpx.Client, models: set[str], at: float) -> list[Sample]:
    try:
        told: Any = client.get("/ready", timeout=TIMEOUT_S).json()
    except (httpx.HTTPError, ValueError):
        return []
    found = told.get("models") if isinstance(told, dict) else None
    return [
        _sample(at, name, model)
        for name, model in (found or {}).items()
        if models & {name, *model["also_known_as"], *model["adapters"]}
    ]


def _sample(at: float, name: str, model: Mapping[str, Any]) -> Sample:
    waiting = model["engines"]["waiting"] if model["engines"] else None
    return Sample(round(at, 2), name, model["state"], model["replicas"], model["held"], waiting)
