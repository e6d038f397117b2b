"""The files of usage: they outlive their gateway, are never torn, and a folder that fails stops nothing."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from serve_app import errors
from serve_app.gateway import usage_book
from serve_app.gateway.usage_book import UsageBook
from serve_app.usage import Use
from tests.inprocess import eventually

ONE = Use(requests=1, prompt_tokens=10, generated_tokens=5)
NOON = 1_764_590_400.0  # of 2025-12-01


class Clock:
    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def book(folder: Path | None, clock: Clock) -> UsageBook:
    return UsageBook(lambda: None if folder is None else str(folder), clock)


async def answer(asked: UsageBook, gateways: int = 1) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(await asked.answer("2025-11-01", "2025-12-31", None, gateways))
    return told


async def requests(asked: UsageBook) -> dict[str, int]:
    """By day."""
    return {row["day"]: row["requests"] for row in (await answer(asked))["usage"]}


async def test_what_is_added_is_written_by_itself(tmp_path: Path, clock: Clock) -> None:
    """Nobody has to ask for it: about once a second, and only where something is new or a while is over."""
    one = book(tmp_path, clock)
    one.start()
    one.add("team", "chat", ONE)
    await eventually(lambda: any("team" in path.read_text() for path in tmp_path.glob("*.jsonl")))
    await one.close()
    (file,) = tmp_path.iterdir()
    before = file.stat()
    await one.write()
    assert file.stat().st_ino == before.st_ino  # it would be another file


async def test_an_ordered_end_writes_what_is_left(tmp_path: Path, clock: Clock) -> None:
    """A gateway that is stopped loses nothing; one with another file, its successor, sees it and counts on."""
    one = book(tmp_path, clock)
    one.start()
    one.add("team", "chat", ONE)
    await one.close()
    successor = book(tmp_path, clock)
    successor.add("team", "chat", ONE)
    await successor.write()
    assert await requests(successor) == {"2025-12-01": 2}


async def test_a_day_that_is_over_keeps_its_sum(tmp_path: Path, clock: Clock) -> None:
    """Each day has a file. A clock that is set back over midnight does not begin the old day anew."""
    one = book(tmp_path, clock)
    one.add("team", "chat", ONE)
    clock.now += 86_400
    one.add("team", "chat", ONE)
    await one.write()
    clock.now -= 86_400
    one.add("team", "chat", ONE)
    await one.write()
    assert await requests(one) == {"2025-12-01": 1, "2025-12-02": 2}


async def test_a_full_disk_loses_nothing_while_the_gateway_lives(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """One error in the log, and answers that say that they are not complete; what was written before stays whole. When
    there is room again everything is there, once."""
    one = book(tmp_path, clock)
    one.add("team", "chat", ONE)
    await one.write()
    (file,) = tmp_path.iterdir()
    full = tmp_path / f".{file.name.split('.')[1]}.new"
    full.symlink_to("/dev/full")
    for _ in range(3):
        one.add("team", "chat", ONE)
        await one.write()
    told = await answer(one)
    assert ([row["requests"] for row in told["usage"]], told["complete"]) == ([1], False)
    (said,) = [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.WARNING]
    assert f"usage cannot be written to {tmp_path}: No space left on device" in said
    full.unlink()
    await one.write()
    told = await answer(one)
    assert ([row["requests"] for row in told["usage"]], told["complete"]) == ([4], True)


async def test_a_folder_that_is_not_there_is_not_made(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be a share that is not mounted: said in the log and to who asks. Once it is there all is written."""
    folder = tmp_path / "share"
    one = book(folder, clock)
    one.add("team", "chat", ONE)
    await one.write()
    assert "No such file or directory" in caplog.text
    with pytest.raises(errors.Unavailable):
        await answer(one)
    assert not folder.exists()
    folder.mkdir()
    await one.write()
    assert await requests(one) == {"2025-12-01": 1}


async def test_without_a_folder_nothing_is_kept(clock: Clock) -> None:
    """Nothing in memory either."""
    one = book(None, clock)
    one.add("team", "chat", ONE)
    await one.write()
    assert one._days == {}
    with pytest.raises(errors.NotFound):
        await answer(one)


async def test_another_folder_gets_all_of_today(tmp_path: Path, clock: Clock) -> None:
    """The setting applies live."""
    first, second = tmp_path / "first", tmp_path / "second"
    folders = [first]
    for folder in (first, second):
        folder.mkdir()
    one = UsageBook(lambda: str(folders[-1]), clock)
    one.add("team", "chat", ONE)
    await one.write()
    folders.append(second)
    await one.write()
    assert await requests(one) == {"2025-12-01": 1}


async def test_a_sum_without_all_gateways_says_so(tmp_path: Path, clock: Clock) -> None:
    """As many gateways as run must write to this folder now: one that writes elsewhere, or did so a while ago, makes
    the sum incomplete."""
    one, other = book(tmp_path, clock), book(tmp_path, clock)
    assert (await answer(one))["complete"] is False  # nor does this one yet
    await one.write()
    assert (await answer(one))["complete"] is True
    assert (await answer(one, gateways=2))["complete"] is False
    (mine,) = tmp_path.iterdir()
    await other.write()  # without a request yet
    assert (await answer(one, gateways=2))["complete"] is True
    (others,) = set(tmp_path.iterdir()) - {mine}
    now = mine.stat().st_mtime
    os.utime(others, (now, now - usage_book.FRESH_S - 1))
    assert (await answer(one, gateways=2))["complete"] is False


async def test_a_damaged_file_is_no_silent_gap(tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever damaged it: who asks is told that there is no answer, and the log says which file. Other files in the
    folder are let be."""
    one = book(tmp_path, clock)
    await one.write()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".b.new").write_text('{"key":"te')  # what a gateway wrote when it was killed
    assert await requests(one) == {}
    for text in ('{"key":"te', "[]", "{}", '{"key":"a","model":"b","requests":"c"}'):
        (tmp_path / "2025-12-01.b.jsonl").write_text(text)
        caplog.clear()
        with pytest.raises(errors.Unavailable):
            await answer(one)
        assert "2025-12-01.b.jsonl" in caplog.text


KILLED = """
import asyncio, sys
from serve_app.gateway.usage_book import UsageBook
from serve_app.usage import Use

async def main():
    book = UsageBook(lambda: sys.argv[1])
    for number in range(1, 1_000_000):
        book.add("team", "chat", Use(requests=1, prompt_tokens=2))
        for model in range(200):
            book.add("team", f"model-{model}", Use())
        await book.write()
        print(number, flush=True)

asyncio.run(main())
"""


def test_kill_9_loses_what_was_not_written_and_no_more(tmp_path: Path) -> None:
    """Processes that write all the time are killed at any moment. What each had written before is in the sum, whole and
    once, and at most its last request beside."""
    least, killed = 0, 5
    for written in range(3, 3 + killed):
        command = [sys.executable, "-c", KILLED, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            said = [process.stdout.readline() for _ in range(written)]
            process.send_signal(signal.SIGKILL)
            said += [line for line in process.stdout if line.endswith("\n")]  # before it died
        least += int(said[-1])
    reader = UsageBook(lambda: str(tmp_path))
    asyncio.run(reader.write())
    told = json.loads(asyncio.run(reader.answer(None, None, "team", 1)))
    (row,) = [row for row in told["usage"] if row["model"] == "chat"]
    assert least <= row["requests"] <= least + killed
    assert row["prompt_tokens"] == 2 * row["requests"]
