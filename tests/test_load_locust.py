"""Real locust, in a process of its own, against the gateway and the scripted engine: counts, never speed."""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from loadtest.clusters import free_ports
from loadtest.load import lengths, outputs, scenario
from loadtest.load.workload import Due, schedules
from serve_app.config import FakeScript
from serve_app.endpoint import KEY_VARIABLE
from tests.inprocess import HOST, Yard, model, yard
from tests.test_load import write_traces

ROOT = Path(__file__).resolve().parent.parent
LOCUSTFILE = ROOT / "loadtest" / "locustfile.py"
KEY = "my-" + "k" * 43
FIRST_S, INTERVAL_S = 0.05, 0.002
# However busy the machine is, every answer is there; and every answer is good that is whole.
PATIENT = {"drain_s": 120, "timeout_s": 120}
EASY = {"ttft_ms": 100_000, "itl_ms": 100_000, "goodput": 1.0, "errors": 0.0}


@asynccontextmanager
async def endpoint() -> AsyncIterator[Yard]:
    script = FakeScript(first_token_s=FIRST_S, token_interval_s=INTERVAL_S)
    async with yard(model("chat", script=script), model("codellama", script=script)) as y:
        yield y


def write(folder: Path, *traffic: dict[str, Any], seconds: float = 2.0, **target: float) -> Path:
    file = folder / "mine.yaml"
    kinds = [{"model": "chat", "scale": 0.05, "context": 1024} | each for each in traffic]
    found = {"what": "a test", "seconds": seconds, "target": EASY | target, "traffic": kinds, **PATIENT}
    file.write_text(yaml.safe_dump(found))
    return file


def due(file: Path) -> dict[str, list[Due]]:
    return schedules(scenario.read(file), lengths.load(), seed=1)


async def start(*arguments: str, folder: Path) -> Process:
    # Locust reads options from there, too.
    env = {name: value for name, value in os.environ.items() if not name.startswith("LOCUST_")} | {KEY_VARIABLE: KEY}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", *arguments, "--out", str(folder), cwd=ROOT, env=env, stdout=PIPE, stderr=STDOUT
    )


async def load(y: Yard, file: Path, folder: Path, *more: str) -> tuple[int, str, dict[str, Any]]:
    """Status, what was printed, and the report's JSON. ``more``: options."""
    process = await start("loadtest.load", "run", str(file), "--url", str(y.client.base_url), *more, folder=folder)
    printed = (await process.communicate())[0].decode()
    assert process.returncode is not None
    written = list(folder.glob("*.json"))
    return process.returncode, printed, json.loads(written[0].read_text()) if written else {}


def rows(document: dict[str, Any], traffic: str) -> list[dict[str, Any]]:
    fields = document["fields"]["answers"]
    found = [dict(zip(fields, row, strict=True)) for row in document["answers"]]
    return [row for row in found if row["traffic"] == traffic]


async def test_a_run_reports_what_the_engine_was_told_to_do(tmp_path: Path) -> None:
    """Requests as scheduled, tokens as asked, times no shorter than the script's, the target met: status 0."""
    chat = {"name": "chat", "rate": [[0, 4]]}
    code = {"name": "code", "model": "codellama", "route": "completions", "lengths": "code", "rate": [[0, 3]]}
    file = write(tmp_path, chat, code)
    async with endpoint() as y:
        status, printed, document = await load(y, file, tmp_path / "out")
        await y.quiet()
    assert status == outputs.MET, printed
    for name, asked in due(file).items():
        found = rows(document, name)
        assert [row["came"] for row in found] == pytest.approx([each.at for each in asked], abs=1e-4)
        assert [row["tokens"] for row in found] == [each.output for each in asked]
        assert [row["events"] for row in found] == [each.output for each in asked]  # each token has its own
        assert [row["prompt"] for row in found] == [each.prompt for each in asked]
        assert {row["error"] for row in found} == {""}
        assert min(row["first"] - row["late"] for row in found) >= 1000 * FIRST_S - 2
        figures = document["report"]["traffic"][name]
        assert (figures["requests"], figures["failed"], figures["good"]) == (len(asked), 0, len(asked))
        assert figures["output_mean"] == pytest.approx(sum(each.output for each in asked) / len(asked))
    replicas = {(sample[1], sample[2], sample[3]) for sample in document["samples"]}
    assert replicas == {("chat", "ready", 1), ("codellama", "ready", 1)}
    assert document["about"]["seed"] == 1
    assert "mine: 0 of 2 s" in printed  # progress comes first
    # Locust's own table has them, too.
    assert all(kind in printed for kind in ("TTFT", "ITL", "tokens/s", "goodput", "answer"))
    written = list((tmp_path / "out").iterdir())
    assert sorted(file.suffix for file in written) == [".html", ".json", ".png"]
    # A key is in nothing that is kept or shown.
    assert KEY not in printed
    assert not any(KEY.encode() in file.read_bytes() for file in written)


