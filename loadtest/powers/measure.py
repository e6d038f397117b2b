"""Start a variant as its own cluster, put its loads on it, and write down what came."""

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from loadtest.about import nvidia_smi
from loadtest.clusters import Running, cluster
from loadtest.figures import MODELYARD
from loadtest.held import Tell
from loadtest.overhead import report
from loadtest.overhead.client import Level
from loadtest.overhead.loads import Address, Arrivals, Asked, client_process, take
from loadtest.overhead.report import Sample
from loadtest.overhead.targets import ENGINE, EVERY_TOKEN, MODEL, role_of, wait_for_answer, with_files
from loadtest.plan_accuracy import logged
from loadtest.powers import checkpoints, engine_metrics, quality
from loadtest.powers.engine_metrics import GAUGES, REPORT_INTERVAL_S, Look
from loadtest.powers.rows import GIB, MADE, Load, Row
from loadtest.powers.texts import KINDS
from serve_app import local_cluster
from serve_app.config import GATEWAY_IMPORT_PATH, MODEL_IMPORT_PATH, ModelArgs
from serve_app.local_cluster import Session
from serve_app.ray_api import RayApi, RayApiError

# Models of a variant, in order.
NAMES = (MODEL, "second")
BESIDE = "beside"
BESIDE_TOKENS = 2


@dataclass(frozen=True)
class Setting:
    """``seconds`` measured of each load after ``warm_up``, ``repeats`` times; ``clients``: processes per model;
    ``start_s``: the longest start; ``tokenizer``: a folder, of shapes, in the place of the demo model's."""

    seconds: float
    warm_up: float
    repeats: int
    clients: int
    start_s: float
    tokenizer: Path | None = None


def made(value: Any, folder: Path, tell: Tell) -> Any:
    """``value`` with what its "made:" texts stand for. DemoModelError: a checkpoint cannot be made."""
    match value:
        case dict():
            return {key: made(each, folder, tell) for key, each in value.items()}
        case str() if value.startswith(MADE):
            what, _, kind = value.removeprefix(MADE).partition(":")
            if kind:
                return str(checkpoints.quantised_shape(what, kind, folder))
            return str(checkpoints.draft_shape(folder) if what == "draft-shape" else checkpoints.prepare(what, tell))
        case _:
            return value


@dataclass(frozen=True)
class Started:
    """A start that runs. ``models``: by the names that requests give; ``start_s``: until all of them answered."""

    running: Running
    models: Mapping[str, ModelArgs]
    start_s: float


@contextmanager
def started(models: Sequence[Mapping[str, Any]], setting: Setting, home: Path, tell: Tell) -> Iterator[Started]:
    """A Ray of its own with a gateway and ``models``, the ``args`` of their entries. ``home``: an empty folder.
    ClusterFault, LocalClusterError, RayApiError, DemoModelError, ValueError: it cannot be had."""
    args = [_entry(made(dict(one), home, tell), setting.tokenizer, tell) for one in models]
    named = dict(zip(NAMES, args, strict=False))
    wanted: list[dict[str, Any]] = [{"name": "gateway", "import_path": GATEWAY_IMPORT_PATH, "route_prefix": "/"}]
    wanted += [
        {"name": name, "import_path": MODEL_IMPORT_PATH, "route_prefix": None, "args": _plain(one)}
        for name, one in named.items()
    ]
    settings = engine_metrics.SETTINGS
    began = time.monotonic()
    with cluster(MODELYARD, home, wanted, tell, start_s=setting.start_s, settings=settings) as running:
        for name in named:
            wait_for_answer(running.port, setting.start_s, tell, lambda: "", name)
        yield Started(running, named, round(time.monotonic() - began, 1))


def pools(setting: Setting, stack: ExitStack) -> list[list[Executor]]:
    """Client processes, until the end of ``stack``: of each model, and for prompts beside."""
    return [[stack.enter_context(client_process()) for _ in range(setting.clients)] for _ in (*NAMES, BESIDE)]


def measure(
    rows: Sequence[Row], found: Started, setting: Setting, own: Sequence[Sequence[Executor]], tell: Tell
) -> Iterator[tuple[Row, dict[str, Any]]]:
    """The raw values of the variant that runs, for each of ``rows``. ``own``: see ``pools``. ClusterFault,
    RayApiError, httpx.HTTPError, ValueError: nothing was answered."""
    running, names = found.running, list(found.models)
    api = RayApi(running.session.dashboard)
    said: dict[str, Any] = {}
    for row in rows:
        values: dict[str, Any] = {"models": {name: _plain(args) for name, args in found.models.items()}}
        values["start_s"] = found.start_s
        if row.says:
            if not said:
                tell("perplexity and greedy answers")
                said = asdict(quality.ask(running.port, MODEL))
            values["said"] = said
        values["loads"] = []
        for load in row.loads:
            tell(f"{row.name}, load {load}")
            samples, engine = _take(load, running, names, setting, own, api)
            values["loads"].append(
                {"load": asdict(load), "samples": [asdict(one) for one in samples], "engine": engine}
            )
        logs = [log.read_text(errors="replace") for log in Path(running.session.session_dir, "logs").glob("worker-*")]
        values["kv_tokens"] = engine_metrics.kv_tokens(logs)
        values["memory_gib"] = _memory(running.session, list(found.models.values()), "".join(logs))
        values["placement"] = _placement(api)
        yield row, values


