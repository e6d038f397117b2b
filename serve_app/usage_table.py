"""``modelyard usage``: what each key used of each model, as a gateway's ``/usage`` tells."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from serve_app import endpoint, usage
from serve_app.usage import NOTHING, Day, Use


def read(url: str, since: str | None, until: str | None, key: str | None) -> Mapping[str, Any]:
    """The gateway's answer. ``url``: the endpoint's address. Raises ``EndpointError``."""
    answer = endpoint.get(url, "/usage", since=since, until=until, key=key)
    told = endpoint.told(answer)
    if answer.is_success and isinstance(told.get("usage"), list):
        return told
    raise endpoint.refusal(url, "/usage", answer)


def show(answer: Mapping[str, Any], console: Console) -> None:
    """Print what ``read`` returned: the sums over all its days."""
    sums: Day = {}
    for row in answer["usage"]:
        usage.add(sums, row["key"] or "", row["model"], Use(*(row[field] for field in usage.FIELDS)))
    console.print(f"{answer['since']} to {answer['until']}, UTC" + ("" if sums else ": no requests"))
    if sums:
        console.print(_table(sums))
    if not answer["complete"]:
        console.print(
            "Not complete: not every gateway writes to this folder now. Each must have the same usage_dir; the "
            "gateways' logs say more."
        )


def _table(sums: Day) -> Table:
    columns = [field.replace("_", " ") for field in usage.FIELDS]
    table = Table("key", "model", box=None, show_footer=len(sums) > 1)
    for column in table.columns:
        column.overflow = "fold"
    whole = sum(sums.values(), NOTHING)
    for name, field in zip(columns, usage.FIELDS, strict=True):
        table.add_column(name, f"{getattr(whole, field):,}", justify="right")
    for (key, model), use in sorted(sums.items()):
        figures = (f"{getattr(use, field):,}" for field in usage.FIELDS)
        table.add_row(Text(key), Text(model), *figures)  # shown as they are, not as markup
    return table
