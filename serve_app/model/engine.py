"""vLLM, and all that we know of it: engine construction, its API server's app, its health and its end.

Works with vLLM 0.26, 0.32 and 0.33, whose signatures agree here and whose import paths do not: ``_first`` names every
place a thing has lived. ``tests/test_vllm_contract.py`` holds all of it against the installed release.
"""

import asyncio
import contextlib
import copy
import dataclasses
import importlib
import json
import logging
import os
import re
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from serve_app import demo_model, errors
from serve_app.asgi import ASGIApp
from serve_app.config import ModelArgs, RequestLimits, Source
from serve_app.lease import EngineFacts
from serve_app.model.adapters import LOADED, Adapted, Adapters
from serve_app.model.chunks import PAUSE, Pace, Pause
from serve_app.model.commit_late import ADMISSION, Admission, CommitLate
from serve_app.model.counting import COUNTING
from serve_app.model.engine_args import read_numbers
from serve_app.model.engine_protocol import ASKED_MODEL, EVERY_TOKEN, PRIORITY, Adapter, nobody_hears
from serve_app.model.gpu_turn import gpu_turn
from serve_app.model.journal import JOURNAL, Journal
from serve_app.model.loading import download, told
from serve_app.model.root_cause import Output, first_error
from serve_app.model.token_rate import TokenRate
from serve_app.scaling import EngineStats
from serve_app.sources import SourceError, read_shape, resolve

logger = logging.getLogger("ray.serve")

# Once the engine's process is dead: time for the error events of streams under way, then this replica ends too.
DEAD_GRACE_S = 0.5
# What the log of each of vLLM's processes says before the error that ended its start.
START_FAILED = " failed to start."

BUILD_APP = (
    "vllm.entrypoints.launchers.app:build_app",
    "vllm.entrypoints.openai.api_server:build_app",
)
INIT_APP_STATE = (
    "vllm.entrypoints.launchers.api_server.app_state:init_app_state",
    "vllm.entrypoints.openai.api_server:init_app_state",
)
MAKE_ARG_PARSER = (
    "vllm.entrypoints.common.cli_args:make_arg_parser",
    "vllm.entrypoints.launchers.cli_args:make_arg_parser",
    "vllm.entrypoints.openai.cli_args:make_arg_parser",
)
ARGUMENT_PARSER = ("vllm.utils.argparse_utils:FlexibleArgumentParser",)
ENGINE_ARGS = ("vllm.engine.arg_utils:AsyncEngineArgs",)
USAGE_CONTEXT = ("vllm.usage.usage_lib:UsageContext",)
ASYNC_LLM = ("vllm.v1.engine.async_llm:AsyncLLM",)
STAT_LOGGER_BASE = ("vllm.v1.metrics.loggers:StatLoggerBase",)
RAY_STAT_LOGGER = ("vllm.v1.metrics.ray_wrappers:RayPrometheusStatLogger",)
LORA_REQUEST = ("vllm.lora.request:LoRARequest",)
FINISH_REASON = ("vllm.v1.engine:FinishReason",)
GET_MAX_TOKENS = ("vllm.entrypoints.serve.utils.api_utils:get_max_tokens",)
CREATE_ERROR_RESPONSE = (
    "vllm.entrypoints.serve.exception_handling.error_response:create_error_response",
    "vllm.entrypoints.serve.utils.error_response:create_error_response",
)


def _first(places: tuple[str, ...]) -> Any:
    """The first of ``module:name`` that this vLLM release has."""
    for place in places:
        module, name = place.split(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"this vLLM release has none of {', '.join(places)}; supported are 0.26, 0.32 and 0.33")


