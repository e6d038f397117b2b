"""The simulation of ``loadtest.prefix_routing``: its parts, and that prefixes win on a small trace."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from loadtest import prefix_routing as load
from loadtest.prefix_routing import BLOCK, Cache, Fleet, Replay, Request
from serve_app.routing import STRATEGIES

FLEET = Fleet(replicas=4, gateways=1, blocks=400)


def test_the_same_seed_makes_the_same_trace() -> None:
    """Ordered in time, at its rate from the beginning on."""
    trace = load.synthetic(4.0, 60.0, seed=7)
    assert trace == load.synthetic(4.0, 60.0, seed=7) != load.synthetic(4.0, 60.0, seed=8)
    assert [r.at for r in trace] == sorted(r.at for r in trace)
    assert 180 < len(trace) < 300
    assert 15 < sum(r.at < 10 for r in trace) < 60
    assert all(len(r.blocks) == r.prompt // BLOCK for r in trace)


def test_the_published_trace_is_read(tmp_path: Path) -> None:
    """Milliseconds become seconds; its hashes are blocks as they are."""
    file = tmp_path / load.MOONCAKE
    file.write_text('{"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [0, 9]}\n')
    assert load.mooncake(file) == [Request(1.5, 600, 7, (0, 9))]
    assert load.faster(load.mooncake(file), 3.0) == [Request(0.5, 600, 7, (0, 9))]


def test_a_cache_finds_beginnings_and_drops_the_oldest() -> None:
    """A block behind a missing one is of no use, and the last token is always computed."""
    cache = Cache(3)
    assert cache.use(Request(0, 2 * BLOCK, 1, (1, 2))) == 0
    assert cache.use(Request(0, 2 * BLOCK, 1, (1, 2))) == 2 * BLOCK - 1
    assert cache.use(Request(0, 3 * BLOCK, 1, (1, 3))) == BLOCK
    assert cache.use(Request(0, 3 * BLOCK, 1, (4, 3))) == 0  # 2 was used longest ago, and goes
    assert cache.use(Request(0, 3 * BLOCK, 1, (1, 2, 3))) == BLOCK


def test_prompts_of_one_replica_are_computed_one_after_the_other() -> None:
    """The second of two that come together waits for the first; a third finds its prompt in the cache."""
    replay = Replay(Fleet(1, 1, 10, prefill_s=1000.0, token_s=0.1), "round_robin")
    one, two = Request(0.0, 1000, 10, (1, 2)), Request(0.0, 500, 10, (3,))
    assert replay._serve(one) == (0, 1.0)
    assert replay._serve(two) == (0, 1.5)
    assert replay._serve(Request(5.0, 1024, 10, (1, 2))) == (1023, pytest.approx(0.001))


@pytest.mark.parametrize("gateways", [1, 3])
def test_prefixes_keep_caches_together_and_load_even(gateways: int) -> None:
    """On a small trace: most of one big cache's hit rate within the bound on load, and more than without prefixes."""
    fleet = Fleet(4, gateways, 400)
    found = list(load.outcomes({"small": lambda n: load.synthetic(2.0 * n, 200.0, seed=1)}, [fleet]))
    by_name = {one.strategy: one for one in found}
    assert set(by_name) == {"one big cache", *STRATEGIES}
    assert by_name["prefix"].met
    for other in ("least_loaded", "round_robin"):
        assert by_name[other].hit_rate + 0.02 < by_name["prefix"].hit_rate <= by_name["one big cache"].hit_rate


def test_gateways_that_hear_nothing_lose_conversations() -> None:
    """So telling them is worth it: the measurement can see the difference."""
    trace = load.synthetic(8.0, 200.0, seed=1)
    heard, deaf = (Fleet(4, 4, 400, told_s=told_s) for told_s in (0.5, float("inf")))
    bound = load.one_cache("small", trace, heard)
    rates = [Replay(fleet, "prefix").run("small", "prefix", trace, bound).hit_rate for fleet in (heard, deaf)]
    assert rates[0] > rates[1] + 0.02


def test_the_table_shows_every_row() -> None:
    """With the verdict where there is one."""
    found = list(load.outcomes({"small": lambda n: load.synthetic(2.0 * n, 60.0, seed=1)}, [FLEET]))
    console = Console(file=io.StringIO(), width=200)
    console.print(load.table(found))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert all(f" {name} " in text for name in ("one big cache", *STRATEGIES))
    assert text.count("met │") == len(STRATEGIES)


def test_the_command_runs_without_the_published_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so, and the synthetic one always runs; each line of --json is one row with all that it depends on."""
    monkeypatch.delenv(load.TRACES, raising=False)
    app = load.typer.Typer()
    app.command()(load.main)
    args = ["--json", "--seconds", "40", "--replicas", "2", "--gateways", "1", "--blocks", "300"]
    ran = CliRunner().invoke(app, args)
    assert ran.exit_code == 0, ran.output
    assert load.MOONCAKE in ran.stderr
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [row["strategy"] for row in rows] == ["one big cache", *STRATEGIES]
    assert {row["fleet"]["blocks"] for row in rows} == {300}
