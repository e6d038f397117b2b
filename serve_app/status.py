"""``modelyard status``: every model of a running endpoint, as its gateway's ``/ready`` tells."""

import os
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from serve_app import endpoint
from serve_app.endpoint import KEY_VARIABLE, EndpointError

_COLOURS = {"ready": "green", "failed": "red", "asleep": "dim"}


def read(url: str) -> Mapping[str, Any]:
    """The gateway's answer. ``url``: the endpoint's address. Raises ``EndpointError``."""
    answer = endpoint.get(url, "/ready")
    told = endpoint.told(answer)
    if answer.is_success and isinstance(told.get("models"), dict):
        return told
    if answer.is_success and told.get("status") == "ready":
        what = "does not know the key in" if os.environ.get(KEY_VARIABLE) else "asks for a key: put yours into"
        raise EndpointError(f"The gateway at {endpoint.address_of(url)} is ready, but {what} {KEY_VARIABLE}.")
    raise endpoint.refusal(url, "/ready", answer)


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
