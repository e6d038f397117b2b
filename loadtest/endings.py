"""How a load test's command ends before its time: told to, or unable to go on."""

import signal
from types import FrameType
from typing import NoReturn

import typer
from rich.console import Console


def heed_signals() -> None:
    """SIGTERM and SIGHUP end a run as Ctrl-C does, so that what it started is ended too."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def ignore_signals() -> None:
    """From here on, for an end of processes that is bounded: half of it is worse than a slow one."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def fail(console: Console, module: str, message: str, status: int) -> NoReturn:
    """Say on ``console`` why ``module`` ends, and end it."""
    console.print(f"[red]{module}:[/] ", end="")
    console.print(message, markup=False, highlight=False)
    raise typer.Exit(status)
