"""``modelyard status``: every model of a running endpoint, and what failed there lately, as its gateway's ``/ready``
tells. What ``/status`` shows in a browser."""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from serve_app import endpoint
from serve_app.endpoint import KEY_VARIABLE, EndpointError

LOOK_S = 2.0
_LONG = ("further ids", "reason", "request id")
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
    console.print(_shown(answer))


def watch(url: str, console: Console, *, as_json: bool = False, pause: Callable[[float], None] = time.sleep) -> None:
    """Show what ``read`` returns until Ctrl-C, and why there is nothing while there is not. On a terminal in one place;
    else, and with ``as_json``, once per change."""
    with contextlib.suppress(KeyboardInterrupt):
        if console.is_terminal and not as_json:
            with Live(console=console, auto_refresh=False) as live:
                for told in _looks(url, pause):
                    live.update(_shown_or_fault(told), refresh=True)
        before: object = None
        for told in _looks(url, pause):
            if told != before:
                console.print(_as_json(told) if as_json else _shown_or_fault(told), soft_wrap=as_json)
                before = told


def _looks(url: str, pause: Callable[[float], None]) -> Iterator[Mapping[str, Any] | str]:
    """What the gateway tells, or why it does not, again and again."""
    while True:
        try:
            yield read(url)
        except EndpointError as error:
            yield str(error)
        pause(LOOK_S)


def _as_json(told: Mapping[str, Any] | str) -> Text:
    return Text(json.dumps({"fault": told} if isinstance(told, str) else told))


def _shown_or_fault(told: Mapping[str, Any] | str) -> RenderableType:
    return Text(told, "red") if isinstance(told, str) else _shown(told)


def _shown(answer: Mapping[str, Any]) -> RenderableType:
    if answer["models"]:
        parts: list[RenderableType] = [_models(answer["models"])]
    else:
        parts = [Text("The gateway runs and knows no model yet. Add one to your file, then: serve deploy FILE")]
    # What comes from models is shown as it is, not as markup.
    parts += [Text(f"Conflict: {conflict}") for conflict in answer.get("conflicts", ())]
    if failures := answer.get("failures"):
        parts += [Text(f"\nRecent errors of the gateway {answer['gateway']}"), _failures(failures)]
    return Group(*parts)


def _models(models: Mapping[str, Mapping[str, Any]]) -> Table:
    return _table({name: _cells(name, model) for name, model in sorted(models.items())}.values())


def _cells(name: str, model: Mapping[str, Any]) -> dict[str, Text]:
    """By column."""
    engines = model.get("engines") or {}
    return {
        "model": Text(name),
        "state": Text(model["state"], _COLOURS.get(model["state"], "yellow")),
        "replicas": Text(str(model["replicas"])),
        "in\nflight": _number(model.get("in_flight")),
        "waiting": _number(model.get("waiting")),
        "held": _number(model.get("held")),
        "running": _number(engines.get("running")),
        "queued": _number(engines.get("waiting")),
        "KV": _number(engines.get("kv_usage", 0) * 100, " %"),
        "tokens/s": _number(engines.get("tokens_s")),
        "usual\nstart": _number(model["usual_start_s"], " s"),
        "ready\nin": _number(model["ready_in_s"], " s"),
        "further ids": Text(", ".join(model["also_known_as"])),
        "reason": Text(model["reason"]),
    }


def _failures(failures: Sequence[Mapping[str, Any]]) -> Table:
    return _table(
        {
            "at": Text(datetime.fromtimestamp(failure["at"]).strftime("%H:%M:%S")),
            "model": Text(failure["model"]),
            "route": Text(failure["route"]),
            "status": Text(str(failure["status"])),
            "reason": Text(failure["reason"]),
            "request id": Text(failure["id"]),
        }
        for failure in failures
    )


def _table(rows: Iterable[Mapping[str, Text]]) -> Table:
    """Without the columns that nobody has anything in."""
    rows = list(rows)
    table = Table(box=None, padding=(0, 1, 0, 0))
    columns = [column for column in rows[0] if any(row[column] for row in rows)]
    for column in columns:
        # An id that is cut cannot be copied. Where it gets narrow, what is long is folded first.
        table.add_column(column, overflow="fold", no_wrap=column not in _LONG)
    for row in rows:
        table.add_row(*(row[column] for column in columns))
    return table


def _number(value: float | None, unit: str = "") -> Text:
    """Empty where there is none, or none of it."""
    return Text(f"{value:.0f}{unit}" if value else "")
