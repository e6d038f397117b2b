"""The arithmetic and the bookkeeping of ``loadtest.plan_accuracy``, without an engine."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from loadtest import plan_accuracy
from loadtest.plan_accuracy import CPU_ROWS, ROWS

LOG = """
INFO 11-30 01:00:00 [model_runner.py:311] Model loading took 14.99 GiB and 3.104412 seconds
INFO 11-30 01:00:09 [gpu_worker.py:561] Available KV cache memory: 112.9 GiB
INFO 11-30 01:00:19 [gpu_worker.py:778] CUDA graph pool memory: 0.71 GiB (actual), 0.64 GiB (estimated), \
difference: 0.07 GiB (9.9%).
INFO 11-30 01:00:20 [gpu_worker.py:856] Free memory on device (139.1/139.8 GiB) on startup. Desired GPU \
memory utilization is (0.92, 128.62 GiB). Actual usage is 14.99 GiB for weight, 0.33 GiB for peak activation, 0.21 GiB \
for non-torch memory, and 0.71 GiB for CUDAGraph memory. Replace gpu_memory_utilization config with ...
"""


def test_the_log_is_read() -> None:
    """What vLLM says in words, and only there."""
    assert plan_accuracy.logged(LOG) == {
        "weights_gib": 14.99,
        "available_gib": 112.9,
        "activations_gib": 0.33,
        "libraries_gib": 0.21,
        "graphs_gib": 0.71,
        "graphs_counted_gib": 0.64,
    }
    assert plan_accuracy.logged("nothing of it") == {}


@pytest.mark.parametrize("row", [*ROWS, *CPU_ROWS], ids=lambda r: r.name)
def test_every_row_can_be_planned(row: plan_accuracy.Row) -> None:
    """On the device that it is for, before time on it is spent."""
    measured = {"args": row.args(None).model_dump(mode="json", exclude_none=True)}
    memory = plan_accuracy.predicted(measured).memory
    assert memory.full_sequences(150_000_000_000) > 1


def test_names_of_rows_are_unique() -> None:
    """Rows that were measured are known by name."""
    names = [row.name for row in (*ROWS, *CPU_ROWS)]
    assert len(set(names)) == len(names)


def _measured(tokens_off: float = 0.0, **more: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "row": "llama-8b",
        "args": ROWS[1].args(None).model_dump(mode="json", exclude_none=True),
        "device_bytes": 150_000_000_000,
        "seconds": 30.0,
    }
    memory = plan_accuracy.predicted(row).memory
    return row | {"kv_tokens": int(memory.kv_tokens(150_000_000_000) / (1 + tokens_off))} | more


def test_the_error_is_of_the_tokens() -> None:
    """Positive where the plan promises more than there is."""
    assert plan_accuracy.error(_measured(0.03)) == pytest.approx(0.03, abs=1e-4)


def test_the_table_shows_measured_and_failed_rows() -> None:
    """A row that failed is not hidden."""
    console = Console(file=io.StringIO(), width=200)
    logged = plan_accuracy.logged(LOG)
    console.print(plan_accuracy.table([_measured(0.03, **logged), {"row": "smollm2", "failed": "not up after 240 s"}]))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "+3.00%" in text
    assert "1.18" in text  # 0.33 + 0.21 + 0.64
    assert "not up after 240 s" in text


def test_failed_rows_are_measured_again(tmp_path: Path) -> None:
    """Those that succeeded are not."""
    results = tmp_path / "rows.jsonl"
    assert plan_accuracy.read(results) == []
    results.write_text("\n".join(json.dumps(r) for r in ({"row": "a"}, {"row": "b", "failed": "x"})) + "\n\n")
    assert [row["row"] for row in plan_accuracy.read(results)] == ["a"]
