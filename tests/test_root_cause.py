"""What a child process that did not start wrote of the cause."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from serve_app.model.root_cause import Output, first_error

SAID = """INFO before it all
ERROR [a.py:1] An optional part is missing.
ERROR [a.py:1] Traceback (most recent call last):
ERROR [a.py:1] ImportError: harmless
(Worker_1) ERROR [w.py:9] WorkerProc failed to start.
(Worker_1) ERROR [w.py:9] Traceback (most recent call last):
(Worker_2) ERROR [w.py:9] WorkerProc failed to start.
(Worker_2) ERROR [w.py:9] Traceback (most recent call last):
(Worker_2) ERROR [w.py:9] OSError: the second
(Worker_1) ERROR [w.py:9]   File "w.py", line 9, in __init__
(Worker_1) ERROR [w.py:9]     load(weights)
(Worker_1) ERROR [w.py:9]     ^^^^^^^^^^^^^
(Worker_1) ERROR [w.py:9] {error}
(Worker_1) ERROR [w.py:9]{space}
(Worker_1) ERROR [w.py:9] The above exception was the direct cause of the following exception:
(Worker_1) ERROR [w.py:9] Traceback (most recent call last):
(Worker_1) ERROR [w.py:9] RuntimeError: what came of it
(EngineCore) ERROR [core.py:3] EngineCore failed to start.
(EngineCore) ERROR [core.py:3] Traceback (most recent call last):
(EngineCore) ERROR [core.py:3] Exception: a worker failed, see above
"""


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("torch.OutOfMemoryError: none left", "torch.OutOfMemoryError: none left"),
        ("AssertionError", "AssertionError: load(weights)"),
    ],
)
def test_the_first_cause_is_told(error: str, told: str) -> None:
    """Of several processes the first that failed, of its errors the first; other processes' lines in between, and what
    was logged before, are not it. An error without words is told by its line of code."""
    assert first_error(SAID.format(error=error, space=" "), " failed to start.") == told


@pytest.mark.parametrize("text", ["", SAID.splitlines()[0], "it failed to start.\nno traceback"])
def test_no_cause_is_invented(text: str) -> None:
    """Where nothing of the kind was written nothing is told."""
    assert first_error(text, " failed to start.") == ""


def test_only_what_is_written_from_now_on(tmp_path: Path) -> None:
    """Also by a child process that has inherited the descriptor, which only writes."""
    with (tmp_path / "log").open("ab") as log:
        log.write(b"before")
        log.flush()
        output = Output(log.fileno())
        subprocess.run([sys.executable, "-c", "print('after')"], stdout=log, check=True)
        assert output.text() == "after\n"


def test_a_pipe_has_no_text() -> None:
    """What went into a pipe cannot be read again: nothing is told, and nothing hangs."""
    read, write = os.pipe()
    try:
        output = Output(write)
        os.write(write, b"gone")
        assert output.text() == ""
    finally:
        os.close(read)
        os.close(write)
