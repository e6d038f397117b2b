"""Wiring of the gateway: its Serve deployment, its FastAPI app (docs, models, health) and the relay beside it."""

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any, cast

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, Field
from ray import serve
from ray.serve import Application
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from serve_app import __version__, errors, garbage, open_files, ray_env, serve_log
from serve_app.asgi import ASGIApp, ClientLeft, Receive, Scope, Send, bounded, check_head, respond, while_client_stays
from serve_app.catalog import Model, State
from serve_app.config import GATEWAY_DEPLOYMENT, GatewayArgs, GatewaySettings
from serve_app.gateway import status_page, tracing
from serve_app.gateway.answer import FALLBACK_HEADER, MOVES_HEADER
from serve_app.gateway.directory import Directory
from serve_app.gateway.exposition import Exposition
from serve_app.gateway.key_file import KeyFile
from serve_app.gateway.meters import both, in_ray
from serve_app.gateway.quotas import RATE_LIMIT_HEADERS
from serve_app.gateway.record import TIMING_HEADER
from serve_app.gateway.relay import Relay
from serve_app.gateway.request import ASKING_HEADERS
from serve_app.gateway.routes import BY_PATH, RELAYED, Route, protocol_of
from serve_app.gateway.tracing import AUTH, NOT_TRACED, Trace
from serve_app.gateway.usage_book import UsageBook
from serve_app.keys import ANYBODY, Caller, no_key
from serve_app.signals import OF_GATEWAYS

logger = logging.getLogger("ray.serve")

# A start waits so long for Serve's first answer; without it, requests get 503 until there is one.
FIRST_LOOK_S = 5.0
# As many as one gateway was seen to hold (docs/performance.md); where its files allow fewer, it says so.
FEW_STREAMS = 5000
# What answers without a key where keys are configured: probes have none, and a page has no model's name in it until it
# was given one.
WITHOUT_KEY = frozenset(("/health", "/ready", *status_page.FILES))
# Where in an ASGI scope the caller is; None: a probe without a key, although there are keys.
CALLER = "modelyard.caller"


@serve.deployment(
    name=GATEWAY_DEPLOYMENT,
    num_replicas=1,
    # The bound on open requests is each model's own (`limits`), not Serve's: an idle stream costs a gateway little.
    max_ongoing_requests=100_000,
    ray_actor_options={
        "num_cpus": 1,
        # Serve's default runs user code in a second thread and hands every chunk across: the relay is the user code
        # here, so it runs on the loop that owns the sockets.
        "runtime_env": {"env_vars": {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}},
    },
)
@serve.ingress()
class Gateway:
    async def __init__(self) -> None:  # type: ignore[misc]
        self._directory = Directory(lambda: self._relay.settings)
        replica = serve.get_replica_context().replica_id.unique_id
        self._exposition = Exposition(replica, lambda: self._directory.catalog)
        self._usage = UsageBook(lambda: self._relay.settings.usage_dir)
        note = both(in_ray(OF_GATEWAYS), self._exposition.note)
        self._relay = Relay(self._directory, note, self._usage.add, tracing.from_environment())
        serve_log.leave_out_serves_lines()
        if names := ray_env.missing():
            logger.warning(
                f"Not set when Ray started: {', '.join(names)}. Everything works, more slowly and with less cleaning "
                'up after crashes. To set them: stop Ray, run `eval "$(modelyard env)"`, start again.'
            )
        if (streams := open_files.most_streams()) < FEW_STREAMS:
            logger.warning(f"This gateway can hold {streams:,} streams at once. {open_files.REMEDY}")
        # Serve sends requests as soon as this returns: a gateway that comes back must not refuse the first ones.
        await self._directory.start(FIRST_LOOK_S)
        garbage.spare_streams()

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        self._relay.settings = GatewaySettings(**user_config)

    async def report(self) -> dict[str, Any]:
        """This gateway's own counters, over Serve: clients do not reach them."""
        replica = serve.get_replica_context().replica_id.unique_id
        return {"replica": replica, "models": self._directory.report()}

    async def __serve_build_asgi_app__(self) -> Any:
        return GatewayApp(self._directory, self._relay, self._exposition, self._usage)


