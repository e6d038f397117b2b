"""One request's way: read, resolve the name, take a lease, send it to the replica, hand the answer back; and the way
to another replica where that one is lost or leaves. Plain ASGI."""

import asyncio
import contextlib
import json
import logging
import math
import re
import secrets
from collections import Counter
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from serve_app import errors, names
from serve_app.asgi import ClientLeft, Receive, Send, read_body, while_client_stays
from serve_app.catalog import Catalog, Model, State
from serve_app.config import GatewaySettings
from serve_app.errors import ModelyardError
from serve_app.gateway.answer import Answer
from serve_app.gateway.directory import Directory
from serve_app.gateway.failures import Failures
from serve_app.gateway.fields import TIMEOUT_HEADER, Fields, parse, read, ticket_of
from serve_app.gateway.lease import Lease
from serve_app.gateway.leases import LeasePool
from serve_app.gateway.quotas import Quotas
from serve_app.gateway.record import Record
from serve_app.gateway.request import NO_FALLBACK_HEADER, Request, clean_request_id
from serve_app.gateway.routes import BY_PATH, Route
from serve_app.gateway.tracing import ROUTE, Trace, Tracing
from serve_app.gateway.upstream import ConnectionBroken, LeaseExpired, Leaving
from serve_app.keys import ANYBODY, Caller
from serve_app.lease import COUNTED_HEADER, REFUSED_HEADER, UNKNOWN_LEASE
from serve_app.names import Names
from serve_app.one_id import REQUEST_ID_HEADER
from serve_app.signals import BROKEN_STREAMS, FALLBACKS, MOVES, Note
from serve_app.usage import Told

logger = logging.getLogger("ray.serve")

# A client that asks for signs of life while it waits gets the first one after so long, and then one every so often.
FIRST_SIGN_S = 1.0
SIGN_S = 5.0
# What ``call`` is for.
GENERATE = "/generate"
# What a replica answers for itself rather than for the request.
_ASK_ANOTHER = (502, 503, 504)
# What vLLM appends to some messages for its own logs.
_VLLM_SUFFIX = re.compile(r" \(parameter=\w+(, value=.*)?\)$", re.DOTALL)
# An engine's error body is a line or two; more than this is not an error body.
MAX_ERROR_BYTES = 256 * 1024


