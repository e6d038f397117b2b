"""Keeps the usage that requests of this gateway made, in files that outlive it, and reads what all gateways kept.

Each gateway process writes one file per day, ``DAY.GATEWAY.jsonl``, with its sums of that day, and replaces it whole.
So a file has one writer and is never torn; writing again after a failure counts nothing twice; what a process that died
has written stays as it is, for its successor begins a file of its own. A database in the folder would need locks that
network file systems do not keep.
"""

import asyncio
import contextlib
import logging
import math
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from serve_app import errors, usage
from serve_app.usage import Day, Use

logger = logging.getLogger("ray.serve")

# What a crash may lose, with the time that a write takes.
WRITE_EVERY_S = 1.0
# A gateway without requests shows so often that it writes here; whose file of today is older than that by far does not.
SHOW_EVERY_S = 5.0
FRESH_S = 20.0
# A network file system that hangs must not keep a gateway from ending.
LAST_WRITE_S = 5.0
T = TypeVar("T")
_FILE = re.compile(r"(\d{4}-\d\d-\d\d)\.([0-9a-f]+)\.jsonl")


class UsageBook:
    """``folder()``: where the files are now; None: no usage is kept. ``clock()``: Unix time in seconds."""

    def __init__(self, folder: Callable[[], str | None], clock: Callable[[], float] = time.time) -> None:
        # Whose files they are: no other book, before or beside it, has this name. Made here: Serve sends gateways their
        # class together with the constants that it names, so one of those would be the same in all of them.
        self._gateway = uuid.uuid4().hex
        self._folder = folder
        self._clock = clock
        self._days: dict[str, Day] = {}  # today, and what could not be written yet
        self._unwritten: set[str] = set()
        self._today = ""
        self._written_to: str | None = None
        self._shown = -SHOW_EVERY_S
        self._failed = False
        self._task: asyncio.Task[None] | None = None
        # One thread for all that touches the folder: writes do not overtake each other, also where one is cancelled,
        # and many questions at once wait here.
        self._thread = ThreadPoolExecutor(1, "usage")

    def add(self, key: str, model: str, use: Use) -> None:
        """``usage.Told``: it counts for the day on which the request ended."""
        if self._folder() is None:
            return
        today = self._day()
        usage.add(self._days.setdefault(today, {}), key, model, use)
        self._unwritten.add(today)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Write what is left, ``LAST_WRITE_S`` at most."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.write(), LAST_WRITE_S)
        self._thread.shutdown(wait=False)

    async def write(self) -> None:
        """All that is not in the folder yet. What fails is kept, and tried again next time."""
        folder = self._folder()
        if folder is None:
            return
        if folder != self._written_to:
            self._unwritten |= self._days.keys()
        if folder != self._written_to or time.monotonic() - self._shown >= SHOW_EVERY_S:
            self._days.setdefault(self._day(), {})
            self._unwritten.add(self._day())
        days = {day: dict(self._days[day]) for day in self._unwritten}
        if not days:
            return
        try:
            await self._in_thread(_write, Path(folder), self._gateway, days)
        except OSError as error:
            if not self._failed:
                logger.error(
                    f"usage cannot be written to {folder}: {error.strerror or error}. Requests are served, and what "
                    "they use is kept in memory until it can be; it is lost if this gateway ends before that."
                )
            self._failed = True
            return
        if self._failed:
            logger.info("usage is written to %s again", folder)
        self._failed, self._written_to, self._shown = False, folder, time.monotonic()
        self._unwritten -= {day for day, written in days.items() if self._days[day] == written}
        for day in days.keys() - self._unwritten - {self._day()}:
            del self._days[day]

    async def answer(self, since: str | None, until: str | None, key: str | None, gateways: int) -> bytes:
        """``usage.answer`` from what all gateways have written, of which ``gateways`` run now. Raises
        ``InvalidRequest``; ``NotFound`` where no usage is kept, ``Unavailable`` where it cannot be read."""
        folder = self._folder()
        if folder is None:
            raise errors.NotFound("No usage is kept here: the gateway's settings name no usage_dir.")
        first, last = usage.span(since, until, self._day())
        try:
            days, seen = await self._in_thread(_read, Path(folder), first, last, self._gateway)
        except (OSError, ValueError) as error:
            # Also for a moment where another machine has just replaced a file on a network file system.
            logger.error("usage cannot be read from %s: %r", folder, error)
            raise errors.Unavailable(
                "This gateway cannot read the usage now; its log says why.", code="usage_unavailable", retry_after_s=1
            ) from None
        complete = not self._failed and len(seen) >= gateways
        return await self._in_thread(usage.answer, days, first, last, key, complete)

    def _day(self) -> str:
        """Never an earlier one than before: what was written of a day that is over is not known here any more."""
        self._today = max(self._today, usage.day_of(self._clock()))
        return self._today

    async def _in_thread(self, work: Callable[..., T], *given: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *given)

    async def _run(self) -> None:
        while True:
            await self.write()
            await asyncio.sleep(WRITE_EVERY_S)


def _write(folder: Path, gateway: str, days: Mapping[str, Day]) -> None:
    """Raises ``OSError``. The folder is not made: a share that is not mounted must not become a folder of its own."""
    new = folder / f".{gateway}.new"
    for day, sums in days.items():
        with new.open("w") as file:
            file.write(usage.text(sums))
            file.flush()
            os.fsync(file.fileno())
        new.replace(folder / f"{day}.{gateway}.jsonl")
    names = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(names)
    finally:
        os.close(names)


def _read(folder: Path, since: str, until: str, gateway: str) -> tuple[dict[str, Day], set[str]]:
    """The sums of these days, and which gateways write here now. Raises ``OSError``; ``ValueError`` where a file is
    damaged."""
    days: dict[str, Day] = {}
    newest: dict[str, float] = {}
    for path in folder.iterdir():
        if name := _FILE.fullmatch(path.name):
            day, writer = name.groups()
            newest[writer] = max(newest.get(writer, 0.0), path.stat().st_mtime)
            if since <= day <= until:
                with path.open() as file:
                    try:
                        usage.read(file, days.setdefault(day, {}))
                    except ValueError as error:
                        raise ValueError(f"{path.name}: {error}") from error
    # By the folder's clock: those of the nodes may differ.
    now = newest.get(gateway, math.inf)
    return days, {writer for writer, at in newest.items() if at > now - FRESH_S}
