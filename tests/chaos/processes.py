"""Which processes replicas and engines are, which of them were seen, and which are still there."""

import contextlib
import signal
from collections.abc import Iterable

import psutil


def engines(replica: int) -> list[psutil.Process]:
    """The processes that a replica started for its engine; none where the engine is a part of the replica."""
    found = []
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(replica).children():
            with contextlib.suppress(psutil.Error):
                # multiprocessing's own helper, which ends with its owner
                if "resource_tracker" not in " ".join(child.cmdline()):
                    found.append(child)
    return found


def lives(process: psutil.Process) -> bool:
    """A zombie does not, unless other threads of it are still on their way out: until then its sockets are open."""
    try:
        return process.is_running() and (process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1)
    except psutil.Error:
        return False


class Seen:
    """Every process that a replica was, or had started, at any look. A process is known by its id and start time."""

    def __init__(self) -> None:
        self._titles: dict[psutil.Process, str] = {}

    def look(self, replicas: Iterable[tuple[str, int]]) -> None:
        """``replicas``: name and process id of those that Serve has now."""
        for name, pid in replicas:
            for process in _family(pid):
                part = "replica" if process.pid == pid else "child of replica"
                self._titles.setdefault(process, f"{part} {name}, process {process.pid}")

    def orphans(self, replicas: Iterable[tuple[str, int]]) -> dict[psutil.Process, str]:
        """What lives although it belongs to none of ``replicas``, and its title."""
        belonging = {process for _, pid in replicas for process in _family(pid)}
        return {p: title for p, title in self._titles.items() if p not in belonging and lives(p)}


def _family(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


class Stopped:
    """Processes that were sent SIGSTOP, so that none is left stopped whatever happens."""

    def __init__(self) -> None:
        self._processes: dict[psutil.Process, str] = {}

    def stop(self, process: psutil.Process, title: str) -> None:
        self._processes[process] = title
        process.send_signal(signal.SIGSTOP)

    def left(self) -> list[str]:
        """Those that nobody has ended yet."""
        return [title for process, title in self._processes.items() if lives(process)]

    def kill(self) -> None:
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
