"""report and figures: what a person reads and what a machine reads of a plan."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from serve_app.planning.changes import Action, Change
from serve_app.planning.figures import as_json, model_figures
from serve_app.planning.fleet import fleet
from serve_app.planning.nodes import GIB, parse_nodes
from serve_app.planning.plan import Plan, make_plan
from serve_app.planning.report import report
from tests.planning.fleets import config, model, scaled, sizer

ROOT = Path(__file__).resolve().parents[2]
ENTRIES = (
    model("chat", deployment=scaled(1, 3)),
    model("pair", tensor_parallel_size=2),
    model("small", resources={"num_gpus": 0.25}, deployment={"num_replicas": 2}),
    model("[odd]"),
)
SIZERS = {"chat": sizer(16), "pair": sizer(20), "small": sizer(1)}


def planned(nodes: str | None = "1x4xH200-141G:16cpu,1x2xL4-24G:8cpu", **more: Any) -> Plan:
    return make_plan(fleet(config(*ENTRIES)), SIZERS, None if nodes is None else parse_nodes(nodes), **more)


def text(plan: Plan, width: int = 80, unknown: dict[str, str] | None = None) -> str:
    """As in a file or a pipe: no colour, no control characters."""
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(report(plan, unknown or {}))
    return out.getvalue()


def line(text: str, start: str) -> str:
    return next(each for each in text.splitlines() if each.startswith(start))


def test_a_row_per_model() -> None:
    """Replicas, GPUs, memory on each GPU, tokens of a replica, sequences of all replicas at min and at max."""
    shown = text(planned())
    # 141 GiB × 0.9 − 16 GiB = 110.9 GiB at 64 KiB a token.
    assert line(shown, "chat").split() == [
        "chat",
        "1–3",
        "1",
        "16",
        "GiB",
        "111",
        "GiB",
        "1,816,985",
        "111–222",
        "×",
        "16,384",
    ]


def test_a_bar_per_gpu_with_what_is_on_it() -> None:
    """Node, GPU, bar, amounts and names; shares of models that are on one GPU; what is free says so."""
    shown = text(planned(), width=120)
    for part in ("H200-1", "4 H200, 141 GiB each", "L4-1", "pair#1", "0.25 small#1, 0.25 small#2", "gateway#1", "free"):
        assert part in shown
    assert "━" in shown
    assert re.search(r"\d+ of 6 GPUs stay free, (all|at most \d) on one node", shown)


@pytest.mark.parametrize("width", [80, 120])
def test_it_fits_the_terminal(width: int) -> None:
    """No line is longer, nothing is cut, and nothing is said by colour alone."""
    shown = text(planned(), width)
    assert max(len(each) for each in shown.splitlines()) <= width
    assert "…" not in shown
    assert "\x1b" not in shown
    assert "[odd]" in shown


def test_nodes_that_look_the_same_are_shown_once() -> None:
    """Thirty full nodes are one block with their number."""
    plan = make_plan(
        fleet(config(model("chat", deployment={"num_replicas": 60}))), {"chat": sizer(9)}, parse_nodes("30x2xL4-24G")
    )
    shown = text(plan)
    assert "L4-2 … L4-30" in shown or "L4-1 … L4-29" in shown
    assert "29 nodes like this" in shown
    assert len(shown.splitlines()) < 25


def test_what_does_not_fit_is_said_with_what_would() -> None:
    """And the last line is the verdict."""
    shown = text(planned("1x1xL4-24G"))
    assert "pair: 0 of 1 replica fit. It needs 2 GPUs of one node; the cluster has 1 GPU." in shown
    assert "Nearest changes that fit:" in shown
    assert shown.splitlines()[-1] == "Does not fit."
    assert text(planned("1x8xH200-141G")).splitlines()[-1] == "Fits."
    at_max = make_plan(fleet(config(model("chat", deployment=scaled(1, 3)))), {}, parse_nodes("1x1xL4-24G"))
    assert text(at_max).splitlines()[-1] == "Fits at min replicas, not at max."


def test_what_cannot_be_told_is_not_called_a_fit() -> None:
    """A model whose checkpoint could not be read."""
    shown = text(planned("1x8xH200-141G"), unknown={"chat": "no hub"})
    assert shown.splitlines()[-1] == "Fits by numbers of GPUs and CPUs. Cannot tell about the memory of chat."


def test_without_nodes_it_says_what_is_needed() -> None:
    """And how to have it placed."""
    assert "Needs 4.5 to 6.5 GPUs. Name nodes (--nodes) or a cluster (--cluster live)" in " ".join(
        text(planned(None)).split()
    )


def test_what_a_deploy_would_do() -> None:
    """Application, action, reason, and the keys that changed."""
    keys = ("args.engine.max_model_len: 1 → 2",)
    shown = text(planned(changes=[Change("chat", Action.RESTART, "the code version changes", keys)]))
    rows = shown[shown.index("A deploy of this file") :]
    assert line(rows, "chat").split()[:2] == ["chat", "restart"]
    assert keys[0] in rows


def test_figures_of_a_model_on_its_nodes() -> None:
    """Of the smallest GPU that a replica landed on, and sums over replicas."""
    plan = planned()
    figures = model_figures(plan, plan.units[1])
    assert figures is not None
    assert (figures.weights, figures.context, figures.kv_tokens) == (16 * GIB, 16384, 1816985)
    assert figures.at_min == pytest.approx(1816985 / 16384)
    assert model_figures(plan, plan.units[0]) is None


# Objects whose keys are names of the cluster's or of the file's.
BY_NAME = ("resources", "labels", "missing", "free_gpus")


def keys(value: Any, path: str = "") -> set[str]:
    """The path of each key in a JSON value."""
    if isinstance(value, list):
        return {key for each in value for key in keys(each, f"{path}[]")}
    if not isinstance(value, dict) or path.rpartition(".")[2] in BY_NAME:
        return set()
    paths = {f"{path}.{key}" if path else key: inner for key, inner in value.items()}
    return paths.keys() | {key for at, inner in paths.items() for key in keys(inner, at)}


def test_the_documentation_lists_the_keys_of_the_json() -> None:
    """Each by its path, and no other; `max` is as `min`."""
    change = Change("chat", Action.ADD, "it does not run yet", ("a: 1 → 2",))
    plan = planned("1x1xL4-24G:1cpu:rack=a,1x1xH200-141G", changes=[change])
    found = json.loads(json.dumps(as_json(plan, {"[odd]": "no hub"}), allow_nan=False))
    written = (ROOT / "docs" / "planning.md").read_text()
    documented = set(re.findall(r"^\| `([\w.\[\]]+)` \|", written.partition("--json")[2], re.MULTILINE))
    assert documented == {key for key in keys(found) if key.partition(".")[0] != "max"}
    assert found["fits"] is False


def test_json_where_there_is_no_plan() -> None:
    """Without nodes nothing fits or does not: null."""
    found = as_json(planned(None), {})
    assert (found["fits"], found["starts"], found["min"], found["deploy"]) == (None, None, None, None)
