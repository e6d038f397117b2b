"""The overhead benchmark's arithmetic, client and ends, without an engine or a cluster."""

import asyncio
import io
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from loadtest.about import ROOT
from loadtest.clusters import ClusterFault
from loadtest.events import Events
from loadtest.held import held
from loadtest.overhead import client, report, serve_llm
from loadtest.overhead.__main__ import app, measure, order
from loadtest.overhead.bare import flags
from loadtest.overhead.client import Answer, Level, Load, Taken
from loadtest.overhead.loads import Arrivals, Asked, shares
from loadtest.overhead.report import Sample
from loadtest.overhead.routers import ROUTERS, Place, commands, program
from loadtest.overhead.targets import (
    ENGINE,
    FRONT_END,
    GATEWAY,
    HANDLE_TITLES,
    MODELYARD_TITLES,
    PROXY,
    REST,
    SERVE_LLM_TITLES,
    SYSTEMS,
    TARGETS,
    Setting,
    read_model,
    role_of,
    routed,
    with_files,
)
from serve_app.config import ModelArgs
from serve_app.model import engine
from tests.inprocess import model, yard

SSE = (
    b": a comment\n\n"
    b'data: {"id":"1","choices":[{"text":"usage","finish_reason":null}],"usage":null}\n\n'
    b'data: {"id":"1","choices":[{"text":"\xc3\xa4","finish_reason":"length"}],"usage":null}\n\n'
    b'data: {"id":"1","choices":[],"usage":{"prompt_tokens":64,"completion_tokens":5,"total_tokens":69}}\n\n'
    b"data: [DONE]\n\n"
)


@given(st.sets(st.integers(1, len(SSE) - 1)))
def test_events_are_found_however_their_bytes_are_cut(cuts: set[int]) -> None:
    """Those with tokens are counted when their end arrives; comments, the usage and the end are none of them."""
    events, places = Events(), [0, *sorted(cuts), len(SSE)]
    for begin, end in pairwise(places):
        events.feed(SSE[begin:end], float(end))
    assert len(events.times) == 2
    ends = [SSE.index(b"}\n\n", SSE.index(mark)) + 3 for mark in (b'"usage","', b"\xc3\xa4")]
    assert events.times == [min(place for place in places if place >= end) for end in ends]
    assert (events.tokens, events.done, events.fault) == (5, True, "")


def test_an_error_event_is_a_fault() -> None:
    """Its words are kept."""
    events = Events()
    events.feed(b'data: {"error":{"message":"lost"}}\n\ndata: [DONE]\n\n', 1.0)
    assert "lost" in events.fault


def _load(port: int, headers: dict[str, str], seconds: float, streams: int = 3, tokens: int = 6) -> Load:
    start = time.perf_counter() + 0.05
    return Load(port, "m", headers, streams, 7, tokens, start, start + seconds, "seed")


def _open_load(port: int, offsets: list[float], seconds: float) -> Load:
    closed = _load(port, {}, seconds, streams=0)
    return replace(closed, times=[closed.start + offset for offset in offsets], words=True)


async def test_the_client_measures_what_the_gateway_streams() -> None:
    """In one process: whole answers of the asked length, each token an event of the fake engine; and nothing is left
    open at the end, nor counted that came before or after."""
    async with yard(model("m", slots=8)) as y:
        taken = await client.take(_load(y.port, {"x-modelyard-every-token": "1"}, 0.3))
        await y.quiet()
    assert taken.answers
    assert not taken.errors
    assert {(answer.tokens, answer.events) for answer in taken.answers} == {(6, 6)}
    assert all(0 <= answer.came <= 300 and 0 < answer.first <= answer.last for answer in taken.answers)
    assert taken.gaps.total() == 5 * len(taken.answers)
    assert taken.tokens > 0


async def test_the_client_counts_refusals_and_goes_on() -> None:
    """A model that nobody has is an error of each request, with the endpoint's words; it ends all the same."""
    async with yard(model("other")) as y:
        taken = await client.take(_load(y.port, {}, 0.3))
    assert not taken.answers
    (message,) = taken.errors
    assert message.startswith("status 404: ")