class GatewayApp:
    """ASGI: relayed paths go straight to the relay, with no middleware on their bytes; the rest is FastAPI's."""

    def __init__(self, directory: Directory, relay: Relay, exposition: Exposition, usage: UsageBook) -> None:
        self._relay = relay
        self._keys = KeyFile(lambda: relay.settings.keys_file)
        self._api = build_api(directory, relay, exposition, usage)
        self._cors: tuple[tuple[str, ...], ASGIApp] = ((), self._answer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origins = self._relay.settings.cors_origins
        if origins != self._cors[0]:
            self._cors = (origins, _with_cors(self._answer, origins) if origins else self._answer)
        await self._cors[1](scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            # A gateway with a route prefix of its own: servers leave it in the path and say so in root_path.
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            route = BY_PATH.get(path) if scope["method"] == "POST" else None
            receive = bounded(receive, int(self._relay.settings.max_body_mb * 2**20))
            headers, trace = dict(scope["headers"]), NOT_TRACED
            if route is not None:
                trace = self._relay.tracing.begin(route.path, headers)
                trace.stage(AUTH)
            try:
                check_head(scope)
            except errors.HeadTooLarge as error:
                self._refused(route, error, trace)
                await respond(send, *errors.render(error, protocol_of(path)))
                return
            try:
                caller = self._keys.caller(headers)
            except errors.ModelyardError as error:
                if path not in WITHOUT_KEY:
                    self._refused(route, error, trace)
                    await respond(send, *errors.render(error, protocol_of(path)))
                    return
                caller = None
            if route is not None:
                await self._relay(route, caller or ANYBODY, headers, receive, send, trace)
                return
            scope[CALLER] = caller
        await self._api(scope, receive, send)

    def _refused(self, route: Route | None, error: errors.ModelyardError, trace: Trace) -> None:
        if route is not None:
            self._relay.refused(route, error, trace)


def _with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    # Keys travel in headers, never in cookies, so no credentials are allowed.
    headers = ["authorization", "x-api-key", "content-type", "anthropic-version", "x-request-id"]
    told = ["x-request-id", "retry-after", *(name.decode() for name in (MOVES_HEADER, FALLBACK_HEADER, TIMING_HEADER))]
    cors = CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=[*headers, *(name.decode() for name in ASKING_HEADERS)],
        expose_headers=[*told, *RATE_LIMIT_HEADERS],
    )
    return cast(ASGIApp, cors)


class GenerateRequest(BaseModel):
    model_config = {"extra": "forbid", "protected_namespaces": ()}

    model_name: str
    prompt: str
    max_tokens: int = Field(128, ge=1)
    temperature: float = Field(0.9, ge=0)


class GenerateAnswer(BaseModel):
    text: str


def build_api(directory: Directory, relay: Relay, exposition: Exposition, usage: UsageBook) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        usage.start()
        yield
        await directory.close()
        await usage.close()
        await relay.tracing.close()

    api = FastAPI(
        title="Modelyard",
        version=__version__,
        description="One OpenAI-compatible endpoint in front of many LLMs. `GET /v1/models` lists them.",
        lifespan=lifespan,
        redirect_slashes=False,  # to wherever the client's Host header says
    )

    @api.get("/health", tags=["operations"], summary="This gateway process lives")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @api.get("/ready", tags=["operations"], summary="Can this gateway route? With `model`: can that model answer?")
    async def ready(request: Request, model: str | None = None) -> Response:
        relay.catalog()  # or 503
        if request.scope[CALLER] is None and model is None:
            return JSONResponse({"status": "ready"})
        caller = _caller(request)
        catalog, pools = relay.catalog(caller), directory.report()
        if model is not None:
            found = relay.resolve(model, caller)
            if found.state not in (State.READY, State.ASLEEP):
                raise errors.Unavailable(
                    f"The model {model!r} is {found.state}: {found.reason}", retry_after_s=found.card.ready_in_s or 10
                )
            return JSONResponse({"status": "ready", "model": _described(found, caller, pools)})
        return JSONResponse(
            {
                "status": "ready",
                "gateway": exposition.gateway,
                "models": {name: _described(model, caller, pools) for name, model in catalog.models.items()},
                "ids": {asked: _tasks(model) for asked, model in sorted(relay.listed(caller).items())},
                "conflicts": list(catalog.conflicts),
                "failures": [asdict(failure) for failure in relay.failures.of(catalog.models)],
            }
        )

    @api.get(
        "/metrics",
        tags=["operations"],
        summary="What this gateway replica counts, for Prometheus",
        response_class=PlainTextResponse,
    )
    async def metrics(request: Request) -> Response:
        if not _caller(request).metrics:
            raise errors.Forbidden("This key may not read metrics: its entry needs `metrics: true`.")
        text, media_type = exposition.text(request.headers.get("accept", ""))
        return Response(text, media_type=media_type)

    @api.get("/usage", tags=["operations"], summary="What this key used of each model, by day (UTC)")
    async def used(
        request: Request,
        since: str | None = Query(None, description="First day, as 2026-11-01; by default the month's first."),
        until: str | None = Query(None, description="Last day, included; by default today."),
        key: str | None = Query(None, description="Of this key alone; keys with `metrics: true` see all."),
    ) -> Response:
        caller = _caller(request)
        if not caller.metrics and key not in (None, caller.name):
            raise errors.Forbidden("This key may see its own usage only: others' needs `metrics: true`.", param="key")
        return Response(
            await usage.answer(since, until, key if caller.metrics else caller.name, directory.gateways),
            media_type="application/json",
        )

    @api.get("/v1/models", tags=["models"], summary="Every id that a request may name")
    async def models(request: Request) -> dict[str, Any]:
        caller = _caller(request)
        data = [_listed(asked, model, caller) for asked, model in sorted(relay.listed(caller).items())]
        return {"object": "list", "data": data}

    @api.get("/v1/models/{model_id:path}", tags=["models"], summary="One model; ids may hold slashes")
    async def model(request: Request, model_id: str) -> dict[str, Any]:
        caller = _caller(request)
        return _listed(model_id, relay.resolve(model_id, caller), caller)

    @api.post("/generate", tags=["generation"], summary="Text from a prompt, without a protocol")
    async def generate(request: Request, response: Response, asked: GenerateRequest) -> GenerateAnswer:
        body = asked.model_dump(exclude={"model_name"}) | {"model": asked.model_name}
        async with while_client_stays(request.receive):
            client = dict(request.headers.raw)
            answer, fallback = await relay.call("/v1/completions", body, _caller(request), client)
        if fallback:
            response.headers[FALLBACK_HEADER.decode()] = fallback
        return GenerateAnswer(text=answer["choices"][0]["text"])

    @api.get("/v1/responses/{response_id}", include_in_schema=False)
    async def response(response_id: str) -> None:
        raise errors.NotFound("Responses are not stored here: there is none to get by id.", param="response_id")

    @api.exception_handler(errors.ModelyardError)
    async def known(request: Request, error: errors.ModelyardError) -> Response:
        return _rendered(request, error)

    @api.exception_handler(ClientLeft)
    async def left(_request: Request, _error: ClientLeft) -> Response:
        return Response(status_code=499)  # nobody reads it

    @api.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        path = request.url.path
        if isinstance(error.__cause__, errors.ModelyardError):
            return _rendered(request, error.__cause__)
        if error.status_code == 400:  # FastAPI's word for a body that its parser gave up on
            return _rendered(request, errors.InvalidRequest("The body is not valid JSON."))
        if error.status_code == 405 or path in BY_PATH:
            allow = "POST" if path in BY_PATH else (error.headers or {}).get("Allow", "GET")
            what = f"{path} takes {allow}, not {request.method}."
            return _rendered(request, errors.MethodNotAllowed(what, allow=allow))
        return _rendered(request, errors.NotFound(f"There is no {path} here; /docs lists what there is."))

    @api.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return _rendered(request, errors.invalid_body(error.errors()))

    @api.exception_handler(Exception)
    async def unknown(request: Request, error: Exception) -> Response:
        logger.exception("a request to %s failed inside the gateway", request.url.path, exc_info=error)
        return _rendered(request, errors.ModelyardError(errors.OUR_FAULT))

    status_page.serve(api)
    _document_relayed(api)
    return api


def _caller(request: Request) -> Caller:
    caller: Caller | None = request.scope[CALLER]
    if caller is None:
        raise no_key()
    return caller


def _document_relayed(api: FastAPI) -> None:
    """Put the relayed routes, which FastAPI does not serve, into its OpenAPI document."""
    plain = api.openapi

    def openapi() -> dict[str, Any]:
        document = plain()
        for route in RELAYED:
            media = "multipart/form-data" if route.body == "multipart" else "application/json"
            schema = {"type": "object", "required": ["model"], "properties": {"model": {"type": "string"}}}
            document["paths"][route.path] = {
                "post": {
                    "summary": route.summary,
                    "tags": ["relayed to the model"],
                    "operationId": route.path.strip("/").replace("/", "_"),
                    "requestBody": {
                        "required": True,
                        "content": {media: {"schema": schema, "example": route.example}},
                    },
                    "responses": {
                        "200": {"description": "The engine's answer: JSON, or SSE events where `stream` is true."},
                        "4XX": {"description": f"An error in {route.protocol}'s envelope."},
                        "503": {"description": "Nothing can serve this model now; Retry-After says when."},
                    },
                }
            }
        return document

    api.openapi = openapi  # type: ignore[method-assign]


def _described(model: Model, caller: Caller, pools: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """``in_flight`` and ``waiting`` are this gateway's, ``held`` all gateways'; ``engines`` has what the engines do.
    ``pools``: what each model's pool holds."""
    pool = pools.get(model.name, {})
    return {
        "state": model.state,
        "reason": model.reason,
        "replicas": model.replicas,
        "routing": model.card.routing,
        "also_known_as": [asked for asked in model.card.also_known_as if caller.may(asked, model.name)],
        "adapters": [asked for asked in model.card.adapters if caller.may(asked)],
        "tasks": _tasks(model),
        "usual_start_s": model.card.start_s,
        "usual_wake_s": model.card.wake_s,
        "ready_in_s": model.card.ready_in_s if model.state in (State.ASLEEP, State.STARTING) else None,
        "in_flight": pool.get("in_use", 0),
        "waiting": pool.get("waiting", 0),
        "held": model.card.held,
        "engines": asdict(model.card.load) if model.card.load else None,
    }


def _tasks(model: Model) -> list[str]:
    return list(model.card.facts.tasks) if model.card.facts else []


def _listed(asked: str, model: Model, caller: Caller) -> dict[str, Any]:
    """``root`` and ``parent`` as vLLM gives them; what the caller may not ask for it is not told of either."""
    facts = model.card.facts
    name = model.name if caller.may(model.name) else None
    is_adapter = asked in model.card.adapters
    return {
        "id": asked,
        "object": "model",
        "created": model.card.created,
        "owned_by": "modelyard",
        "root": asked if is_adapter else name or asked,
        "parent": name if is_adapter else None,
        "max_model_len": facts.max_model_len if facts else None,
    }


def _rendered(request: Request, error: errors.ModelyardError) -> Response:
    status, headers, body = errors.render(error, protocol_of(request.url.path))
    return Response(body, status, {name.decode(): value.decode() for name, value in headers})


def app(args: GatewayArgs) -> Application:
    """Serve's application builder (``import_path: serve_app.gateway:app``)."""
    application: Application = Gateway.bind()  # type: ignore[attr-defined]
    return application