def engine_arguments(args: ModelArgs, name: str) -> dict[str, Any]:
    """``AsyncEngineArgs``' keywords for a config entry. ``name``: the model's id."""
    engine: dict[str, Any] = {
        **model_and_tokenizer(args.source),
        # A list: several consumers iterate over it.
        "served_model_name": [name],
        "tensor_parallel_size": args.tensor_parallel_size,
        "pipeline_parallel_size": args.pipeline_parallel_size,
        "max_num_seqs": args.max_num_seqs,
    }
    if args.gpu_memory_utilization is not None:
        engine["gpu_memory_utilization"] = args.gpu_memory_utilization
    if args.workers > 1:
        # Pipeline stages may spread over nodes: Ray workers. Else vLLM's own worker processes inside the replica, which
        # is also all that its CPU engine can do.
        spreads = args.pipeline_parallel_size > 1 and args.resources.num_gpus > 0
        engine["distributed_executor_backend"] = "ray" if spreads else "mp"
    return engine | read_numbers(args.engine)


def model_and_tokenizer(source: Source) -> dict[str, str]:
    """Where vLLM finds the weights and the tokenizer."""
    tokenizer = {"tokenizer": source.tokenizer} if source.tokenizer is not None else {}
    if source.hub is not None:
        return {"model": source.hub} | tokenizer
    if source.demo is not None:
        return {"model": demo_folder()} | tokenizer
    if source.path is not None:
        if not (folder := resolve(source)).is_dir():
            # vLLM would ask a hub for it.
            raise SourceError(
                f"there is no folder {folder} on this node: bring the model to every node that may run it"
            )
        return {"model": str(folder)} | tokenizer
    return shape_folder(source)


def demo_folder() -> str:
    """The demo model on this node, converted now where nobody did it before."""
    return str(demo_model.prepare(logger.info))


def shape_folder(source: Source) -> dict[str, str]:
    """A model folder that holds a shape's ``config.json`` and nothing else: vLLM fills in dummy weights."""
    from transformers import AutoTokenizer

    tokenizer = source.tokenizer or demo_folder()
    shape = read_shape(resolve(source))
    # A borrowed tokenizer may know more ids than the shape: each must have its row in the embedding.
    shape["vocab_size"] = max(shape["vocab_size"], len(AutoTokenizer.from_pretrained(tokenizer)))
    folder = Path(tempfile.mkdtemp(prefix="modelyard-shape-"))
    (folder / "config.json").write_text(json.dumps(shape))
    return {"model": str(folder), "load_format": "dummy", "tokenizer": tokenizer}


def start_engine(engine_args: Any, **options: Any) -> Any:
    """An ``AsyncLLM``; blocks until the weights are loaded and the KV cache is laid out.

    As `vllm serve` does it: some of vLLM's defaults, such as the tokens of one step, depend on what an engine is for.
    RuntimeError: one of its processes did not start; says what that one's log does.
    """
    usage = _first(USAGE_CONTEXT).OPENAI_API_SERVER
    config = engine_args.create_engine_config(usage)
    if _leaks_adapters(config):
        # One place more, which `_adapter_room` leaves empty.
        config.lora_config.max_loras += 1
        config.lora_config.max_cpu_loras += 1
    output = Output()
    try:
        return _first(ASYNC_LLM).from_vllm_config(
            config,
            usage_context=usage,
            enable_log_requests=engine_args.enable_log_requests,
            disable_log_stats=engine_args.disable_log_stats,
            **options,
        )
    except Exception as error:
        # vLLM says no more than which of its processes failed.
        if cause := first_error(output.text(), START_FAILED):
            raise RuntimeError(f"vLLM failed to start: {cause}") from error
        raise


def _leaks_adapters(config: Any) -> bool:
    """On the CPU vLLM gives what is in the last place for an adapter to base-model requests too, where they share a
    step with an adapter's (vllm-project/vllm#48421): right only as long as nothing ever was in that place."""
    return config.lora_config is not None and config.device_config.device_type == "cpu"


