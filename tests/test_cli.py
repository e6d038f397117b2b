"""cli: exit statuses and what is printed where."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

from serve_app.cli import app


@dataclass(frozen=True)
class Fault:
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Report:
    faults: tuple[Fault, ...] = ()
    notes: tuple[str, ...] = ()


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Path], Report]], Result]:
    """``modelyard check x.yaml`` with ``check_file`` replaced by the given function."""

    def run(check_file: Callable[[Path], Report]) -> Result:
        monkeypatch.setitem(sys.modules, "serve_app.check", SimpleNamespace(check_file=check_file))  # type: ignore[arg-type]
        return CliRunner().invoke(app, ["check", "x.yaml"])

    return run


def test_check_prints_every_fault_and_exits_1(check: Callable[..., Result]) -> None:
    """One line per fault, on standard error; notes on standard output."""
    result = check(lambda path: Report((Fault("a: wrong"), Fault("b: wrong")), ("mind c",)))
    assert result.exit_code == 1
    assert result.stderr == "a: wrong\nb: wrong\n"
    assert result.stdout == "note: mind c\n"


def test_check_of_a_good_file_exits_0(check: Callable[..., Result]) -> None:
    """No fault: one line says so."""
    result = check(lambda path: Report())
    assert (result.exit_code, result.stdout) == (0, "x.yaml: no faults\n")


def test_check_of_an_unreadable_file_exits_2(check: Callable[..., Result]) -> None:
    """A file that cannot be read is not a faulty file."""

    def check_file(path: Path) -> Report:
        raise FileNotFoundError(2, "No such file or directory", str(path))

    result = check(check_file)
    assert result.exit_code == 2
    assert "x.yaml cannot be read" in result.stderr


def test_stop_with_nothing_started_exits_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopping twice, or never having started, is no error."""
    monkeypatch.setenv("MODELYARD_HOME", str(tmp_path))
    result = CliRunner().invoke(app, ["stop"])
    assert result.exit_code == 0
    assert "Nothing to stop" in result.stdout
