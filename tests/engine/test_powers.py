"""``loadtest.powers`` on a real engine: what it reads of vLLM's logs and metrics is there."""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from loadtest.held import held
from loadtest.powers import quality, report
from loadtest.powers.measure import Setting, measure, pools, started
from loadtest.powers.rows import ROWS, Load

pytestmark = pytest.mark.engine


def test_a_row_is_measured_on_a_real_engine(engine_home: Path, tmp_path: Path) -> None:
    """N-gram speculation on a text that repeats its prompt: drafts are counted and some accepted, the KV cache has the
    tokens that fit 256 MiB, every answer has its tokens; and each figure of the row's table has a value."""
    row = replace(ROWS["cpu-ngram"], loads=(Load(2, tokens=16, texts="copying"),))
    setting = Setting(seconds=3.0, warm_up=0.5, repeats=1, clients=1, start_s=200.0)
    _, speculating = row.variants
    with ExitStack() as stack:
        begin = partial(started, speculating.models, setting, tmp_path)
        up = stack.enter_context(held({"one": begin}, lambda _: print))
        ((_, found),) = measure([row], up["one"].started.result(), setting, pools(setting, stack), print)
    assert found["kv_tokens"] == {"bench": 11648}
    engine = found["loads"][0]["engine"]
    assert 0 < engine["accepted_tokens"] <= engine["draft_tokens"]
    assert engine["generated"] > 0
    assert engine["running_peak"] >= 1
    assert found["memory_gib"]["engine"] > 0.5
    assert {len(answer) for answer in found["said"]["answers"]} == {quality.ANSWER_TOKENS}
    line = {"row": row.name, "variant": speculating.name, **found}
    cells, _ = report.text_rows(row, [line])
    assert [name for name, cell in zip(report.columns(row), cells, strict=True) if not cell] == ["same answers"]
