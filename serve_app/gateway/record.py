"""What is known of one request while it lasts, told once when it is over: to metrics, usage and access log.

The relay and the answer say what happens, a few times per request and never per chunk.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from serve_app import errors, serve_log
from serve_app.asgi import ClientLeft
from serve_app.gateway.access_line import Access, Outcome, line
from serve_app.gateway.failures import Failure, Failures
from serve_app.gateway.tally import Tally
from serve_app.gateway.tracing import FIRST_BYTE, NOT_TRACED, QUEUE, UPSTREAM, Trace
from serve_app.lease import Counted
from serve_app.signals import (
    ABORTS,
    COLD_TIME,
    ENGINE_TIME,
    FIRST_TOKEN_TIME,
    HELD_COLD,
    IN_FLIGHT,
    OTHER,
    QUEUE_TIME,
    QUEUED,
    REQUESTS,
    ROUTE_TIME,
    TOKEN_TIME,
    TOKENS,
    WHOLE_TIME,
    Metric,
    Note,
)
from serve_app.usage import Told, Use

# https://www.w3.org/TR/server-timing/
TIMING_HEADER = b"server-timing"
# What servers log, since nginx, for a client that left before there was a status.
LEFT_STATUS = 499
# The reason of errors that an engine gave.
ENGINE = "engine"


class Record:
    """Of one request: ``with record:`` is its whole life. What ends the block is its outcome.

    ``model``: whose name the metrics have, empty until it is known. ``asked``: the id that the client wrote. ``key``:
    its key's name. ``moves``: how often another replica had to go on. ``status``: of the answer's head, 0 before it
    went out. ``engine_failed``: its stream ended with an error of the engine's own. ``told``: what its key used; None:
    it was not let in. ``failures``: who remembers that it failed. ``trace``: its spans.
    """

    def __init__(
        self,
        note: Note,
        route: str,
        key: str = "",
        request_id: bytes = b"",
        told: Told | None = None,
        failures: Failures | None = None,
        trace: Trace = NOT_TRACED,
    ) -> None:
        self.id = request_id
        self.asked = ""
        self.model = ""
        self.moves = 0
        self.status = 0
        self.engine_failed = False
        self.tally = Tally()
        self.trace = trace
        self._note = note
        self._failures = failures
        self._route = route
        self._key = key
        self._told = told
        self._at = time.time()
        self._came = time.monotonic()
        self._replica = ""
        self._stage: tuple[Metric, str, str] | None = None  # the gauge that counts it now, with its labels
        self._route_s: float | None = None
        self._waits_since: float | None = None
        self._was_cold: Callable[[float], bool] = lambda _since: False
        self._queue_s: float | None = None
        self._cold_s: float | None = None
        self._sent = 0.0
        self._began: float | None = None
        self._is_stream = False
        self._ended = 0.0
        self._outcome: Outcome = "ok"
        self._reason = "ok"

    # Its stages

    def waits(self, model: str, was_cold: Callable[[float], bool]) -> None:
        """For a replica of ``model``; ``was_cold(since)``: none runs, or none did at some time since then."""
        self._stop_waiting()  # for another model of its name, in vain
        self.model = model
        self._was_cold = was_cold
        self._waits_since = time.monotonic()
        cold = was_cold(self._waits_since)
        self._enter(HELD_COLD if cold else QUEUED)
        if self._route_s is None:
            self._route_s = self._waits_since - self._came
        self.trace.stage(QUEUE, cold=cold)

    def sent(self, replica: str) -> None:
        """To ``replica``, or about to be."""
        self._stop_waiting()
        if self._stage is None or self._stage[0] is not IN_FLIGHT:
            self._enter(IN_FLIGHT)
        self._replica = replica
        self._sent = time.monotonic()
        self.trace.stage(UPSTREAM, replica=replica, resumes=self._began is not None)

    def moves_on(self, why: str) -> None:
        """From its replica, which is lost or leaves, to another one."""
        self.moves += 1
        self.trace.fail(why)

    def begins(self, *, stream: bool) -> None:
        """The replica's first byte is there, or all of an answer that is no stream, and goes out now."""
        self._began = time.monotonic()
        self._is_stream = stream
        self.trace.event(FIRST_BYTE)

    def timing(self, *, at_its_end: bool = False) -> str:
        """Where its time went so far, in the words of ``TIMING_HEADER``; empty where nothing is known."""
        stages = {
            "route": self._route_s,
            "queue": self._queue_s,
            "upstream": None if self._began is None else self._began - self._sent,
            "total": time.monotonic() - self._came if at_its_end else None,
        }
        known = ((stage, seconds) for stage, seconds in stages.items() if seconds is not None)
        return ", ".join(f"{stage};dur={seconds * 1000:.1f}" for stage, seconds in known)

    # Its end

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _at: TracebackType | None
    ) -> None:
        self.end(error)

    def end(self, error: BaseException | None) -> None:
        """It is over, by ``error`` or well. Called once."""
        self._ended = time.monotonic()
        self.trace.end()
        waited = self._waits_since is not None
        self._stop_waiting()
        self._enter(None)
        if isinstance(error, (ClientLeft, asyncio.CancelledError)):  # Serve cancels the task of a client that left
            self._outcome, self._reason = "client left", "client_left"
            self.status = self.status or LEFT_STATUS
            self._count(ABORTS, self._how_far(waited))
        elif error is not None:
            self._outcome = "refused" if self._began is None else "broken"
            self._reason = reason_of(error)
            self.status = self.status or (error.status if isinstance(error, errors.ModelyardError) else 500)
        elif self.engine_failed:
            self._outcome, self._reason = "broken", ENGINE
        if self._failures is not None and self.model and self._failed:
            said_id = self.id.decode("latin-1")
            self._failures.add(Failure(time.time(), self.model, self._route, self.status, self._reason, said_id))
        self._count(REQUESTS, f"{self.status // 100}xx", self._reason)
        for metric, seconds in ((ROUTE_TIME, self._route_s), (QUEUE_TIME, self._queue_s), (COLD_TIME, self._cold_s)):
            if seconds is not None:
                self._count(metric, value=seconds)
        if self._began is not None and self._is_stream:
            self._count(FIRST_TOKEN_TIME, value=self._began - self._came)
        if self._outcome == "ok":
            self._count(WHOLE_TIME, value=self._ended - self._came)
        self.tally.then(self._tell)

    def _tell(self) -> None:
        """The rest, once the tokens are counted or never will be."""
        counted = self.tally.counted
        if counted is not None:
            self._count(ENGINE_TIME, value=counted.engine_s)
            for what, tokens in (("prompt", counted.prompt), ("generated", counted.generated)):
                if tokens:
                    self._count(TOKENS, what, value=tokens)
            if self._outcome == "ok" and self._is_stream and self._began is not None and counted.generated > 1:
                self._count(TOKEN_TIME, value=(self._ended - self._began) / (counted.generated - 1))
        if self.trace is not NOT_TRACED:
            self._tell_trace(counted)
        if self._told is not None:
            self._told(self._key, self.model or OTHER, self._use(counted))
        if not serve_log.access.isEnabledFor(logging.INFO):
            return
        access = Access(
            at=self._at,
            id=self.id.decode("latin-1") or None,
            key=self._key or None,
            route=self._route,
            asked=self.asked or None,
            model=self.model or None,
            replica=self._replica or None,
            status=self.status,
            outcome=self._outcome,
            reason=self._reason,
            moves=self.moves,
            prompt_tokens=counted.prompt if counted else None,
            generated_tokens=counted.generated if counted else None,
            route_s=self._route_s,
            queue_s=self._queue_s,
            cold_s=self._cold_s,
            engine_s=counted.engine_s if counted else None,
            first_byte_s=None if self._began is None else self._began - self._came,
            total_s=self._ended - self._came,
        )
        serve_log.access.info(line(access), extra=serve_log.AS_SERVE)

    def _tell_trace(self, counted: Counted | None) -> None:
        facts: dict[str, str | bool | int | None] = {
            "http.response.status_code": self.status,
            "gen_ai.request.model": self.asked or None,
            "gen_ai.response.model": self.model or None,
            "gen_ai.usage.input_tokens": counted.prompt if counted else None,
            "gen_ai.usage.output_tokens": counted.generated if counted else None,
            "modelyard.request_id": self.id.decode("latin-1") or None,
            "modelyard.moves": self.moves,
            "modelyard.outcome": self._outcome,
        }
        self.trace.tell(facts, self._reason if self._failed else "")

    def _use(self, counted: Counted | None) -> Use:
        return Use(
            requests=1,
            errors=int(self._failed),
            prompt_tokens=counted.prompt if counted else 0,
            generated_tokens=counted.generated if counted else 0,
            uncounted=int(not self.tally.known),
        )

    @property
    def _failed(self) -> bool:
        return self._outcome in ("refused", "broken")

    def _how_far(self, waited: bool) -> str:
        if self._began is not None:
            return "streaming"
        if self._replica and not waited:
            return "answering"
        return "waiting" if waited else "arriving"

    def _stop_waiting(self) -> None:
        if self._waits_since is not None:
            waited_s = time.monotonic() - self._waits_since
            self._queue_s = (self._queue_s or 0.0) + waited_s
            # Serve takes a moment to say that the last replica died: who came meanwhile was queued.
            began_cold = self._stage is not None and self._stage[0] is HELD_COLD
            if began_cold or self._was_cold(self._waits_since):
                self._cold_s = (self._cold_s or 0.0) + waited_s
            self._waits_since = None

    def _enter(self, stage: Metric | None) -> None:
        """Be counted in this gauge, and in no other one."""
        if self._stage is not None:
            self._note(*self._stage, value=-1.0)
        self._stage = None if stage is None else (stage, self.model or OTHER, self._route)
        if self._stage is not None:
            self._note(*self._stage)

    def _count(self, metric: Metric, *labels: str, value: float = 1.0) -> None:
        self._note(metric, self.model or OTHER, self._route, *labels, value=value)


def reason_of(error: BaseException) -> str:
    """A word of ours for an error: an engine may write anything into its own."""
    if isinstance(error, errors.Relayed):
        return ENGINE
    if isinstance(error, errors.ModelyardError):
        return error.code or error.type
    return "api_error"
