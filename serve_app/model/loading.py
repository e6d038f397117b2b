"""What a replica tells of its start while the engine loads: how far a download is, or for how long it has been loading.

vLLM downloads what a hub model lacks itself; how far it is can be seen in the hub cache's folder alone. Loading blocks
the replica's event loop, so all of this runs in a thread.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from serve_app.config import Source
from serve_app.planning.checkpoint import CheckpointError, Unobtainable, checkpoint_config, hub_folder

TELL_S = 1.0


class Download:
    """Of the files in a hub cache's ``folder`` of one model; ``total``: the weights' bytes, None where not known."""

    def __init__(self, folder: Path, total: int | None) -> None:
        self._blobs = folder / "blobs"
        self._total = total

    def progress(self) -> str:
        """Empty while nothing is being downloaded."""
        done, unfinished = 0, False
        with suppress(OSError):  # no folder yet, or a file that got its final name meanwhile
            for file in self._blobs.iterdir():
                done += file.stat().st_size
                unfinished |= file.suffix == ".incomplete"
        if not unfinished:
            return ""
        of = f" of {max(self._total, done) / 1e9:.1f}" if self._total else ""
        return f"downloading: {done / 1e9:.1f}{of} GB"


def download(source: Source, engine: Mapping[str, Any]) -> Download | None:
    """For an engine with the arguments ``engine``; None: nothing from a hub. Unobtainable: the hub would refuse it."""
    if source.hub is None:
        return None
    cache = {"HF_HUB_CACHE": str(engine["download_dir"])} if engine.get("download_dir") else {}
    total = None
    try:
        total = checkpoint_config(source, engine, cache).stored_bytes
    except Unobtainable:
        raise
    except CheckpointError:  # no config.json, or a hub in trouble: the engine may know what to do
        pass
    return Download(hub_folder(source.hub, os.environ | cache), total)


@contextmanager
def told(tell: Callable[[str], object], download: Download | None) -> Iterator[None]:
    """Every second of the block ``tell`` gets one line on how far the start is."""
    over, began = threading.Event(), time.monotonic()

    def telling() -> None:
        while not over.wait(TELL_S):
            progress = download.progress() if download else ""
            tell(progress or f"loading for {time.monotonic() - began:.0f} s")

    thread = threading.Thread(target=telling, name="loading", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
