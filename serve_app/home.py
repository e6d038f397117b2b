"""Where Modelyard keeps what it makes on this machine."""

import os
from pathlib import Path


def home() -> Path:
    """``$MODELYARD_HOME``, by default ``~/.cache/modelyard``. It may not exist yet."""
    return Path(os.environ.get("MODELYARD_HOME") or "~/.cache/modelyard").expanduser().absolute()
