"""What `modelyard plan` predicts, against what vLLM finds when it starts. Dummy weights, no network.

    python -m loadtest.plan_accuracy RESULTS.jsonl                    # on a GPU host
    python -m loadtest.plan_accuracy RESULTS.jsonl --device cpu       # a check of this program itself
    python -m loadtest.plan_accuracy RESULTS.jsonl --no-measure       # print what was measured before

Each row starts one engine in a process of its own. Rows that RESULTS has are not measured again. Exit status 1 when
a prediction of the KV tokens is more than 5 % off, or a row failed.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from serve_app.config import ModelArgs
from serve_app.planning.memory import Sizes, sizes
from serve_app.sources import read_shape, resolve

GOAL = 0.05
GIB = 1 << 30
# Engines of this program ask for no hub, and compile nothing that takes minutes.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
EAGER = {"enforce_eager": True}


@dataclass(frozen=True)
class Row:
    """One start of an engine. ``shape``: a file of deployments/shapes. ``devices``: GPUs; 0 is the CPU engine."""

    name: str
    shape: str
    engine: Mapping[str, Any] = field(default_factory=dict)
    tensor: int = 1
    devices: int = 1

    def args(self, tokenizer: str | None) -> ModelArgs:
        return ModelArgs.model_validate(
            {
                "source": {"shape": f"shapes/{self.shape}.json", "tokenizer": tokenizer},
                "engine": dict(self.engine),
                "tensor_parallel_size": self.tensor,
                "resources": {"num_gpus": min(1, self.devices)},
            }
        )


_SMOL, _LLAMA, _CODE = "SmolLM2-135M-Instruct", "Llama-3.1-8B-Instruct", "CodeLlama-7b-Instruct-hf"
_MOE, _MLA = "Qwen3-30B-A3B", "DeepSeek-V2-Lite-Chat"
_16K = {"max_model_len": 16384}
# As much as a GPU of 24 GB has, where what is no KV cache weighs most.
_SMALL = _16K | EAGER | {"gpu_memory_utilization": 0.16}
# The most telling first: time on such a host is short.
ROWS = (
    Row("smollm2", _SMOL, EAGER),
    Row("llama-8b", _LLAMA, _16K),
    Row("qwen3-30b-a3b", _MOE, _16K | EAGER),
    Row("deepseek-v2-lite", _MLA, _16K | EAGER),
    Row("llama-8b-fp8-kv", _LLAMA, _16K | EAGER | {"kv_cache_dtype": "fp8"}),
    Row("llama-8b-24gb", _LLAMA, _SMALL),
    Row("qwen3-30b-a3b-graphs", _MOE, _16K),
    Row("codellama-7b", _CODE, EAGER),
    Row("llama-8b-24gb-batch-8k", _LLAMA, _SMALL | {"max_num_batched_tokens": 8192}),
    Row("smollm2-graphs", _SMOL),
    Row("codellama-7b-tp2", _CODE, EAGER | {"disable_custom_all_reduce": True}, tensor=2, devices=2),
)
CPU_ROWS = (
    Row("cpu-smollm2", _SMOL, EAGER | {"kv_cache_memory_bytes": 1 << 28}, devices=0),
    Row("cpu-smollm2-2k", _SMOL, EAGER | {"kv_cache_memory_bytes": 1 << 28, "max_model_len": 2000}, devices=0),
)

_LOGGED = {
    "weights_gib": r"Model loading took ([\d.]+) GiB",
    "available_gib": r"Available KV cache memory: ([\d.]+) GiB",
    "activations_gib": r"([\d.]+) GiB for peak activation",
    "libraries_gib": r"([\d.]+) GiB for non-torch memory",
    "graphs_gib": r"([\d.]+) GiB for CUDAGraph memory",
    "graphs_counted_gib": r"GiB \(actual\), ([\d.]+) GiB \(estimated\)",
}


def logged(log: str) -> dict[str, float]:
    """What vLLM's log says of its memory, in GiB; of the first worker that says it."""
    return {key: float(found[1]) for key, pattern in _LOGGED.items() if (found := re.search(pattern, log))}


def predicted(measured: Mapping[str, Any]) -> Sizes:
    """The plan's sizes for the engine of a measured row."""
    args = ModelArgs.model_validate(measured["args"])
    return sizes(args, read_shape(resolve(args.source)), gpu_bytes=measured.get("device_bytes"))


def error(measured: Mapping[str, Any]) -> float:
    """Predicted KV tokens over reported ones, less one."""
    tokens = predicted(measured).memory.kv_tokens(measured["device_bytes"])
    return tokens / float(measured["kv_tokens"]) - 1


