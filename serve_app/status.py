"""``modelyard status``: every model of a running endpoint, as its gateway's ``/ready`` tells."""

import os
from collections.abc import Mapping
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table
from rich.text import Text

TIMEOUT_S = 10.0
KEY_VARIABLE = "MODELYARD_API_KEY"
_COLOURS = {"ready": "green", "failed": "red", "asleep": "dim"}


class StatusError(RuntimeError):
    """The status cannot be read; the message says why and what to do next."""


def read(url: str) -> Mapping[str, Any]:
    """The gateway's answer. ``url``: the endpoint's address, without ``/v1``. Raises ``StatusError``."""
    address = url.rstrip("/").removesuffix("/v1")
    try:
        key = os.environ.get(KEY_VARIABLE, "")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        answer = httpx.get(f"{address}/ready", headers=headers, timeout=TIMEOUT_S, trust_env=False)
    except (httpx.UnsupportedProtocol, httpx.InvalidURL):
        raise StatusError(f"{url!r} is no address. Write it like http://127.0.0.1:8000.") from None
    except httpx.TimeoutException:
        raise StatusError(
            f"{address} took the connection but did not answer within {TIMEOUT_S:g} s. Look at Ray's dashboard, or ask "
            "again."
        ) from None
    except httpx.HTTPError as error:
        raise StatusError(
            f"Nothing answers at {address} ({error or type(error).__name__}). Start it with `modelyard serve FILE`, or "
            "name the endpoint: `modelyard status --url http://HOST:PORT`."
        ) from None
    told = _json(answer)
    if answer.is_success and isinstance(told.get("models"), dict):
        return told
    if answer.is_success and told.get("status") == "ready":
        what = "does not know the key in" if key else "asks for a key: put yours into"
        raise StatusError(f"The gateway at {address} is ready, but {what} {KEY_VARIABLE}.")
    refusal = told.get("error")
    if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE and isinstance(refusal, dict):
        raise StatusError(f"The gateway at {address} cannot say yet: {refusal.get('message')} Ask again in a moment.")
    raise StatusError(
        f"What answers at {address} is no Modelyard gateway (status {answer.status_code} for /ready). Give the "
        "gateway's address with --url, with its route prefix if it has one."
    )


def show(answer: Mapping[str, Any], console: Console) -> None:
    """Print what ``read`` returned."""
    if not answer["models"]:
        console.print("The gateway runs and knows no model yet. Add one to your file, then: serve deploy FILE")
    else:
        console.print(_table(answer["models"]))
    for conflict in answer.get("conflicts", ()):
        console.print(Text(f"Conflict: {conflict}"))


def _table(models: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table("model", "state", "replicas", "usual start", "ready in", "further ids", "reason", box=None)
    for column in table.columns:
        column.overflow = "fold"  # an id that is cut cannot be copied
    for name, model in sorted(models.items()):
        start, ready_in = model["usual_start_s"], model["ready_in_s"]
        # What comes from models is shown as it is, not as markup.
        table.add_row(
            Text(name),
            Text(model["state"], _COLOURS.get(model["state"], "yellow")),
            str(model["replicas"]),
            "" if start is None else f"{start:.0f} s",
            "" if ready_in is None else f"{ready_in:.0f} s",
            Text(", ".join(model["also_known_as"])),
            Text(model["reason"]),
        )
    return table


def _json(answer: httpx.Response) -> dict[str, Any]:
    try:
        told = answer.json()
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}
