"""Engines that share a GPU start one after the other.

vLLM measures what is free on the whole GPU while it starts. Two that start at once count each other's memory as their
own: one was seen to lay out three quarters of its KV cache, and vLLM gives up where memory becomes free meanwhile.
"""

import asyncio
import fcntl
import logging
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

logger = logging.getLogger("ray.serve")

LOOK_S = 0.2


@asynccontextmanager
async def gpu_turn(gpu: str, folder: Path | None = None) -> AsyncIterator[None]:
    """Hold the GPU ``gpu`` (as ``CUDA_VISIBLE_DEVICES`` names it on this node) against other starts. A holder that dies
    lets go of it. ``folder``: where the locks are; the node's own, never one that nodes share."""
    name = "".join(c if c.isalnum() or c in "-," else "_" for c in gpu)
    path = (folder or Path(tempfile.gettempdir())) / f"modelyard-gpu-{name}.lock"
    lock = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
    try:
        said = False
        while not _took(lock):
            if not said:
                logger.info("another engine starts on GPU %s: this one waits for it", gpu)
                said = True
            await asyncio.sleep(LOOK_S)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # not only closed: the engine's process may have inherited it
    finally:
        os.close(lock)


def _took(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
