"""``modelyard status``: every model of a running endpoint, and what failed there lately, as its gateway's ``/ready``
tells. What ``/status`` shows in a browser."""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

TIMEOUT_S = 10.0
LOOK_S = 2.0
KEY_VARIABLE = "MODELYARD_API_KEY"
_LONG = ("further ids", "reason", "request id")
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
        except StatusError as error:
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


def _json(answer: httpx.Response) -> dict[str, Any]:
    try:
        told = answer.json()
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}