async def test_requests_of_a_rate_start_at_their_times() -> None:
    """Also while one slot is taken by those before them; those due within the measured time are counted, and waited
    for."""
    async with yard(model("m", slots=1)) as y:
        taken = await client.take(_open_load(y.port, [-0.01, 0.0, 0.001, 0.002, 0.2], 0.3))
        await y.quiet()
    assert not taken.errors
    assert sorted(answer.came for answer in taken.answers) == [0.0, 1.0, 2.0, 200.0]
    assert taken.due == 4


async def test_a_request_that_starts_after_its_time_is_late() -> None:
    """Its time to the first token counts from when it was due."""
    async with yard(model("m", slots=8)) as y:
        load = _open_load(y.port, [0.0], 0.3)
        before = 1.0
        taken = await client.take(replace(load, start=load.start - before, times=[load.start - before]))
    assert (taken.due, taken.late) == (1, 1)
    assert taken.answers[0].first > 1000 * (before - 0.05)


@pytest.mark.parametrize("load", [_load, lambda port, _, seconds: _open_load(port, [0.0], seconds)])
async def test_the_client_ends_where_nobody_listens(load: Callable[[int, dict[str, str], float], Load]) -> None:
    """A system that went away is no slow one."""
    server = await asyncio.start_server(lambda _r, _w: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    with pytest.raises(OSError, match="onnect"):
        await client.take(load(port, {}, 30.0))


def test_arrivals_come_at_their_rate() -> None:
    """With equal gaps, or as a Poisson process, the same one for the same seed: its gaps spread as widely as their
    mean."""
    assert list(client.arrivals(4.0, 1.0, None)) == [0.25, 0.5, 0.75]
    times = list(client.arrivals(100.0, 100.0, Random("seed")))
    assert times == list(client.arrivals(100.0, 100.0, Random("seed")))
    gaps = [b - a for a, b in pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(0.01, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.01, rel=0.05)


def test_client_processes_share_a_load() -> None:
    """All streams, and each request once, from the warm-up's beginning on."""
    asked = Asked((), Arrivals.FIXED, 1, 1, 2.0, 1.0, 64, False, 128, 3)
    assert [streams for streams, _ in shares(Level(streams=4), (1, 1), asked)] == [2, 1, 1]
    mine = list(shares(Level(rate=4.0), (1, 1), asked))
    assert {streams for streams, _ in mine} == {0}
    assert sorted(at for _, times in mine for at in times) == [n / 4 for n in range(1, 12)]


@pytest.mark.parametrize("words", [False, True])
def test_prompts_are_ids_or_words(words: bool) -> None:
    """As many as asked for; the seed decides."""
    load = replace(_load(1, {}, 1.0), words=words)
    bodies = [client.encode(load, Random("seed"), 5).partition(b"\r\n\r\n")[2] for _ in range(2)]
    assert bodies[0] == bodies[1]
    prompt = json.loads(bodies[0])["prompt"]
    assert len(prompt.split() if words else prompt) == 7


def test_prompts_may_share_their_beginning_or_be_real() -> None:
    """The first ids are the same in all prompts and loads, the others random; a text is taken as it is."""
    load = replace(_load(1, {}, 0.0), prompt_tokens=9, shared=6)

    def prompt(load: Load, seed: str) -> Any:
        return json.loads(client.encode(load, Random(seed), 5).partition(b"\r\n\r\n")[2])["prompt"]

    one, other = prompt(load, "a"), prompt(load, "b")
    assert len(one) == len(other) == 9
    assert one[:6] == other[:6]
    assert one[6:] != other[6:]
    assert prompt(replace(load, texts=("a text",)), "a") == "a text"


def _sample(target: str = "bare", streams: int = 2, number: int = 1, slower: float = 1.0) -> Sample:
    """100 answers of 9 tokens in 5 events, the first after 10, 20, … 1000 ms, 8 ms a token."""
    answers = [Answer(n, slower * 10 * (n + 1), slower * (10 * (n + 1) + 64), 9, 5) for n in range(100)]
    gaps = {round(160 * slower): 399, round(900 * slower): 1}
    return Sample(target, number, 1, streams, 10.0, 900.0 / slower, 100, answers, gaps, {}, {FRONT_END: 1.8}, 0.1, 0.5)


def test_figures_of_a_load() -> None:
    """Each by its definition: nearest ranks, ms, per second of the load, per 1,000 tokens."""
    found = report.figures(_sample())
    assert (found.tok_s, found.req_s) == (90.0, 10.0)
    assert (found.ttft_p50, found.ttft_p90, found.ttft_p99) == (500.0, 900.0, 990.0)
    assert found.tpot_p50 == pytest.approx(8.0)
    assert (found.tpot_p90, found.tpot_p99) == pytest.approx((8.0, 8.0))
    assert (found.gap_p50, found.gap_p90, found.gap_p99) == pytest.approx((16.0, 16.0, 16.0))
    assert found.tokens_per_event == pytest.approx(1.8)
    assert found.cpu == {FRONT_END: pytest.approx(2000.0)}


@pytest.mark.parametrize(("share", "value"), [(0.01, 1), (0.5, 50), (0.99, 99), (1.0, 100)])
def test_a_percentile_of_counts_is_one_of_the_values(share: float, value: int) -> None:
    """The nearest rank, however often each value came."""
    assert report.percentile(dict.fromkeys(range(1, 101), 3), share) == value
    assert report.percentile({7: 1}, share) == 7
    assert report.percentile({}, share) == 0


def test_ratios_are_against_bare_under_the_same_load() -> None:
    """Of medians over loads, so one disturbed load moves none; bare itself has none."""
    samples = [_sample(number=n, slower=by) for n, by in ((1, 1.0), (2, 1.0), (3, 9.0))]
    samples += [_sample("modelyard", number=n, slower=by) for n, by in ((1, 2.0), (2, 2.0), (3, 1.0))]
    samples += [_sample("modelyard", streams=4)]
    rows = {(row[0], row[1]): row[2:] for row in report.speed_rows(samples)}
    assert list(rows) == [("2", "bare"), ("2", "modelyard"), ("4", "modelyard")]
    assert rows["2", "bare"] == ["90", "", "10.0", "500.0", "", "900.0", "990.0", "", "8.00", "", "8.00", "8.00"]
    slow = ["45", "0.50", "10.0", "1000.0", "2.00", "1800.0", "1980.0", "2.00", "16.00", "2.00", "16.00", "16.00"]
    assert rows["2", "modelyard"] == slow
    assert rows["4", "modelyard"][1] == ""  # nothing to compare with


def test_a_rate_shows_what_was_offered_and_how_much_was_late() -> None:
    """Beside what was answered; streams have neither. A rate is compared with the same rate only."""
    offered = replace(_sample(streams=0), rate=12.5, due=125, late=5)
    rows = list(report.speed_rows([_sample(), offered, replace(offered, rate=1.0, target="modelyard")]))
    assert [row[:2] for row in rows] == [["1/s", "modelyard"], ["12.5/s", "bare"], ["2", "bare"]]
    assert [row[4:7] for row in rows] == [["10.0", "12.5", "4%"], ["10.0", "12.5", "4%"], ["10.0", "", ""]]
    assert rows[0][3] == ""


def test_the_rest_of_ray_is_told_apart() -> None:
    """What it takes is shown and not added: it takes it idle too."""
    one = _sample("modelyard")
    (row,) = report.cost_rows([replace(one, cpu_s={FRONT_END: 0.9, GATEWAY: 0.9, REST: 9.0})])
    assert row[6:10] == ["1,000", "", "1,000", ""]
    assert (row[10], row[12]) == ("2,000", "10,000")


def test_what_was_not_answered_is_said() -> None:
    """A load without an answer has no row but a reason, beside the tables like failed requests; others keep theirs."""
    failed = replace(_sample(), answers=[], tokens=0.0, errors={"status 503: asleep": 3})
    with pytest.raises(ValueError, match=r"bare, load 2.*asleep"):
        report.by_load([failed])
    assert list(report.by_load([failed, _sample("modelyard")])) == [(Level(streams=2), "modelyard")]
    assert list(report.faults([failed, _sample("modelyard")])) == [
        "bare, load 2, round 1: nothing was answered: status 503: asleep",
        "bare: 3 requests failed, 3 of them so: status 503: asleep",
    ]


def test_raw_values_are_read_as_they_were_written(tmp_path: Path) -> None:
    """The tables can be made anew from the file alone, also from an interrupted run's."""
    about = {"model": "m", "load": {"prompt_tokens": 64, "tokens": 9}}
    samples = [_sample(), replace(_sample("modelyard"), errors={"x": 1})]
    file = tmp_path / "raw.jsonl"
    file.write_text("".join(map(report.line, [about, *samples])))
    assert report.read(file) == (about, samples)
    console = Console(file=io.StringIO(), width=140)
    for table in report.tables(samples, about):
        console.print(table)
    assert "modelyard" in console.file.getvalue()  # type: ignore[attr-defined]
    file.write_text(report.line(about))
    with pytest.raises(ValueError, match="before anything was measured"):
        report.read(file)


@pytest.mark.parametrize("file", sorted((ROOT / "loadtest" / "results").glob("overhead-*.jsonl")), ids=lambda f: f.stem)
def test_every_raw_file_that_is_kept_can_be_shown(file: Path) -> None:
    """Those too that were written before there were rates and routers; no line is wider than the documents' 140."""
    about, samples = report.read(file)
    console = Console(file=io.StringIO(), width=200)
    for table in report.tables(samples, about):
        console.print(table)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(len(line.strip()) for line in lines) <= 140
    assert {one.target for one in samples} <= {cell for line in lines for cell in line.split()}


def test_client_processes_add_up() -> None:
    """Their tokens, answers, gaps and errors; of their CPU the busiest counts."""
    one = Taken([Answer(1, 2, 3, 4, 4)], 10.0, 1, Counter({5: 2}), Counter({"x": 1}), 0.2)
    two = Taken([], 2.5, 0, Counter({5: 1, 6: 1}), Counter(), 0.7)
    one.due, one.late, two.due = 3, 1, 4
    found = report.sample("bare", (1, 2), Level(rate=3.0), 10.0, [one, two], {FRONT_END: 1.0}, 0.5)
    assert (found.round, found.repeat, found.level) == (1, 2, Level(rate=3.0))
    assert (found.due, found.late) == (7, 1)
    assert (found.tokens, found.done, len(found.answers)) == (12.5, 1, 1)
    assert (found.gaps, found.errors, found.client_busy) == ({5: 3, 6: 1}, {"x": 1}, 0.7)


def test_each_system_runs_once_a_round_and_backwards_in_every_second() -> None:
    """Targets that share a system share its start; what drifts with time meets all alike."""
    names = ["bare", "modelyard", "modelyard-every-token"]
    ours = ["modelyard", "modelyard-every-token"]
    assert order(names, 2) == [(1, ["bare"]), (1, ours), (2, ours), (2, ["bare"])]
    assert order(names, 2, side_by_side=True) == [(1, names), (2, names)]


def test_every_target_has_its_system() -> None:
    """And every system is a target's."""
    assert {target.system for target in TARGETS.values()} == SYSTEMS.keys()


@pytest.mark.parametrize(
    ("titles", "title", "role"),
    [
        (MODELYARD_TITLES, "ray::ServeReplica:bench:Model", FRONT_END),
        (MODELYARD_TITLES, "ray::ServeReplica:bench:Model.lease", FRONT_END),
        (MODELYARD_TITLES, "ray::ServeReplica:gateway:Gateway", GATEWAY),
        (MODELYARD_TITLES, "VLLM::EngineCore", ENGINE),
        (MODELYARD_TITLES, "VLLM::Worker_TP0", ENGINE),
        (MODELYARD_TITLES, "haproxy", PROXY),
        (MODELYARD_TITLES, "ray::ServeReplica:bench:Card", REST),
        (MODELYARD_TITLES, "/usr/bin/python3.11 -m haproxy", REST),
        (MODELYARD_TITLES, "ray::ProxyActor", REST),  # idle behind HAProxy
        (HANDLE_TITLES, "ray::ProxyActor.receive_asgi_messages", PROXY),
        (HANDLE_TITLES, "ray::ServeReplica:handle:Ingress", GATEWAY),
        (HANDLE_TITLES, "ray::ServeReplica:handle:Inner", FRONT_END),
        (SERVE_LLM_TITLES, "ray::ServeReplica:llm:LLMServer:bench", FRONT_END),
        (SERVE_LLM_TITLES, "ray::ServeReplica:llm:LLMRouter", GATEWAY),
    ],
)
def test_a_process_is_known_by_its_title(titles: dict[str, str], title: str, role: str) -> None:
    """Also while one of its methods runs, whose name Ray then adds."""
    assert role_of(title, titles) == role


def test_targets_share_the_server_behind_routers() -> None:
    """One start of bare for itself and all of them; each router is a target of its name."""
    names = ["bare", *ROUTERS, "modelyard"]
    assert order(names, 1) == [(1, ["bare", *ROUTERS]), (1, ["modelyard"])]
    assert {target.router for name, target in TARGETS.items() if name in ROUTERS} == set(ROUTERS)


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_is_told_both_ports(name: str, tmp_path: Path) -> None:
    """Its own on the loopback, and the server's: in its command or its file."""
    arguments = ROUTERS[name].arguments(Place(port=1111, behind=2222, metrics=3333, home=tmp_path, model="bench"))
    files = [file.read_text() for file in tmp_path.iterdir()]
    said = " ".join((*arguments, *files))
    assert "--host 127.0.0.1 --port 1111" in said or "bind 127.0.0.1:1111" in said
    assert "127.0.0.1:2222" in said


def test_a_router_that_is_not_installed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to install and how to name it; one that is named is taken."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"pip install 'smg==.* --peer smg=/"):
        program("smg", {})
    with pytest.raises(FileNotFoundError, match="no command"):
        program("smg", {"smg": str(tmp_path / "smg")})
    command = tmp_path / "smg"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    assert program("smg", {"smg": str(command)}) == program("smg", {}) == str(command)


@pytest.mark.parametrize("peer", ["smg", "smg=", "nobody=/bin/true"])
def test_a_peer_that_says_nothing_is_refused(peer: str) -> None:
    """It would be looked for elsewhere."""
    assert commands(["smg=/a=b"]) == {"smg": "/a=b"}
    with pytest.raises(ValueError, match="names are haproxy, vllm-router, smg, litellm"):
        commands([peer])


def test_a_missing_router_ends_a_run_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Status 2, and no file."""
    monkeypatch.setenv("PATH", str(tmp_path))
    file = tmp_path / "raw.jsonl"
    options = ["run", "--engine", "fake", "--target", "bare", "--target", "smg", "--peer", f"smg={tmp_path}/smg"]
    found = CliRunner().invoke(app, [*options, "--out", str(file)])
    assert (found.exit_code, file.exists()) == (2, False)


def test_ray_serve_llm_gets_the_engine_arguments_of_a_replica() -> None:
    """All but those that are its own to set: what the model is called, where it is, and how vLLM's workers run."""
    model_args = ModelArgs.model_validate(
        {"source": {"hub": "a/b"}, "engine": {"max_model_len": 64}, "env": {"A": "1"}}
    )
    arguments = engine.engine_arguments(model_args, "bench") | {serve_llm.EXECUTOR: "mp"}
    config = serve_llm.llm_config(model_args, "bench", arguments)
    assert config["model_loading_config"] == {"model_id": "bench", "model_source": "a/b"}
    assert config["engine_kwargs"] == {
        name: value
        for name, value in arguments.items()
        if name not in ("model", "served_model_name", "distributed_executor_backend")
    }
    assert config["accelerator_config"] == {"kind": "gpu"}
    assert config["runtime_env"] == {"env_vars": {"A": "1"}}


def test_engine_arguments_become_vllms_command_line() -> None:
    """Flags, numbers below zero, lists and mappings as vLLM's parser takes them."""
    arguments = {
        "model": "/m",
        "served_model_name": ["bench"],
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "max_model_len": -1,
        "quantization": None,
        "speculative_config": {"method": "ngram"},
    }
    assert list(flags(arguments)) == [
        "--model=/m",
        *("--served-model-name", "bench"),
        "--enforce-eager",
        "--no-enable-prefix-caching",
        "--max-model-len=-1",
        '--speculative-config={"method": "ngram"}',
    ]


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # vLLM's and torch's own, while they are imported
def test_vllm_takes_that_command_line() -> None:
    """The installed release reads back what was meant, also what the system bare-interval adds."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    args = ModelArgs.model_validate(
        {"source": {"hub": "a/b"}, "engine": {"enforce_eager": True, "max_model_len": "2k"}}
    )
    arguments = engine.engine_arguments(args, "bench") | {"stream_interval": 8, "enable_prefix_caching": False}
    parser = engine._first(engine.MAKE_ARG_PARSER)(engine._first(engine.ARGUMENT_PARSER)())
    read = parser.parse_args(list(flags(arguments)))
    assert {name: getattr(read, name) for name in arguments} == arguments


def test_the_default_model_is_the_demo_of_the_local_file() -> None:
    """So that the command runs without an option."""
    assert read_model(None).source.demo is not None


def test_a_model_file_is_checked(tmp_path: Path) -> None:
    """Whatever is wrong with it is said before anything starts."""
    file = tmp_path / "model.json"
    file.write_text(json.dumps({"source": {"hub": "a/b"}, "resources": {"num_gpus": 1}}))
    assert with_files(read_model(file), print).source.hub == "a/b"
    file.write_text("source: {hub: a/b}\nengines: {}\n")
    with pytest.raises(ValueError, match="engines"):
        read_model(file)


def _unheard(name: str) -> Callable[[str], None]:
    return lambda _: None


def test_bare_serves_the_fake_engine_and_leaves_nothing(tmp_path: Path) -> None:
    """A process of its own, with a role; it is gone afterwards."""
    args = ModelArgs.model_validate({"source": {"fake": {}}, "resources": {"num_gpus": 0, "num_cpus": 0.01}})
    begin = partial(SYSTEMS["bare"], Setting(args, 8, 60.0, tmp_path))
    with held({"bare": begin}, _unheard) as found:
        running = found["bare"].started.result()
        assert [role for _, role in running.processes()] == [FRONT_END]
    assert running.processes() == []


def test_a_server_that_ends_is_said_with_its_words(tmp_path: Path) -> None:
    """Not waited for until the time is up."""
    script = {"fail_start": "no such thing"}
    args = ModelArgs.model_validate({"source": {"fake": script}, "resources": {"num_gpus": 0}})
    begin = partial(SYSTEMS["bare"], Setting(args, 8, 60.0, tmp_path))
    with held({"bare": begin}, _unheard) as found, pytest.raises(ClusterFault, match="no such thing"):
        found["bare"].started.result()


def _command(folder: Path, script: str) -> str:
    command = folder / "router"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    return str(command)


def test_a_router_runs_while_its_loads_are_taken(tmp_path: Path) -> None:
    """In front of a server that stays up, with a role of its own; a second fake engine stands for it."""
    args = ModelArgs.model_validate({"source": {"fake": {}}, "resources": {"num_gpus": 0, "num_cpus": 0.01}})
    file = tmp_path / "args.json"
    file.write_text(args.model_dump_json(exclude_unset=True))
    stand_in = _command(tmp_path, f'exec {sys.executable} -m loadtest.overhead.bare "$4" bench 0 < {file}')
    setting = Setting(args, 8, 60.0, tmp_path, {"vllm-router": stand_in})
    with held({"bare": partial(SYSTEMS["bare"], setting)}, _unheard) as systems:
        behind = systems["bare"].started.result()
        with held({"router": partial(routed, "vllm-router", behind, setting)}, _unheard) as routers:
            running = routers["router"].started.result()
            assert running.port != behind.port
            assert [role for _, role in running.processes()] == [GATEWAY, FRONT_END]
        assert [role for _, role in running.processes()] == [FRONT_END]


def test_a_router_that_does_not_start_costs_its_own_loads_only(tmp_path: Path) -> None:
    """The others' are taken; then the run fails with its words."""
    args = ModelArgs.model_validate({"source": {"fake": {}}, "resources": {"num_gpus": 0, "num_cpus": 0.01}})
    setting = Setting(args, 8, 60.0, tmp_path, {"vllm-router": _command(tmp_path, "echo no such flag; exit 1")})
    asked = Asked((Level(streams=1),), Arrivals.FIXED, 1, 2, 0.5, 0.0, 7, False, 3, 1)
    taken: list[Sample] = []
    # As they come: the end is an error.
    with pytest.raises(ClusterFault, match="vllm-router was left out: the server ended:\nno such flag"):
        taken.extend(measure(setting, [(1, ["vllm-router", "bare"])], asked))
    assert [(sample.target, sample.repeat) for sample in taken] == [("bare", 1), ("bare", 2)]


def test_systems_side_by_side_get_each_load_in_turn(tmp_path: Path) -> None:
    """Both are up at once; of each load every target has its own before the next, backwards in the second repeat."""
    args = ModelArgs.model_validate({"source": {"fake": {}}, "resources": {"num_gpus": 0, "num_cpus": 0.01}})
    asked = Asked((Level(streams=1), Level(streams=2)), Arrivals.FIXED, 1, 2, 0.3, 0.0, 7, False, 3, 1)
    names = ["bare", "bare-interval"]
    taken = list(measure(Setting(args, 8, 60.0, tmp_path), order(names, 1, side_by_side=True), asked))
    forth = [("bare", 1), ("bare-interval", 1), ("bare", 2), ("bare-interval", 2)]
    back = [("bare-interval", 1), ("bare", 1), ("bare-interval", 2), ("bare", 2)]
    assert [(sample.target, sample.streams) for sample in taken] == forth + back


@contextmanager
def _opened(folder: Path, tell: Callable[[str], None]) -> Iterator[int]:
    """A context that says on disk whether it is open."""
    mark = folder / "open"
    tell("opening")
    mark.touch()
    yield os.getpid()
    mark.unlink()


def test_a_context_is_held_in_a_process_of_its_own(tmp_path: Path) -> None:
    """What it says is heard, and it ends with its holder."""
    heard: list[str] = []
    with held({"one": partial(_opened, tmp_path)}, lambda _: heard.append) as found:
        assert found["one"].started.result() not in (0, os.getpid())
        assert (tmp_path / "open").exists()
    assert (heard, list(tmp_path.iterdir())) == (["opening"], [])


class Unreadable(Exception):
    """Cannot be made again from what pickle keeps of it."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


@contextmanager
def _fails(how: str, tell: Callable[[str], None]) -> Iterator[None]:
    if how == "gone":
        os._exit(3)
    raise Unreadable("a", "b") if how == "unreadable" else ClusterFault("too late")
    yield


@pytest.mark.parametrize(
    ("how", "heard"), [("said", "too late"), ("unreadable", "cannot be read"), ("gone", "its process ended")]
)
def test_a_context_that_does_not_open_is_told(how: str, heard: str) -> None:
    """With its own words where they can be had; nobody waits for ever."""
    with held({"one": partial(_fails, how)}, _unheard) as found, pytest.raises(ClusterFault, match=heard):
        found["one"].started.result(timeout=60)


def test_a_held_context_ends_when_its_holder_is_killed(tmp_path: Path) -> None:
    """Nothing is left of a run whose process is gone."""
    script = (
        "import sys; from functools import partial; from pathlib import Path\n"
        "from loadtest.held import Held; from tests.test_overhead import _opened\n"
        "if __name__ == '__main__':\n"
        "    print(Held(partial(_opened, Path(sys.argv[1])), print).started.result(), flush=True)\n"
        "    sys.stdin.read()\n"
    )
    file = tmp_path / "holder.py"
    file.write_text(script)
    folder = tmp_path / "held"
    folder.mkdir()
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(file), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, cwd=ROOT) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"opening\n"
        pid = int(holder.stdout.readline())
        holder.kill()
    with suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(timeout=30)
    assert list(folder.iterdir()) == []
