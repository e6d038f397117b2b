"""Contexts that are open in processes of their own: systems under load start and end at once, each with an environment,
signal handlers and, where it wants, a Python of its own."""

import contextlib
import multiprocessing
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

from loadtest.clusters import ClusterFault

T = TypeVar("T")
Tell = Callable[[str], None]
# Called in the process that holds: it and what the context yields must pickle.
Begin = Callable[[Tell], AbstractContextManager[T]]


class Held(Generic[T]):
    """``started``: what the context yielded; or what was raised instead, ClusterFault where its process just ended.
    ``late``: what its end raised."""

    def __init__(self, begin: Begin[T], tell: Tell, python: str = sys.executable) -> None:
        self.started: Future[T] = Future()
        self.late: Exception | None = None
        self._tell = tell
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_hold, args=(begin, theirs))
        context.set_executable(python)  # one for all that are started
        try:
            self._process.start()
        finally:
            context.set_executable(sys.executable)
        theirs.close()
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def _listen(self) -> None:
        try:
            while True:
                kind, value = self._ours.recv()
                if kind == "told":
                    self._tell(value)
                elif kind == "found":
                    self.started.set_result(value)
                elif self.started.done():
                    self.late = value
                else:
                    self.started.set_exception(value)
        # Whatever it is: somebody waits.
        except Exception as error:
            if not self.started.done():
                ended = isinstance(error, EOFError | ConnectionError)
                why = "its process ended; see above" if ended else f"what it said cannot be read: {error}"
                self.started.set_exception(ClusterFault(why))

    def end(self) -> None:
        """Let the context end, whether or not it is open yet. Returns at once."""
        with contextlib.suppress(OSError):
            self._ours.send("end")
        if not self.started.done():
            self._process.terminate()

    def ended(self) -> None:
        """Once it has."""
        self._process.join()
        self._listener.join()
        self._ours.close()


@contextmanager
def held(
    begins: Mapping[str, Begin[T]], tells: Callable[[str], Tell], pythons: Mapping[str, str] | None = None
) -> Iterator[dict[str, Held[T]]]:
    """Open all contexts at once, and end all at once. ``tells``: of each, by its name; ``pythons``: of those that want
    another than this one."""
    all_held: dict[str, Held[T]] = {}
    try:
        for name, begin in begins.items():
            all_held[name] = Held(begin, tells(name), (pythons or {}).get(name, sys.executable))
        yield all_held
    finally:
        for one in all_held.values():
            one.end()
        for one in all_held.values():
            one.ended()
        for one in all_held.values():
            if one.late:
                raise one.late


def _hold(begin: Begin[T], pipe: Connection) -> None:
    """Until told to end, or until whoever would tell is gone."""
    # Ctrl-C and a closed terminal are for them. Not SIG_IGN, which the processes of the system would inherit.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGTERM, _interrupt)

    def send(kind: str, value: object) -> None:
        with contextlib.suppress(OSError):
            pipe.send((kind, value))

    try:
        with begin(lambda what: send("told", what)) as found:
            send("found", found)
            with contextlib.suppress(EOFError, OSError):
                pipe.recv()
    except Exception as error:
        send("fault", error)
    except KeyboardInterrupt:
        pass


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