class VllmEngine:
    """``AsyncLLM`` and vLLM's own FastAPI app in this process; the engine core is vLLM's child process."""

    def __init__(self, args: ModelArgs, name: str) -> None:
        self._args = args
        self._name = name
        self._llm: Any = None
        self._app: Any = None
        self._adapters: Adapters | None = None
        self._end: threading.Timer | None = None
        self._step: Any = None  # the scheduler's numbers after the engine's last step
        self._tokens = TokenRate()
        self._pace = Pace(RequestLimits().chunk_s)
        self._prefix_cache = Counter(queries=0, hits=0)  # in tokens, as vLLM counts them

    async def start(self, tell: Callable[[str], object] = nobody_hears) -> EngineFacts:
        # Quiet by default; a config's `env:` wins because it is already in the environment.
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        # The gateway keeps no stored responses, so the replica must not either.
        os.environ.setdefault("VLLM_ENABLE_RESPONSES_API_STORE", "0")
        # What the hub refuses is known before vLLM tries for a while, and in better words.
        downloading = download(self._args.source, self._args.engine)
        arguments = engine_arguments(self._args, self._name)
        engine_args = _first(ENGINE_ARGS)(**arguments)
        shared = self._args.resources.shares_a_gpu
        turn = gpu_turn(os.environ.get("CUDA_VISIBLE_DEVICES", "")) if shared else contextlib.nullcontext()
        async with turn:
            # vLLM's own metrics go to Ray's, in the place of a `/metrics` that nobody reaches here.
            loggers = [_stat_logger(self._note_step), _ray_stat_logger()]
            with told(tell, downloading):
                self._llm = start_engine(engine_args, stat_loggers=loggers)
        # A set in another order in each process.
        tasks = tuple(sorted(await self._llm.get_supported_tasks()))
        self._app = await self._build_app(engine_args, tasks)
        _refuse_to_shorten()
        self._adapters = Adapters(self._load_adapter, self._unload_adapter, max(1, self._adapter_room))
        _answer_by_adapter(self._llm)
        _note_admissions(self._llm)
        _keep_journals(self._llm, self._is_dead, self._pace)
        return EngineFacts(
            tasks=tasks,
            paths=frozenset(p for r in self._app.routes if (p := getattr(r, "path", None))),
            max_model_len=self._llm.model_config.max_model_len,
        )

    async def _build_app(self, engine_args: Any, tasks: tuple[str, ...]) -> Any:
        """vLLM's own app, in front of the engine that runs."""
        namespace = self._namespace(engine_args)
        app = _first(BUILD_APP)(namespace, tasks, self._llm.model_config)
        await _first(INIT_APP_STATE)(self._llm, app.state, namespace, tasks)
        _answer_to_any_name(app.state.openai_serving_models)
        _plain_validation_errors(app)
        # vLLM's handler of engine errors asks this object to exit; we look at the engine ourselves.
        app.state.server = _ExitFlag()
        return app

    def _namespace(self, engine_args: Any) -> Any:
        """vLLM's argument namespace as its API server would have parsed it, with our values in it."""
        namespace = _first(MAKE_ARG_PARSER)(_first(ARGUMENT_PARSER)()).parse_args([])
        # After create_engine_config, which fills in what was left open.
        for field in dataclasses.fields(engine_args):
            setattr(namespace, field.name, getattr(engine_args, field.name))
        for key, value in self._args.frontend.items():
            setattr(namespace, key, value)
        return namespace

    @property
    def asgi(self) -> ASGIApp:
        assert self._adapters is not None
        return Adapted(CommitLate(self._app, self._is_dead, _refused), self._adapters)

    async def check_health(self) -> None:
        self._is_dead()
        await self._llm.check_health()

    async def ping(self) -> None:
        # Answered by the engine core between two steps, so it says that steps end.
        await self._llm.is_sleeping()

    @property
    def _adapter_room(self) -> int:
        """How many adapters the engine keeps beside those that its own settings name (`lora_modules`).

        Those in the memory of its GPU are fewer (`max_loras`): vLLM swaps them and lets requests wait for that.
        """
        config = self._llm.vllm_config
        if config.lora_config is None:
            return 0
        places = config.lora_config.max_loras - 1 if _leaks_adapters(config) else config.lora_config.max_cpu_loras
        return int(places) - len(self._serving_models.lora_requests)

    @property
    def _serving_models(self) -> Any:
        return self._app.state.openai_serving_models

    async def _load_adapter(self, adapter: Adapter) -> Any:
        """vLLM's ``LoRARequest`` for the adapter, once the engine has it."""
        try:
            return await self._add_adapter(adapter)
        except Exception as error:
            logger.error("cannot load the adapter %s from %s: %s", adapter.name, adapter.path, error)
            raise errors.adapter_unusable(adapter.name, _cause(error, adapter)) from None

    async def _add_adapter(self, adapter: Adapter) -> Any:
        if self._adapter_room < 1:
            raise ValueError("the model's engine has no room for adapters (`enable_lora`, `max_cpu_loras`)")
        # vLLM would ask a model hub for a folder that is not there, and hold up every request meanwhile.
        config = Path(adapter.path, "adapter_config.json")
        if not await asyncio.to_thread(config.is_file):
            raise ValueError("its folder is not on the replica's node, or has no adapter_config.json")
        # A number and a name of its own each time that it is loaded. vLLM takes an adapter that failed half-way for a
        # good one if it comes again under its number, tells running requests' adapters apart by their names, and 0.26
        # finds cached prefixes by the name alone.
        number = self._serving_models.lora_id_counter.inc(1)
        lora = _first(LORA_REQUEST)(f"{adapter.name}#{number}", number, adapter.path)
        try:
            await self._llm.add_lora(lora)
        except Exception:
            if self._is_dead():
                await asyncio.Event().wait()  # this replica ends, and the gateway asks another one
            await self._unload_adapter(lora)
            raise
        return lora

    async def _unload_adapter(self, lora: Any) -> None:
        await self._llm.remove_lora(lora.lora_int_id)

    def _is_dead(self) -> bool:
        """Whether the engine is lost; if so this replica ends in a moment.

        Serve would take three failed health checks to replace it, and requests would fail meanwhile. A replica that
        is gone is replaced at once, and gateways give its unanswered requests to another one.
        """
        dead = self._llm is not None and bool(self._llm.errored)
        if dead and self._end is None:
            logger.error("the engine of %s died, so this replica ends", self._name)
            self._end = threading.Timer(DEAD_GRACE_S, os._exit, (1,))
            self._end.daemon = True
            self._end.start()
        return dead

    def _note_step(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        self._pace.step()
        if scheduler_stats is not None:
            self._step = scheduler_stats
            cache = scheduler_stats.prefix_cache_stats
            self._prefix_cache.update(queries=cache.queries, hits=cache.hits)
        if iteration_stats is not None:
            self._tokens.add(iteration_stats.num_prompt_tokens + iteration_stats.num_generation_tokens)

    def share_events(self, chunk_s: float) -> None:
        self._pace.longest_s = chunk_s

    def stats(self) -> EngineStats:
        unfinished = self.report()["running"]
        step = self._step
        # The engine tells its numbers after a step, and aborted requests need none: the last one may be old.
        if step is None or not unfinished:
            return EngineStats(running=unfinished, tokens_s=self._tokens.per_second())
        waiting = min(unfinished, step.num_waiting_reqs + step.num_skipped_waiting_reqs)
        return EngineStats(unfinished - waiting, waiting, step.kv_cache_usage, self._tokens.per_second())

    def report(self) -> dict[str, Any]:
        processor = getattr(self._llm, "output_processor", None)
        return {
            "running": processor.get_num_unfinished_requests() if processor else 0,
            "adapters": self._adapters.names if self._adapters else [],
            "prefix_cache": dict(self._prefix_cache),
        }

    def shutdown(self) -> None:
        if self._llm is not None:
            self._llm.shutdown()
            self._llm = None


def _stat_logger(note: Callable[[Any, Any], None]) -> Any:
    """A logger class for vLLM that hands the numbers of the scheduler and of the step to ``note`` after every step."""

    class StepNoter(_first(STAT_LOGGER_BASE)):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_args: Any, **_kwargs: Any) -> None:
            note(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            pass

    return StepNoter


def _ray_stat_logger() -> Any:
    """vLLM's own metrics in Ray's, but for the time between two tokens, which is observed once per token: 3 µs each on
    the way of all of them, 0.8 ms of each step of 256 streams. Gateways have each stream's mean."""

    class RayStats(_first(RAY_STAT_LOGGER)):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            me: Any = self
            me.histogram_inter_token_latency = dict.fromkeys(me.histogram_inter_token_latency, _Unobserved())

    return RayStats


class _Unobserved:
    """Stands where vLLM expects a histogram."""

    def observe(self, value: float) -> None:
        pass


class _ExitFlag:
    """Stands where vLLM expects its uvicorn server."""

    should_exit = False


def _answer_to_any_name(models: Any) -> None:
    """Let the served-models object accept, and repeat in answers, the id that the client asked for.

    A model's further ids change live, and the gateway has resolved the id before the request came here. Adapters that
    the engine's own settings name (`lora_modules`) keep vLLM's way: they have a name of their own.
    """
    # The registry's: that of `models` asks the registry.
    is_base_model, model_name = models.registry.is_base_model, models.model_name

    def accepts(name: str) -> bool:
        return name == ASKED_MODEL.get() or bool(is_base_model(name))

    def answers_as(lora_request: Any = None) -> str:
        asked = ASKED_MODEL.get()
        return str(model_name(lora_request)) if lora_request is not None or asked is None else asked

    models.is_base_model = models.registry.is_base_model = accepts
    models.model_name = models.registry.model_name = answers_as


def _plain_validation_errors(app: Any) -> None:
    """Say what is wrong with a body in plain words: FastAPI's default prints its parser's internals."""
    from fastapi.exceptions import RequestValidationError
    from starlette.responses import Response

    def rendered(error: errors.ModelyardError) -> Response:
        status, headers, body = errors.render(error)
        return Response(body, status, {k.decode(): v.decode() for k, v in headers})

    def handler(_request: Any, exc: Exception) -> Response:
        assert isinstance(exc, RequestValidationError)
        return rendered(errors.invalid_body(_meant(exc.errors())))

    def wrong_type(_request: Any, _exc: Exception) -> Response:
        # vLLM's own look at a body before it is validated; Python's text about it says nothing to a client.
        return rendered(errors.InvalidRequest("A field of the body has the wrong type."))

    app.add_exception_handler(RequestValidationError, handler)
    app.add_exception_handler(TypeError, wrong_type)
    if app.middleware_stack is not None:  # built already by one of vLLM's own add-ons, with the handlers of then
        app.middleware_stack = app.build_middleware_stack()


def _meant(faults: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Pydantic's faults without the names of union branches, such as ``ChatCompletionUserMessageParam``.

    A branch is left out where a constant of its own (``role``, ``type``), else a field that the client did not send,
    shows that another one was meant.
    """

    def branch(loc: tuple[Any, ...]) -> tuple[Any, ...]:
        ends = [i for i, part in enumerate(loc, 1) if _is_class(part)]
        return loc[: ends[-1]] if ends else ()

    kept = list(faults)
    for sign in ("literal_error", "missing"):
        others = {branch(fault["loc"]) for fault in kept if fault["type"] == sign} - {()}
        kept = [fault for fault in kept if branch(fault["loc"]) not in others] or kept
    return [{**fault, "loc": tuple(part for part in fault["loc"] if not _is_class(part))} for fault in kept]


def _is_class(part: Any) -> bool:
    return isinstance(part, str) and part[:1].isupper()


def _answer_by_adapter(llm: Any) -> None:
    """Give every request to the engine with the adapter that it is for.

    Here and not by the model's name, as vLLM's API server does it: no route can forget it, and the base model is never
    taken for an adapter of the same name, nor an adapter for the base.
    """
    add_request = llm.add_request

    async def adapted(*args: Any, **kwargs: Any) -> Any:
        if (lora := LOADED.get()) is not None:
            kwargs["lora_request"] = lora
        return await add_request(*args, **kwargs)

    llm.add_request = adapted


def _cause(error: Exception, adapter: Adapter) -> str:
    """What is wrong with the adapter, for its client: the first line of vLLM's words, without the path and what it
    wraps around a worker's error."""
    text = str(error).removeprefix("Call to add_lora method failed: ")
    worker = re.match(r"Worker failed with error '(.*?)', please check the stack trace", text, re.DOTALL)
    if worker is not None:
        text = worker[1]
    if adapter.path:
        text = text.replace(adapter.path, "its folder")
    return (text.strip().splitlines() or [type(error).__name__])[0][:300]


def _note_admissions(llm: Any) -> None:
    add_request = llm.add_request

    async def noted(*args: Any, **kwargs: Any) -> Any:
        admission = ADMISSION.get() or Admission()
        try:
            queue = await add_request(*args, **kwargs)
        except Exception as error:
            admission.refusal = error
            raise
        admission.accepted = True
        return queue

    llm.add_request = noted


async def _sharing_events(outputs: Any, pace: Pace) -> AsyncIterator[Any]:
    """The ``outputs`` of one stream at the pace of the load: vLLM makes one of all that have waited."""
    pause = Pause()
    PAUSE.set(pause)
    pace.streams += 1
    try:
        # Closed here, so that a request that is cancelled while it waits is aborted at once.
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield output
                if not output.finished and (wait_s := pace.hold_s()):
                    await pause.take(wait_s)
    finally:
        pace.streams -= 1


def _end_with(queue: Any, pause: Pause) -> None:
    """End ``pause`` once the last output of a request, or an error, is in its ``queue``."""
    put = queue.put

    def told(output: Any) -> None:
        put(output)
        if getattr(output, "finished", True):
            pause.end()

    queue.put = told


def _keep_journals(llm: Any, is_dead: Callable[[], bool], pace: Pace) -> None:
    """Write what each stream generates into its journal, and begin a continued stream where its journal ends.

    vLLM's front end gets the request as the client sent it: its prompt, its limits, and first the outputs that other
    replicas made, so that roles, usage, parsers and the detokenizer stand where they stood. The engine core gets the
    ids of prompt and answer as one prompt, and a limit that is smaller by the answer.
    """
    generate = llm.generate
    by_priority = llm.vllm_config.scheduler_config.policy == "priority"
    add_to_front_end, add_to_core = llm.output_processor.add_request, llm.engine_core.add_request_async

    def front_end(request: Any, prompt: Any, parent: Any = None, index: int = 0, *args: Any, **kwargs: Any) -> None:
        add_to_front_end(request, prompt, parent, index, *args, **kwargs)
        journal, counting = JOURNAL.get(), COUNTING.get()
        state = llm.output_processor.request_states[request.request_id]
        if (pause := PAUSE.get()) is not None and index == 0:
            _end_with(state.queue, pause)
        if counting is not None:
            # Of several answers to one prompt (`n`), the first one stands for the prompt.
            counting.requests.append(lambda: _counted(state, with_prompt=index == 0))
        if journal is not None and journal.replaying:
            _replay(state, journal)
            if journal.finished:
                llm.output_processor._finish_request(state)

    async def core(request: Any) -> None:
        journal = JOURNAL.get()
        if journal is not None and journal.replaying:
            if journal.finished:
                return
            request = _rest_of(request, journal.ids)
        await add_to_core(request)

    async def journaled(prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any) -> AsyncIterator[Any]:
        journal = JOURNAL.get()
        if by_priority:
            kwargs["priority"] = PRIORITY.get()  # the key's: a client may not choose its own
        outputs = generate(prompt, sampling_params, request_id, **kwargs)
        if sampling_params.output_kind.name == "DELTA" and not EVERY_TOKEN.get():
            outputs = _sharing_events(outputs, pace)
        if journal is None:
            async for output in outputs:
                yield output
            return
        try:
            async for output in outputs:
                while journal.replay:
                    yield journal.replay.pop(0)
                if not journal.finished:
                    journal.replaying = False
                    answer = output.outputs[0]
                    journal.note(answer.token_ids, answer.text, output.finished)
                yield output
                journal.replaying = False
                await journal.flush()
        except Exception:
            journal.lost = is_dead()
            raise

    llm.output_processor.add_request = front_end
    llm.engine_core.add_request_async = core
    llm.generate = journaled


def _counted(state: Any, *, with_prompt: bool) -> tuple[int, int]:
    """Tokens of the prompt and of the answer so far, what a journal brought included."""
    generated = state.detokenizer.num_output_tokens() if state.detokenizer is not None else 0
    return state.prompt_len if with_prompt else 0, generated


def _replay(state: Any, journal: Journal) -> None:
    """Bring the front end's ``state`` of the request to where ``journal`` ends, with the outputs that lead there in
    ``journal.replay``; a finished one's last goes the usual way, through the request's queue.

    ValueError: the journal does not belong to this model.
    """
    chars = 0
    for step in journal.earlier:
        finish = _first(FINISH_REASON).STOP if step.finished else None
        state.detokenizer.update(list(step.ids), False)
        output = state.make_request_output(list(step.ids), None, finish, None)
        if step.finished:
            state.queue.put(output)
            return
        chars += len(output.outputs[0].text)
        if chars != step.chars:
            raise ValueError(f"the stream has {step.chars} characters so far, but its token ids make {chars} here")
        journal.replay.append(output)


def _rest_of(request: Any, ids: list[int]) -> Any:
    """``request`` for the engine core, after ``ids`` of its answer."""
    rest = copy.copy(request)
    rest.prompt_token_ids = [*request.prompt_token_ids, *ids]
    params = rest.sampling_params = request.sampling_params.clone()
    params.max_tokens -= len(ids)
    params.min_tokens = max(0, params.min_tokens - len(ids))
    return rest


def _refused(error: Exception) -> tuple[int, bytes]:
    """Status and body of a refusal, as vLLM itself words it where nothing was sent yet."""
    refusal = _first(CREATE_ERROR_RESPONSE)(error).model_dump()
    return refusal["error"]["code"], json.dumps(refusal).encode()


def _refuse_to_shorten() -> None:
    """Refuse a prompt and ``max_tokens`` that exceed the context together; vLLM would cut ``max_tokens`` silently."""
    get_max_tokens = _first(GET_MAX_TOKENS)

    def checked(
        max_model_len: int,
        max_tokens: int | None,
        input_length: int,
        default_sampling_params: dict[str, Any],
        override_max_tokens: int | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> Any:
        admission = ADMISSION.get()
        # Later turns of one request (built-in tools) grow by themselves and are cut as vLLM does it.
        first = admission is not None and not admission.accepted
        if first and max_tokens is not None and truncate_prompt_tokens is None:
            asked = input_length + max_tokens
            if input_length <= max_model_len < asked:
                raise ValueError(
                    f"This model's maximum context length is {max_model_len} tokens. However, you requested {asked} "
                    f"tokens: {input_length} in the prompt and {max_tokens} for the answer. Reduce one of them."
                )
        return get_max_tokens(
            max_model_len,
            max_tokens,
            input_length,
            default_sampling_params,
            override_max_tokens,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )

    # Its callers imported it by name.
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and vars(module).get("get_max_tokens") is get_max_tokens:
            module.get_max_tokens = checked  # type: ignore[attr-defined]
