"""usage: sums per day, key and model, the lines that keep them, and which days a question means."""

import json
from dataclasses import replace

import pytest

from serve_app import errors, usage
from serve_app.usage import MAX_DAYS, Day, Use

ONE = Use(requests=1, errors=0, prompt_tokens=10, generated_tokens=5, uncounted=0)
LOST = Use(requests=1, errors=1, uncounted=1)
MIDNIGHT = 1_764_547_200.0  # before 2025-12-01


def test_a_day_begins_at_midnight_utc() -> None:
    """The last instant of one day, and the first of the next."""
    assert usage.day_of(MIDNIGHT - 0.001) == "2025-11-30"
    assert usage.day_of(MIDNIGHT) == "2025-12-01"


def test_each_key_and_model_has_its_own_sum() -> None:
    """Figure by figure; others are not touched."""
    day: Day = {}
    for key, model, use in (("a", "chat", ONE), ("a", "chat", LOST), ("b", "chat", ONE), ("a", "code", ONE)):
        usage.add(day, key, model, use)
    assert day == {("a", "chat"): Use(2, 1, 10, 5, 1), ("b", "chat"): ONE, ("a", "code"): ONE}


def test_files_are_merged_by_reading_them() -> None:
    """What two gateways wrote of one day is read into one sum; nothing is lost on the way through the text."""
    one: Day = {("a", "chat"): ONE, ("", "x/y"): LOST}
    other: Day = {("a", "chat"): ONE}
    both: Day = {}
    for day in (one, other):
        usage.read(usage.text(day).splitlines(), both)
    assert both == {("a", "chat"): ONE + ONE, ("", "x/y"): LOST}


def test_another_versions_file_can_be_read() -> None:
    """A figure that is not there is 0, one that is new here is left out: gateways are updated one by one."""
    day: Day = {}
    usage.read(['{"key":"a","model":"chat","requests":2,"seconds":9}'], day)
    assert day == {("a", "chat"): replace(usage.NOTHING, requests=2)}


def test_an_answer_is_sorted_and_for_one_key_where_that_is_asked() -> None:
    """By day, key and model; no key's name is null."""
    days: dict[str, Day] = {
        "2025-12-01": {("b", "chat"): ONE, ("a", "chat"): LOST},
        "2025-11-30": {("", "chat"): ONE, ("a", "x"): ONE},
    }
    told = json.loads(usage.answer(days, "2025-11-30", "2025-12-01", None, True))
    assert [(row["day"], row["key"]) for row in told["usage"]] == [
        ("2025-11-30", None),
        ("2025-11-30", "a"),
        ("2025-12-01", "a"),
        ("2025-12-01", "b"),
    ]
    assert {name: told[name] for name in ("since", "until", "complete")} == {
        "since": "2025-11-30",
        "until": "2025-12-01",
        "complete": True,
    }
    assert told["usage"][1] == {
        "day": "2025-11-30",
        "key": "a",
        "model": "x",
        "requests": 1,
        "errors": 0,
        "prompt_tokens": 10,
        "generated_tokens": 5,
        "uncounted": 0,
    }
    assert [row["model"] for row in json.loads(usage.answer(days, "", "", "a", True))["usage"]] == ["x", "chat"]


@pytest.mark.parametrize(
    ("since", "until", "first", "last"),
    [
        (None, None, "2025-12-01", "2025-12-17"),
        (None, "2025-10-05", "2025-10-01", "2025-10-05"),
        ("2025-10-05", None, "2025-10-05", "2025-12-17"),
        ("2025-12-17", "2025-12-17", "2025-12-17", "2025-12-17"),
        ("2024-12-17", "2025-12-17", "2024-12-17", "2025-12-17"),
    ],
)
def test_a_question_is_about_a_month_unless_it_says_more(
    since: str | None, until: str | None, first: str, last: str
) -> None:
    """Both days are included; a whole year can be asked for."""
    assert usage.span(since, until, "2025-12-17") == (first, last)


@pytest.mark.parametrize(
    ("since", "until", "param"),
    [
        ("yesterday", None, "since"),
        (None, "2025-02-30", "until"),
        ("2025-12-18", None, "since"),
        ("2025-12-02", "2025-12-01", "since"),
        ("", None, "since"),
        ("2024-12-16", None, "since"),
    ],
)
def test_days_that_are_none_are_refused(since: str | None, until: str | None, param: str) -> None:
    """No calendar has them, they are the wrong way round, or too many: 400 with the parameter's name."""
    with pytest.raises(errors.InvalidRequest) as refused:
        usage.span(since, until, "2025-12-17")
    assert refused.value.param == param
    assert MAX_DAYS == 366