async def test_failures_are_told_by_kind_and_miss_the_target(tmp_path: Path) -> None:
    """As many of each as were scripted, and no other request suffers: status 1."""
    kinds = {
        "good": ({}, ""),
        "refused": ({"fields": {"fake": {"status": 429}}}, "HTTP 429 rate_limit_error"),
        "broken": ({"fields": {"fake": {"fail": 1}, "max_tokens": 4}}, "error event upstream_error"),
        "unknown": ({"model": "nobody"}, "HTTP 404 model_not_found"),
    }
    file = write(tmp_path, *({"name": name, "rate": [[0, 3]], **more} for name, (more, _) in kinds.items()))
    async with endpoint() as y:
        status, printed, document = await load(y, file, tmp_path / "out")
    assert status == outputs.MISSED, printed
    asked = due(file)
    for name, (_, error) in kinds.items():
        assert Counter(row["error"] for row in rows(document, name)) == {error: len(asked[name])}
    wanted = {error: len(asked[name]) for name, (_, error) in kinds.items() if error}
    assert document["report"]["errors"] == wanted
    assert document["report"]["misses"] == {"failed": sum(wanted.values())}
    assert sum(sum(each["errors"].values()) for each in document["report"]["over_time"]["all"]) == sum(wanted.values())
    assert all(f"{count} failed: {error}" in printed for error, count in wanted.items())


async def test_users_talk_in_turns(tmp_path: Path) -> None:
    """A user's second turn carries the first one and its answer, so its prompt is longer by both; and users who come
    and go by the scenario's steps cut no answer."""
    users = [[0, 3], [1, 3], [1, 0]]
    file = write(tmp_path, {"name": "talks", "users": users, "turns": 2, "pause_s": 0, "shared_prefix": 30})
    async with endpoint() as y:
        status, printed, document = await load(y, file, tmp_path / "out")
        await y.quiet()
        aborted = y.models["chat"].replicas[0].engine.report()["aborted"]
    assert (status, aborted) == (outputs.MET, 0), printed
    found = rows(document, "talks")
    assert len(found) >= 3
    assert max(row["prompt"] for row in found) > min(row["prompt"] for row in found) > 30


async def test_a_trace_is_replayed(tmp_path: Path) -> None:
    """Its requests, at its times and lengths, in the place of a scenario's own; each model gets its own trace."""
    write_traces(tmp_path)
    chat = {"name": "chat", "rate": [[0, 50]], "scale": 0.1}
    code = {"name": "code", "model": "codellama", "route": "completions", "lengths": "code", "rate": [[0, 50]]}
    file = write(tmp_path, chat, code)
    async with endpoint() as y:
        status, printed, document = await load(y, file, tmp_path / "out", "--trace", str(tmp_path), "--speed", "4")
    assert status == outputs.MET, printed
    found = [(row["came"], row["prompt"], row["tokens"]) for row in rows(document, "chat")]
    assert found == [(0.0, 10, 2), (1.0, 20, 1)]
    assert [(row["came"], row["prompt"], row["tokens"]) for row in rows(document, "code")] == [(0.625, 15, 1)]


async def test_nothing_answered_has_a_status_of_its_own(tmp_path: Path) -> None:
    """2, as for an input that cannot be run: no figure means anything, however low the target is."""
    file = write(tmp_path, {"name": "chat", "model": "nobody", "rate": [[0, 4]]}, seconds=1, goodput=0.0, errors=1.0)
    async with endpoint() as y:
        status, printed, _ = await load(y, file, tmp_path / "out")
        assert status == outputs.NOTHING, printed
        file.write_text(file.read_text().replace("rate", "rats"))
        status, printed, _ = await load(y, file, tmp_path / "bad")
    assert status == outputs.NOTHING
    assert "did you mean rate?" in printed
    status, printed, _ = await load(y, file, tmp_path / "bad")  # and nobody is there any more
    assert status == outputs.NOTHING
    assert not (tmp_path / "bad").exists()


async def test_locusts_own_command_and_web_interface(tmp_path: Path) -> None:
    """`python -m locust -f loadtest/locustfile.py`: the page is there, a test is started from it, again too, the rows
    count what was sent, and each test writes a report; SIGTERM ends it with the last one's status."""
    file = write(tmp_path, {"name": "chat", "rate": [[0, 4]]})
    asked, (port,) = due(file)["chat"], free_ports(1)
    async with endpoint() as y:
        process = await start(
            *("locust", "-f", str(LOCUSTFILE), "--scenario", str(file), "--host", str(y.client.base_url)),
            *("--web-host", HOST, "--web-port", str(port)),
            folder=tmp_path / "out",
        )
        try:
            async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", trust_env=False, timeout=60) as web:
                assert "Locust" in (await until_answered(web, "/")).text
                for number in (1, 2):
                    started = await web.post("/swarm", data={"user_count": 1, "spawn_rate": 1})
                    assert started.json()["success"]
                    async with asyncio.timeout(120):
                        while len(list((tmp_path / "out").glob("*.html"))) < number:
                            await asyncio.sleep(0.1)
                    stats = (await web.get("/stats/requests")).json()["stats"]
                    counts = {row["method"]: row["num_requests"] for row in stats if row["name"] == "chat"}
                    assert {kind: counts[kind] for kind in ("answer", "TTFT", "goodput")} == dict.fromkeys(
                        ("answer", "TTFT", "goodput"), len(asked)
                    )
        finally:
            process.terminate()
            printed = (await process.communicate())[0].decode()
    assert process.returncode == outputs.MET, printed


async def until_answered(web: httpx.AsyncClient, path: str) -> httpx.Response:
    async with asyncio.timeout(60):
        while True:
            try:
                return (await web.get(path)).raise_for_status()
            except httpx.HTTPError:
                await asyncio.sleep(0.1)