def table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """Predicted and reported, side by side; memory in GiB."""
    shown = Table("row", box=None)
    for column in ("KV tokens", "reported", "error", "weights", "reported", "working", "reported", "graphs", "seconds"):
        shown.add_column(column, justify="right")
    for row in rows:
        if "failed" in row:
            shown.add_row(row["row"], row["failed"])
            continue
        memory = predicted(row).memory
        working = None
        if "activations_gib" in row:
            working = row["activations_gib"] + row["libraries_gib"] + row.get("graphs_counted_gib", 0.0)
        shown.add_row(
            row["row"],
            f"{memory.kv_tokens(row['device_bytes']):,}",
            f"{row['kv_tokens']:,}",
            f"{error(row):+.2%}",
            f"{memory.weights / GIB:.2f}",
            _gib(row.get("weights_gib")),
            f"{memory.working / GIB:.2f}",
            _gib(working),
            _gib(row.get("graphs_gib")),
            f"{row['seconds']:.0f}",
        )
    return shown


def _gib(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def measure(row: Row, tokenizer: str | None, limit_s: float, logs: Path) -> dict[str, Any]:
    """Start the row's engine, at most ``limit_s`` seconds. Its log is kept in ``logs``."""
    args = row.args(tokenizer)
    log = logs / f"{row.name}.log"
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, log.open("w") as out:
        answer = Path(folder) / "answer.json"
        child = subprocess.Popen(
            [sys.executable, "-m", "loadtest.engine_start", str(answer)],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            env=ENVIRONMENT | os.environ,
            start_new_session=True,  # its workers die with it
        )
        failed = None
        try:
            child.communicate(args.model_dump_json(), timeout=limit_s)
        except subprocess.TimeoutExpired:
            failed = f"not up after {limit_s:.0f} s"
        finally:
            _end(child)
        found: dict[str, Any] = {"row": row.name, "args": args.model_dump(mode="json", exclude_none=True)}
        found["seconds"] = time.monotonic() - began
        if failed is None and answer.exists():
            answered: dict[str, Any] = json.loads(answer.read_text())
            return found | answered | logged(log.read_text())
        return found | {"failed": failed or last_error(log.read_text())}


def _end(child: "subprocess.Popen[str]") -> None:
    """End the child's whole process group, workers that outlived it too."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def last_error(log: str) -> str:
    """The last line of ``log`` that names an error, shortened."""
    errors = [line.strip() for line in log.splitlines() if re.search(r"\b\w*(Error|Exception)\b.*:", line)]
    return errors[-1][-200:] if errors else "ended without an answer; see its log"


def read(results: Path) -> list[dict[str, Any]]:
    """The rows of earlier runs that succeeded."""
    lines = results.read_text().splitlines() if results.exists() else []
    return [row for line in lines if line and "failed" not in (row := json.loads(line))]


def main(
    results: Annotated[Path, typer.Argument(help="A file that keeps the raw rows, one JSON object per line.")],
    device: Annotated[Literal["gpu", "cpu"], typer.Option(help="Which rows to measure.")] = "gpu",
    gpus: Annotated[int, typer.Option(help="GPUs of this host; rows that need more are left out.")] = 1,
    only: Annotated[list[str] | None, typer.Option(help="Measure this row; may be repeated.")] = None,
    measure_rows: Annotated[bool, typer.Option("--measure/--no-measure", help="Or only print what is there.")] = True,
    tokenizer: Annotated[str | None, typer.Option(help="Folder of any tokenizer; default: the demo model's.")] = None,
    row_limit_s: Annotated[float, typer.Option(help="Longest start of one engine.")] = 240.0,
    budget_s: Annotated[float, typer.Option(help="Begin no row that might end later than this.")] = 570.0,
    row_usual_s: Annotated[float, typer.Option(help="A row is begun only with this much of the budget left.")] = 60.0,
) -> None:
    """Measure the rows that are missing, then print all of them."""
    console = Console(width=None if Console().is_terminal else 160)
    rows = [r for r in (CPU_ROWS if device == "cpu" else ROWS) if r.devices <= gpus and (not only or r.name in only)]
    known = {row["row"] for row in read(results)}
    failures: list[dict[str, Any]] = []
    logs = results.with_suffix(".logs")
    end = time.monotonic() + budget_s
    for number, row in enumerate(rows, 1):
        left = end - time.monotonic()
        if not measure_rows or row.name in known:
            continue
        if left < row_usual_s:
            console.print(f"{row.name}: not begun, {left:.0f} s are left")
            continue
        logs.mkdir(parents=True, exist_ok=True)
        console.print(f"{number}/{len(rows)} {row.name} …", end=" ")
        found = measure(row, tokenizer, min(row_limit_s, left), logs)
        with results.open("a") as file:
            file.write(json.dumps(found) + "\n")
        if "failed" in found:
            failures.append(found)
        console.print(found.get("failed") or f"{error(found):+.2%} in {found['seconds']:.0f} s")
    measured = read(results)
    console.print(table([*measured, *failures]))
    if failures or any(abs(error(row)) > GOAL for row in measured):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
