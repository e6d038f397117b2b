"""An engine process must not outlive its replica.

When Serve (or the kernel) SIGKILLs a replica, vLLM's child processes go on, with the device memory. vLLM loads every
``vllm.general_plugins`` entry point in each of its processes; ours (see pyproject.toml) starts a thread there that
waits for the parent process to end and then kills its own process. Workers are children of the engine process, so
the whole tree falls within a moment.

Not ``PR_SET_PDEATHSIG``: it fires when the *thread* that spawned the child ends, and Ray spawns from pool threads.
"""

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading

_installed = False


def install() -> None:
    """Watch the parent, once, and only in a process that ``multiprocessing`` spawned (never in a replica itself)."""
    global _installed
    parent = multiprocessing.parent_process()
    if parent is None or _installed:
        return
    _installed = True
    # The sentinel is a pipe whose other end lives in the parent: it becomes readable when the parent is gone, and is
    # readable at once when the parent died before this plugin was loaded.
    threading.Thread(target=_die_with, args=(parent.sentinel,), name="modelyard-orphan-guard", daemon=True).start()


def _die_with(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    # SIGKILL rather than sys.exit: the main thread may sit in a device call that never returns.
    os.kill(os.getpid(), signal.SIGKILL)
