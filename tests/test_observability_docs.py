"""docs/observability.md lists what there is."""

import re
from pathlib import Path

from serve_app import signals
from serve_app.gateway.access_line import FIELDS

TEXT = (Path(__file__).parents[1] / "docs" / "observability.md").read_text()


def test_every_metric_is_listed_with_its_labels() -> None:
    """In order, and no other one."""
    rows = re.findall(r"^\| `(modelyard_\w+)` \| (\w+) \| (.*?) \|", TEXT, re.M)
    listed = [(name, kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows]
    assert listed == [(metric.name, metric.kind, metric.labels) for metric in signals.ALL]


def test_every_field_of_the_access_log_is_described() -> None:
    """In the order in which a line has them."""
    table = TEXT[TEXT.index("| field | what |") : TEXT.index("## Usage")]
    cells = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", table, re.M)
    assert tuple(name for cell in cells for name in re.findall(r"`(\w+)`", cell)) == FIELDS