class Relay:
    """``note``: what becomes of each request, as ``signals`` has it. ``used``: what it cost its key."""

    def __init__(self, directory: Directory, note: Note, used: Told, tracing: Tracing) -> None:
        self._directory = directory
        self._note = note
        self._used = used
        self.tracing = tracing
        self._open: Counter[str] = Counter()  # requests, by key
        self._quotas = Quotas(directory.draw)
        self.failures = Failures()
        self.settings = GatewaySettings()
        self._names = Names()
        self._names_of: tuple[object, object] = (None, None)  # what ``_names`` was made from

    async def __call__(
        self, route: Route, caller: Caller, headers: dict[bytes, bytes], receive: Receive, send: Send, trace: Trace
    ) -> None:
        given_id = clean_request_id(headers.get(REQUEST_ID_HEADER, b""))
        record = Record(self._note, route.path, caller.name, given_id, self._used, self.failures, trace)
        answer = Answer(send, route.protocol, record)
        try:
            with record, self._counted(caller):
                await self._relay(route, caller, headers, receive, answer)
        except ModelyardError as error:
            await answer.fail(error)
        except ClientLeft:
            return
        except Exception:
            logger.exception("a request to %s failed inside the gateway", route.path)
            await answer.fail(errors.ModelyardError(errors.OUR_FAULT))

    def refused(self, route: Route, error: ModelyardError, trace: Trace) -> None:
        """A request that did not get as far as here is one as well."""
        Record(self._note, route.path, trace=trace).end(error)

    async def _relay(
        self, route: Route, caller: Caller, headers: dict[bytes, bytes], receive: Receive, answer: Answer
    ) -> None:
        answer.record.trace.stage(ROUTE)
        body = await read_body(receive)
        async with while_client_stays(receive):
            fields = await read(route, headers, body)
            await self._exchange(fields, route, caller, headers, body, answer)

    @contextlib.contextmanager
    def _counted(self, caller: Caller) -> Iterator[None]:
        """One of the requests that its key may have open at once; raises ``TooManyRequests``."""
        if caller.max_concurrent is None:
            yield
            return
        if self._open[caller.name] >= caller.max_concurrent:
            raise errors.TooManyRequests(
                f"The key {caller.name!r} has {caller.max_concurrent} requests open, which is as many as it may.",
                code="concurrency_limit",
                retry_after_s=1,
            )
        self._open[caller.name] += 1
        try:
            yield
        finally:
            self._open[caller.name] -= 1
            if not self._open[caller.name]:
                del self._open[caller.name]

    def catalog(self, caller: Caller = ANYBODY) -> Catalog:
        """What exists, the settings' names included; ``Unavailable`` until Serve has said so once."""
        return self._known().seen_by(caller)

    def listed(self, caller: Caller) -> dict[str, Model]:
        """Every id that ``caller`` may ask for."""
        return self._known().listed(caller)

    def _known(self) -> Names:
        """What every name means now; raises as ``catalog``."""
        if not self._directory.known:
            raise errors.Unavailable("This gateway has just started and knows no models yet.", retry_after_s=1)
        models, given = self._directory.catalog, self.settings.names
        if self._names_of[0] is not models or self._names_of[1] is not given:
            self._names, self._names_of = names.build(models, given), (models, given)
        return self._names

    def resolve(self, asked: str, caller: Caller) -> Model:
        """The model that ``asked`` means, as far as ``caller`` may know."""
        return self._known().resolve(asked, caller)

    def _able(self, target: str, asked: str, path: str) -> Model:
        """The model of ``target``, which ``asked`` led to, able to answer ``path``."""
        models = self._known().models
        if target not in models.ids:
            raise errors.Unavailable(f"The model that {asked!r} means does not exist now.", retry_after_s=10)
        model = models.resolve(target)
        facts = model.card.facts
        if facts is not None and path not in facts.paths:
            raise errors.UnsupportedTask(
                f"The model {asked!r} cannot answer {path}: its tasks are {', '.join(facts.tasks)}.", param="model"
            )
        if model.state is State.FAILED:
            raise errors.failed_to_start(asked)
        return model

    async def call(
        self, path: str, request: dict[str, Any], caller: Caller, client: Mapping[bytes, bytes]
    ) -> tuple[Any, str]:
        """One JSON request from inside the gateway: the answer's JSON, and the model that gave it in another's place
        (mostly empty). ``client``: the headers of whoever wants it."""
        sink = _Collected()
        trace = self.tracing.begin(GENERATE, client)
        record = Record(self._note, GENERATE, caller.name, told=self._used, failures=self.failures, trace=trace)
        answer = Answer(sink, "openai", record)
        headers = {b"content-type": b"application/json"}
        headers |= {name: client[name] for name in (TIMEOUT_HEADER, NO_FALLBACK_HEADER) if name in client}
        body = json.dumps(request).encode()
        trace.stage(ROUTE)
        with record, self._counted(caller):
            await self._exchange(parse(body), BY_PATH[path], caller, headers, body, answer)
        return json.loads(sink.body), answer.fallback

    async def _exchange(
        self, fields: Fields, route: Route, caller: Caller, headers: dict[bytes, bytes], body: bytes, answer: Answer
    ) -> None:
        """Send the request to a replica of the model that it means, and the reply to ``answer``."""
        record = answer.record
        record.asked = asked = str(fields.model)
        meant = self.resolve(asked, caller)
        record.model = meant.name
        choice = self._known().choose(asked, fields.whose or secrets.token_hex(8))
        if choice.name is not None and route.body == "json" and (changed := names.apply(body, route.path, choice.name)):
            body, fields = changed, parse(changed)
        context = meant.card.facts.max_model_len if meant.card.facts else None
        ticket = replace(ticket_of(route, fields, len(body), context), key=caller.name, priority=caller.rank)
        # Also the answer's id in vLLM: one that is continued elsewhere keeps it.
        record.id = record.id or secrets.token_hex(16).encode()
        request = Request(route, headers, fields, body, ticket, record)
        answer.tells_timing = request.wants_timing
        targets = choice.targets if request.may_fall_back else choice.targets[:1]
        if not caller.limits:
            await self._try_models(targets, request, answer)
            return
        charge = await self._quotas.enter(caller, meant.name, ticket.tokens, record.tally)
        answer.extra = charge.headers
        try:
            await self._try_models(targets, request, answer)
        finally:
            self._quotas.settle(charge)

    async def _try_models(self, targets: Sequence[str], request: Request, answer: Answer) -> None:
        """One model after another, while they cannot serve and the client has nothing yet. Where none can, it gets
        the first one's error."""
        first: ModelyardError | None = None
        for before, target in zip(("", *targets), targets, strict=False):
            if first is not None:
                logger.info("%s cannot serve a request to %s: %s asked instead", before, request.asked, target)
                self._note(FALLBACKS, before, target)
                answer.fallback = target
            try:
                model = self._able(target, request.asked, request.route.path)
                request.under(target, self._known().models.adapter(target))
                await self._try_replicas(model, request, answer)
                return
            except ModelyardError as error:
                if answer.started:
                    self._note(BROKEN_STREAMS, target)
                unable = names.cannot_serve(error) or (first is not None and isinstance(error, errors.UnsupportedTask))
                if answer.committed or not unable:
                    raise
                first = first or error
        answer.fallback = ""
        raise first or errors.ModelyardError(errors.OUR_FAULT)

    async def _try_replicas(self, model: Model, request: Request, answer: Answer) -> None:
        """One replica after another, while they are lost.

        What was not committed yet is asked again, a stream under way is continued where it broke.
        """
        pool = self._directory.pool(model)
        limits = model.card.limits
        loop = asyncio.get_running_loop()
        since = loop.time()
        ticket, at_most_s = request.ticket, request.longest_wait_s
        shows = (limits.keep_alive or request.keep_alive) and request.streams
        successor: Lease | None = None
        lost = 0
        while True:
            if (lease := successor) is None:
                answer.record.waits(model.name, pool.was_cold)
                acquiring = pool.acquire(since, ticket, at_most_s, request.prefix)
                lease = await (self._with_signs(acquiring, pool, model.name, answer) if shows else acquiring)
            answer.record.sent(lease.grant.replica)
            ticket = ticket.first()
            move = Move(pool, lease, request, answer)
            lease.on_leaving = move.start
            try:
                await self._one_try(lease, request, answer)
                return
            except ConnectionBroken as broken:
                logger.info("replica %s of %s: %s", lease.grant.replica, model.name, broken)
                if answer.complete:
                    await answer.end()
                    return
                if (why := request.why_not(answer)) is not None:
                    raise errors.UpstreamBroken(
                        f"The model's replica went away in the middle of the answer, which cannot be continued: {why}."
                    ) from broken
                successor = move.take() if isinstance(broken, Leaving) else None
                if isinstance(broken, LeaseExpired) and loop.time() < since + pool.patience_s:
                    continue
                if successor is None:
                    lost += 1
                    pool.suspect(lease.grant.replica)
                if lost >= limits.attempts:
                    raise errors.Unavailable(
                        f"The replicas of {model.name} went away {lost} times under this request.",
                        retry_after_s=model.card.start_s or 5,
                    ) from broken
                answer.record.moves_on(broken.why)
                self._note(MOVES, model.name, "stream" if answer.started else "request", broken.why)
                if answer.started:
                    since, at_most_s = loop.time(), math.inf
            finally:
                move.close()
                pool.release(lease)

    async def _with_signs(self, acquire: Awaitable[Lease], pool: LeasePool, name: str, answer: Answer) -> Lease:
        """``acquire``, with a sign of life to the client from time to time."""
        acquiring = asyncio.ensure_future(acquire)
        try:
            pause_s = FIRST_SIGN_S
            while not (await asyncio.wait([acquiring], timeout=pause_s))[0]:
                await answer.comment(f"{name} {self._progress(name)}")
                pause_s = SIGN_S
            return acquiring.result()
        except BaseException:
            acquiring.cancel()
            with contextlib.suppress(ModelyardError, asyncio.CancelledError):
                pool.release(await acquiring)  # granted in the very moment in which the client left
            raise

    def _progress(self, name: str) -> str:
        model = self._directory.catalog.models.get(name)
        if model is None or model.replicas:
            return "is busy: waiting for a place"
        left = f", about {model.card.ready_in_s:.0f} s left" if model.card.ready_in_s is not None else ""
        return f"is starting{left}"

    async def _one_try(self, lease: Lease, request: Request, answer: Answer) -> None:
        connection = lease.connection
        number = request.count_on(lease)
        try:
            records = b";".join(answer.records)
            head = await connection.request(request.head(lease, answer, len(records), number), records + request.body)
            if refused := head.get(REFUSED_HEADER):
                request.count_no_more(lease, number)
                kind = LeaseExpired if refused == UNKNOWN_LEASE else ConnectionBroken
                raise kind(f"the replica refused: {refused.decode()}")
            request.counted(lease, number, head.get(COUNTED_HEADER))
            if head.status in _ASK_ANOTHER:
                raise ConnectionBroken(f"the replica answered {head.status}")
            if head.status >= 400:
                raise relayed_error(head.status, await _all(connection.read, MAX_ERROR_BYTES))
            if head.get(b"content-type").startswith(b"text/event-stream"):
                await answer.stream(head, connection.read)
                request.counted(lease, number, answer.trailer)
            else:
                # Committed whole: a replica that dies half-way costs a second try, not a broken answer.
                await answer.whole(head, await _all(connection.read))
        except BaseException as error:
            if isinstance(error, ConnectionBroken):
                request.count_is_lost(lease, number)
            # Also when our own task is cancelled (the client left): the replica must see the connection go.
            if not connection.reusable:
                connection.close()
            raise


