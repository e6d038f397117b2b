"""What was seen, what is stopped and what is left, on processes of the tests' own."""

import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.chaos.processes import Seen, Stopped, engines, lives

# A "replica" that starts an "engine", says so, and waits.
PARENT = (
    "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE); "
    "print(child.pid, flush=True); input()"
)


@pytest.fixture
def family() -> Iterator[tuple[psutil.Popen, psutil.Process]]:
    """A process and its child; neither outlives the test."""
    replica = psutil.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    engine = psutil.Process(int(replica.stdout.readline()))
    yield replica, engine
    for process in (engine, replica):
        if lives(process):
            process.kill()
    replica.communicate()


def test_an_engine_left_behind_is_an_orphan(family: tuple[psutil.Popen, psutil.Process]) -> None:
    """A replica that Serve has is none, nor is its engine; of one that Serve has no more, whatever lives is one."""
    replica, engine = family
    seen = Seen()
    of_replica = [("r1", replica.pid)]
    seen.look(of_replica)
    assert engines(replica.pid) == [engine]
    assert seen.orphans(of_replica) == {}
    assert set(seen.orphans([])) == {psutil.Process(replica.pid), engine}
    engine.kill()
    while lives(engine):
        time.sleep(0.01)
    assert list(seen.orphans([]).values()) == [f"replica r1, process {replica.pid}"]


def test_nothing_stays_stopped(family: tuple[psutil.Popen, psutil.Process]) -> None:
    """A stopped process counts until it has ended, and is ended in the end."""
    replica, _engine = family
    stopped = Stopped()
    stopped.stop(psutil.Process(replica.pid), "r1")
    assert stopped.left() == ["r1"]
    stopped.kill()
    replica.wait(10)
    assert stopped.left() == []


def test_a_zombie_does_not_live(family: tuple[psutil.Popen, psutil.Process]) -> None:
    """A process that has ended and that its parent has not looked after."""
    _replica, engine = family
    assert lives(engine)
    engine.kill()
    while engine.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert not lives(engine)
