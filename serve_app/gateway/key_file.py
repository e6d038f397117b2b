"""Where the gateway's keys come from: a file that every gateway node has, or the environment. Looked at again while
requests come, so a changed file counts within a second or two and restarts nothing."""

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import yaml

from serve_app import errors, keys
from serve_app.keys import ANYBODY, KEYS_VARIABLE, Caller, KeyRing

logger = logging.getLogger("ray.serve")

LOOK_EVERY_S = 1.0


class KeyFile:
    """``path()``: the file that is configured now; None: the environment's keys, or no keys at all.

    It fails closed: with a file that cannot be read the keys that were read before stay in force, and where there were
    none nobody gets in.
    """

    def __init__(self, path: Callable[[], str | None]) -> None:
        self._path = path
        self._ring: KeyRing | None = None
        self._read_from: object = None  # what of the source was read last: path and stamp, or the variable's text
        self._looked = -LOOK_EVERY_S

    @property
    def on(self) -> bool:
        """Keys are configured."""
        return self._path() is not None or bool(os.environ.get(KEYS_VARIABLE))

    def caller(self, headers: Mapping[bytes, bytes]) -> Caller:
        """Who sends these headers. Raises ``Unauthorized``; ``Unavailable`` where keys are configured and none could
        be read."""
        if not self.on:
            return ANYBODY
        now = time.monotonic()
        if now - self._looked >= LOOK_EVERY_S:
            self._looked = now
            self._look()
        if self._ring is None:
            raise errors.Unavailable("This gateway cannot read its keys; its log says why.", retry_after_s=5)
        return self._ring.caller(headers)

    def _look(self) -> None:
        path = self._path()
        try:
            if path is None:
                source: object = os.environ[KEYS_VARIABLE]
            else:
                stat = os.stat(path)
                source = (path, stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if source == self._read_from:
                return
            self._read_from = source
            text = os.environ[KEYS_VARIABLE] if path is None else Path(path).read_text()
            self._ring = keys.parse(yaml.safe_load(text))
            logger.info("keys read from %s", path or KEYS_VARIABLE)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)  # the error's own text would quote the file
            self._complain(path, f"it is no YAML{f', line {mark.line + 1}' if mark else ''}")
        except (OSError, ValueError) as error:
            self._complain(path, error.strerror if isinstance(error, OSError) and error.strerror else str(error))

    def _complain(self, path: str | None, why: str) -> None:
        rest = "the keys read before stay in force" if self._ring is not None else "nobody gets in"
        logger.error("cannot read the keys in %s: %s; %s", path or KEYS_VARIABLE, why, rest)