class Move:
    """Takes a request off a replica that is leaving, once another one is ready for it: ``start``, then the request's
    connection is interrupted with ``Leaving`` and ``take`` gives the new lease."""

    def __init__(self, pool: LeasePool, lease: Lease, request: Request, answer: Answer) -> None:
        self._pool = pool
        self._lease = lease
        self._request = request
        self._answer = answer
        self._task: asyncio.Task[None] | None = None
        self._successor: Lease | None = None

    def start(self) -> None:
        if self._task is None and self._request.why_not(self._answer) is None:
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        # Nobody free in time: the request stays where it is, until it ends or its replica does.
        with contextlib.suppress(ModelyardError):
            now, ticket = asyncio.get_running_loop().time(), self._request.ticket.first()
            self._successor = await self._pool.acquire(now, ticket, prefix=self._request.prefix)
            if not self._answer.started or self._answer.generation == self._successor.grant.generation.encode():
                self._lease.connection.interrupt(Leaving("the replica is leaving"))

    def take(self) -> Lease | None:
        successor, self._successor = self._successor, None
        return successor

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._successor is not None:
            self._pool.release(self._successor)
            self._successor = None


class _Collected:
    """An ASGI ``send`` that keeps the body."""

    def __init__(self) -> None:
        self.body = b""

    async def __call__(self, message: Any) -> None:
        self.body += message.get("body", b"")


def relayed_error(status: int, body: bytes) -> ModelyardError:
    """An engine's error answer, in whichever envelope, as one of ours. What the engine says of its own failures
    (5xx) stays in its log: it may name files and addresses."""
    if status >= 500:
        return errors.Relayed(status if status in (500, 503) else 502, "The engine could not answer this request.")
    with contextlib.suppress(ValueError, AttributeError, RecursionError):
        parsed = json.loads(body)
        detail = parsed.get("error") if isinstance(parsed.get("error"), dict) else parsed
        if isinstance(detail.get("message"), str):
            code = detail.get("code")
            return errors.Relayed(
                400 if status == 422 else status,
                _VLLM_SUFFIX.sub("", detail["message"]),
                param=detail.get("param") if isinstance(detail.get("param"), str) else None,
                code=code if isinstance(code, str) else None,
            )
    return errors.Relayed(status, "The engine refused this request.")


async def _all(read: Any, limit: int | None = None) -> bytes:
    parts: list[bytes] = []
    size = 0
    while data := await read():
        parts.append(data)
        size += len(data)
        if limit is not None and size > limit:
            break
    return b"".join(parts)
