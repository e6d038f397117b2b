"""Why a child process did not start, from what it wrote: its parent often knows no more than that it ended."""

import os
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG

_TRACEBACK = "Traceback (most recent call last):"


class Output:
    """What this process and its children write to the file descriptor ``fd`` from now on."""

    def __init__(self, fd: int = 1) -> None:
        self._fd = fd
        self._begin = os.fstat(fd).st_size

    def text(self) -> str:
        """Empty where the output does not go into a file, or the system does not let it be read. Ray's workers have a
        file."""
        if not S_ISREG(os.fstat(self._fd).st_mode):
            return ""
        with suppress(OSError), Path(f"/dev/fd/{self._fd}").open(errors="replace") as written:
            written.seek(self._begin)
            return written.read()
        return ""


def first_error(text: str, after: str) -> str:
    """How the first traceback behind the words ``after`` ends, such as ``ValueError: no memory is left``: in a chain of
    errors that is the one that caused the others. Empty where there is none.

    An error without words gets the line of code that raised it. Where a logger put its prefix before each line, that of
    another process may have lines in between.
    """
    prefix, code = None, ""
    for line in text.partition(after)[2].splitlines():
        if prefix is None:
            prefix = line.removesuffix(_TRACEBACK) if line.endswith(_TRACEBACK) else None
        elif line.startswith(prefix) and (said := line.removeprefix(prefix)).strip():
            if not said[0].isspace():
                return said if ": " in said else f"{said}: {code}"
            code = said.strip() if said.strip(" ~^") else code
    return ""
