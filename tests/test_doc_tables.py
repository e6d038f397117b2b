"""Documents that name their tests: docs/failure.md and docs/behaviour.md."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = [
    (name, line)
    for name in ("failure.md", "behaviour.md")
    for line in (ROOT / "docs" / name).read_text().splitlines()
    if line.startswith("| ") and "::test_" in line
]


@pytest.mark.parametrize(("name", "row"), ROWS, ids=[f"{name}: {row.split('|')[1].strip()}" for name, row in ROWS])
def test_every_row_has_its_tests(name: str, row: str) -> None:
    """The tests that a row names exist."""
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row)
    assert len(named) == row.count("::test_")
    for file, test in named:
        assert re.search(rf"^(async )?def {test}\(", (ROOT / file).read_text(), re.M), f"{file} has no {test}"


def test_every_behaviour_is_shown() -> None:
    """docs/behaviour.md has no row without a test."""
    table = re.findall(r"^\| .*$", (ROOT / "docs" / "behaviour.md").read_text(), re.M)
    assert all("::test_" in row for row in table if not row.startswith("| what is right"))