def _entry(args: Mapping[str, Any], tokenizer: Path | None, tell: Tell) -> ModelArgs:
    if tokenizer is not None and "shape" in args["source"]:
        args = {**args, "source": {**args["source"], "tokenizer": str(tokenizer.absolute())}}
    return with_files(ModelArgs.model_validate(args), tell)


def _plain(args: ModelArgs) -> dict[str, Any]:
    return args.model_dump(mode="json", exclude_unset=True)


def _take(
    load: Load,
    running: Running,
    names: Sequence[str],
    setting: Setting,
    pools: Sequence[Sequence[Executor]],
    api: RayApi,
) -> tuple[list[Sample], dict[str, float]]:
    """The load on all models at once, ``repeats`` times; and what the engines counted meanwhile. The CPU time of all
    engines is with the first model's samples."""
    if load.seconds:
        setting = replace(setting, seconds=load.seconds, warm_up=load.seconds / 2, repeats=1)
    engines = [(process, ENGINE) for process in _engines(running.session)]
    asked = _asked(load.level, load.prompt, load.tokens, setting, load)
    parts = [(name, name, asked, own) for name, own in zip(names, pools, strict=False)]
    if load.beside:
        level = Level(rate=1 / load.beside_s)
        parts.append((BESIDE, names[0], _asked(level, load.beside, BESIDE_TOKENS, setting), pools[-1]))
    samples: list[Sample] = []
    before = _settled(api)
    with _peaks(api) as peaks, ThreadPoolExecutor(len(parts)) as at_once:
        for repeat in range(1, setting.repeats + 1):
            under_way = [
                at_once.submit(
                    take,
                    Address(running.port, model, EVERY_TOKEN),
                    name,
                    (1, repeat),
                    part.levels[0],
                    part,
                    own,
                    engines if name == names[0] else (),
                )
                for name, model, part, own in parts
            ]
            samples += [one.result() for one in under_way]
    after = _settled(api)
    for one in samples:
        report.figures(one)  # ValueError where nothing was answered
    counted = {key: value - before.counters.get(key, 0.0) for key, value in after.counters.items()}
    return samples, counted | {f"{gauge}_peak": value for gauge, value in peaks.items()}


def _asked(level: Level, prompt: int, tokens: int, setting: Setting, load: Load | None = None) -> Asked:
    return Asked(
        (level,),
        Arrivals.FIXED,
        rounds=1,
        repeats=setting.repeats,
        seconds=setting.seconds,
        warm_up=setting.warm_up,
        prompt_tokens=prompt,
        words=False,
        tokens=tokens,
        clients=setting.clients,
        texts=KINDS[load.texts] if load else (),
        shared=load.shared if load else 0,
    )


def _settled(api: RayApi) -> Look:
    """Once Ray has heard of everything that has happened."""
    time.sleep(3 * REPORT_INTERVAL_S)
    return engine_metrics.look(api)


@contextmanager
def _peaks(api: RayApi) -> Iterator[dict[str, float]]:
    """The highest of each gauge, seen once a second, until the end of the context."""
    peaks = dict.fromkeys(GAUGES, 0.0)
    over = threading.Event()

    def watch() -> None:
        while not over.wait(1.0):
            with suppress(httpx.HTTPError, RayApiError):
                for gauge, value in engine_metrics.look(api).gauges.items():
                    peaks[gauge] = max(peaks[gauge], value)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peaks
    finally:
        over.set()
        thread.join()


def _memory(session: Session, models: Sequence[ModelArgs], logs: str) -> dict[str, Any]:
    """In GiB. ``engine``: what its processes have for themselves. ``weights``: of the first worker that says it, else
    of the files. ``gpus``: in use on each."""
    own = sum(process.memory_full_info().uss for process in _engines(session))
    said = logged(logs)
    gpus = [round(float(line.removesuffix(" MiB")) / 1024, 1) for line in nvidia_smi("memory.used")]
    files = sum(file.stat().st_size for args in models for file in Path(args.source.path or "/").glob("*.safetensors"))
    weights = said.get("weights_gib") or files / GIB
    return {"engine": round(own / GIB, 2), "weights": round(weights, 3), "gpus": gpus, "said": said}


def _engines(session: Session) -> list[psutil.Process]:
    found = []
    for process in local_cluster.processes(session):
        with suppress(psutil.Error):
            if role_of(" ".join(process.cmdline()), {}) == ENGINE:
                found.append(process)
    return found


def _placement(api: RayApi) -> list[list[Mapping[str, Any]]]:
    """The bundles of each placement group that has GPUs, as Ray shows them: what each holds, and on which node."""
    groups: list[list[Mapping[str, Any]]] = [
        [{"node": bundle.get("node_id"), **bundle["unit_resources"]} for bundle in group["bundles"] or ()]
        for group in api.listed("placement_groups")
    ]
    return [group for group in groups if any("GPU" in bundle for bundle in group)]


def clients() -> int:
    """Processes per model: a quarter of the CPUs, one at least and four at most."""
    return min(4, max(1, (os.cpu_count() or 1) // 4))
