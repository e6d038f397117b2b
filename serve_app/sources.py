"""Where the files of a source are. One rule, for ``check`` and for the replicas.

Serve hands a model's ``args`` to replicas on any node and says neither which file they came from nor in which folder
the command ran. So a path means the same everywhere only if it is absolute. The one exception are the shapes that
come with this repository: ``shapes/NAME.json`` is ``deployments/shapes/NAME.json`` beside the ``serve_app`` package.
"""

import json
from pathlib import Path, PurePosixPath
from typing import Any

from serve_app.config import Source

SHAPES = Path(__file__).resolve().parent.parent / "deployments" / "shapes"


class SourceError(ValueError):
    """A source that cannot be used, in words for the person who wrote it."""


def resolve(source: Source) -> Path:
    """The folder of a ``path`` source or the ``config.json`` of a ``shape`` source. It need not exist.

    SourceError: a relative path, or a source that has no files of its own.
    """
    given = source.path or source.shape
    if given is None:
        raise SourceError("only path and shape sources have a path")
    path = Path(given)
    if path.is_absolute():
        return path
    parts = PurePosixPath(given).parts
    if source.shape and len(parts) == 2 and parts[0] == "shapes" and parts[1] != "..":
        return SHAPES / parts[1]
    raise SourceError(f"{given} is relative: replicas run on other nodes and in other folders")


def read_shape(path: Path) -> dict[str, Any]:
    """The model configuration in ``path``. SourceError: unreadable, or not a model's ``config.json``."""
    try:
        shape = json.loads(path.read_bytes())
    except OSError as e:
        raise SourceError(f"cannot read {path}: {e.strerror}") from e
    except ValueError as e:
        raise SourceError(f"{path} is not JSON: {e}") from e
    if not isinstance(shape, dict) or not shape.get("architectures") or not shape.get("model_type"):
        raise SourceError(f"{path} is not a model's config.json: it needs architectures and model_type")
    return shape
