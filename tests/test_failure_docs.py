"""docs/failure.md says what is so."""

import re
from pathlib import Path

from serve_app.config import RequestLimits
from serve_app.resume import NOT_RESUMABLE

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "failure.md").read_text()


def test_the_list_of_what_is_not_continued_is_the_codes() -> None:
    """Every field and its reason, and no other."""
    shown = {
        (field, why.strip())
        for fields, why in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.*) \|$", TEXT, re.M)
        for field in re.findall(r"`(\w+)`", fields)
    }
    assert shown == {(field, why) for field, (_, why) in NOT_RESUMABLE.items()}


def test_the_limits_that_it_names_exist() -> None:
    """And none that matters is left out."""
    for name in RequestLimits.model_fields.keys() - {"max_waiting", "hold_requests", "keep_alive", "chunk_s"}:
        assert f"`{name}`" in TEXT
