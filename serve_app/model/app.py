"""Wiring of one model's Serve application: ``Card`` (ingress, always there) and ``Model`` (the engine replicas).

The card is its own small deployment because it must answer while no replica lives: what the model is called, what it
can do, how long a start takes and why the last one failed. It is the application's ingress, without a route: as an
ingress the engine itself could not have a request router of its own and would sit out direct ingress' 30 s drain.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import psutil
import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.util.metrics import Gauge

from serve_app import garbage, serve_log
from serve_app.config import CARD_DEPLOYMENT, MODEL_DEPLOYMENT, CardSettings, ModelArgs, RequestLimits
from serve_app.lease import CardView, Counted, Grant, StartReport
from serve_app.model.card_memory import CardMemory
from serve_app.model.engine_protocol import Engine
from serve_app.model.free_resources import cluster_nodes, free_resources
from serve_app.model.http_server import HttpServer
from serve_app.model.journal import Journaled
from serve_app.model.lease_gate import LeaseGate
from serve_app.model.placement import Placement, placement
from serve_app.model.rollout import NEW_FIRST, rollout, room_for
from serve_app.planning.nodes import NODE_GROUP, Node
from serve_app.planning.packing import Want
from serve_app.planning.reasons import never
from serve_app.policy import as_numbers
from serve_app.prefixes import Exchange, News, Passed
from serve_app.quota import Amount, Drawn, Ledger, Limits
from serve_app.resume import generation
from serve_app.scaling import EngineStats
from serve_app.signals import ENGINES, KV_USAGE, OF_CARDS, SCALING_QUEUE

logger = logging.getLogger("ray.serve")

# A lease that nobody used for so long is given up, should a gateway's release ever get lost. Gateways keep an idle
# lease for at most a second.
UNUSED_LEASE_S = 5.0
# How often the engine is asked for a sign of life.
PING_S = 1.0
# Replicas report to the card at each health check. Who misses three is not counted as alive (``SILENT_REPLICA_S``).
HEALTH_CHECK_PERIOD_S = 5.0
# How often engines tell the card what they have to do, and how often the scaling policy hears of it.
SIGNALS_S = 0.5
ROOM_S = 2.0
# An engine that has nothing new to tell says so less often.
SAME_SIGNALS_S = 2.0


@serve.deployment(
    name=CARD_DEPLOYMENT,
    # Always one. A card scales nothing: this is how its numbers reach the policy of ``Model``, which runs in the same
    # controller, within a second and also while no replica of the model lives.
    autoscaling_config=AutoscalingConfig(
        min_replicas=1,
        max_replicas=1,
        metrics_interval_s=SIGNALS_S,
        look_back_period_s=4 * SIGNALS_S,
        policy=AutoscalingPolicy(policy_function="serve_app.policy:card_signals"),
    ),
    max_ongoing_requests=1000,
    ray_actor_options={"num_cpus": 0},
    # A card asks for nothing, so there is always room for the next one: no start goes unheard while a model is rolled.
    max_surge_percent=NEW_FIRST,
)
class Card:
    """Describes one model to gateways and to the scaling policy: Serve's door to a ``CardMemory``."""

    def __init__(self, model: Any, where: Placement, slots: int, hopeless: StartReport | None = None) -> None:
        serve_log.leave_out_serves_lines()
        # Holding the handle is what makes `Model` part of this application.
        self._model = model
        self._memory = CardMemory(slots)
        self._ledger = Ledger()
        self._exchange = Exchange()
        if hopeless is not None:
            self._memory.started(hopeless)
        self._room = Room(where)
        self._name = serve.get_replica_context().app_name
        self._gauges = {metric: Gauge(metric.name, metric.description, metric.labels) for metric in OF_CARDS}

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        self._memory.settings = CardSettings(**user_config)

    async def card(self) -> CardView:
        return self._memory.view()

    async def report(self, start: StartReport) -> RequestLimits:
        """A replica says how its start went, at each health check again; the limits are what it asks for."""
        self._memory.started(start)
        return self._memory.settings.limits

    async def loading(self, replica: str, progress: str) -> None:
        """A replica says how far its start is."""
        self._memory.loading(replica, progress)

    async def engine(self, replica: str, stats: EngineStats) -> None:
        """A replica says what its engine has to do."""
        self._memory.engine(replica, stats)

    async def held(self, gateway: str, requests: int, asleep: bool) -> None:
        """A gateway says how many requests wait there for a replica."""
        self._memory.held(gateway, requests, asleep)

    async def pass_on(self, gateway: str, news: tuple[News, ...], upto: int) -> Passed:
        """A gateway says what it gave to which replica, and hears what others gave (see ``prefixes.Exchange``)."""
        return self._exchange.swap(gateway, news, upto, time.monotonic())

    async def draw(self, key: str, limits: Limits, need: Amount, more: Amount) -> Drawn:
        """A gateway draws on a key's quota for this model, or gives back (see ``serve_app.quota``)."""
        return self._ledger.draw(key, limits, need, more, time.monotonic())

    async def record_autoscaling_stats(self) -> dict[str, float]:
        signals = self._memory.signals()
        kv_usage = signals.load.kv_usage if signals.load else 0.0
        for metric, value in ((SCALING_QUEUE, signals.queue), (ENGINES, signals.replicas), (KV_USAGE, kv_usage)):
            self._gauges[metric].set(value, {"model": self._name})
        if signals.queue:
            # Only who may need another replica has to know whether there is room for it.
            signals = replace(signals, placeable=await self._room.look())
        return as_numbers(signals, self._memory.settings.scaling)


@serve.deployment(
    name=MODEL_DEPLOYMENT,
    num_replicas=1,
    # The queue is the gateways' own: what they hold they can order, count and refuse.
    max_queued_requests=-1,
    health_check_period_s=HEALTH_CHECK_PERIOD_S,
    # Serve replaces a replica after three checks in a row that failed or took longer: one that is frozen for half a
    # minute goes, one that stalls for twenty seconds under load stays.
    health_check_timeout_s=10,
    graceful_shutdown_wait_loop_s=0.5,
    # For what cannot move to another replica; everything else leaves after `limits.grace_s`.
    graceful_shutdown_timeout_s=60,
    request_router_config=RequestRouterConfig(request_router_class="serve_app.router:ModelRouter"),
)
class Model:
    """One engine on its own HTTP port, behind leases."""

    # Serve awaits an async constructor: a replica counts as running once its engine answers.
    async def __init__(self, args: ModelArgs) -> None:  # type: ignore[misc]
        serve_log.leave_out_serves_lines()
        context = serve.get_replica_context()
        self._replica = context.replica_id.unique_id
        self._app_name = context.app_name
        # Looked up once: it asks Serve's controller and blocks this loop, on which the engine's answers travel later.
        self._card = serve.get_deployment_handle(CARD_DEPLOYMENT, self._app_name)
        self._generation = generation(args)
        self._silence_s = RequestLimits().silence_s  # until the card says otherwise
        self._engine = build_engine(args, self._app_name)
        started, at = time.monotonic(), time.time()
        try:
            # From any thread, and nobody waits for it: the next line says it too.
            facts = await self._engine.start(lambda progress: self._card.loading.remote(self._replica, progress))
        except Exception as error:
            self._engine.shutdown()
            await self._tell_card(StartReport(self._replica, at, error=one_line(error)))
            raise
        self._gate = LeaseGate(Journaled(self._engine.asgi, self._generation))
        self._server = HttpServer(self._gate, host=node_address())
        await self._server.start()
        self._started = StartReport(self._replica, at, facts=facts, seconds=time.monotonic() - started)
        await self._tell_card(self._started)
        garbage.spare_streams()
        self._tasks = [asyncio.create_task(self._watch_engine()), asyncio.create_task(self._tell_stats())]

    async def lease(self, _preferred: str = "") -> AsyncIterator[Grant | Counted]:
        """Hold one slot of this replica for as long as this call stays open (see ``serve_app.lease``). The argument is
        for the router: which replica the caller would like."""
        lease = self._gate.grant()
        try:
            yield Grant(self._replica, self._server.host, self._server.port, lease.token, self._generation)
            used = -1
            while lease.busy or lease.used != used:
                used = lease.used
                with contextlib.suppress(TimeoutError):
                    yield await asyncio.wait_for(lease.counted.get(), UNUSED_LEASE_S)
        finally:
            self._gate.end(lease)

    async def report(self) -> dict[str, Any]:
        """Leases held and busy, and the engine's own counters."""
        return {
            "replica": self._replica,
            "leases": self._gate.held,
            "busy": self._gate.busy,
            "engine": self._engine.report(),
        }

    async def check_health(self) -> None:
        await self._engine.check_health()
        # A card that was restarted has forgotten us.
        await self._tell_card(self._started)

    async def _watch_engine(self) -> None:
        """End this replica once its engine stands still or is dead: it would be called healthy for ever.

        A long queue or a long prompt is neither: the engine answers between any two of its steps.
        """
        while True:
            await asyncio.sleep(PING_S)
            try:
                await asyncio.wait_for(self._engine.ping(), self._silence_s)
            except Exception as error:
                logger.error("the engine of %s gave no sign of life, so this replica ends: %r", self._app_name, error)
                end_with_children()

    async def _tell_stats(self) -> None:
        told, at = EngineStats(), 0.0
        while True:
            stats, now = self._engine.stats(), time.monotonic()
            if stats != told or now - at >= SAME_SIGNALS_S:
                with contextlib.suppress(Exception):  # the next one says it too
                    await asyncio.wait_for(self._card.engine.remote(self._replica, stats), SAME_SIGNALS_S)
                told, at = stats, now
            await asyncio.sleep(SIGNALS_S)

    async def _tell_card(self, report: StartReport) -> None:
        try:
            limits: RequestLimits = await asyncio.wait_for(self._card.report.remote(report), 2.0)
            self._silence_s = limits.silence_s
            self._engine.share_events(limits.chunk_s)
        except Exception as error:  # the card is a convenience: never a reason to fail a start or a health check
            logger.warning("could not reach the card of %s: %s", self._app_name, one_line(error))

    async def __del__(self) -> None:
        """Serve's hook at the end of a graceful stop."""
        if hasattr(self, "_server"):
            for task in self._tasks:
                task.cancel()
            await self._server.stop()
        self._engine.shutdown()


class Room:
    """How many more replicas the cluster has room for, looked up at most every ``ROOM_S`` seconds."""

    def __init__(self, where: Placement) -> None:
        self._where = where
        self._known: int | None = None
        self._at: float | None = None

    async def look(self) -> int | None:
        """None where the cluster does not say."""
        if self._at is None or time.monotonic() - self._at >= ROOM_S:
            free = await asyncio.to_thread(free_resources)
            self._known = None if free is None else room_for(self._where, free)
            self._at = time.monotonic()
        return self._known


def end_with_children() -> None:
    """End this process and those below it, at once: a stopped one could not end by itself."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(1)


def node_address() -> str:
    """This node's address as the cluster knows it, which is not always the one that its routing table suggests."""
    me = ray.get_runtime_context().get_node_id()
    return str(next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == me))


def build_engine(args: ModelArgs, name: str) -> Engine:
    if args.source.fake is not None:
        from serve_app.model.fake_engine import FakeEngine

        return FakeEngine(args.source.fake, name, args.max_num_seqs)
    from serve_app.model.engine import VllmEngine

    return VllmEngine(args, name)


def one_line(error: BaseException) -> str:
    """An exception for a status page: its first line that says something, without a traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def no_room(where: Placement, nodes: Sequence[Node]) -> str:
    """Why no replica will ever fit on ``nodes``, for the log and the card; empty where one may.

    Said and not refused: `serve run` may be early, before the nodes have joined. Where nodes are added as they are
    needed it is not even said, because what waits is what brings them.
    """
    if not nodes or any(NODE_GROUP in node.labels for node in nodes):
        return ""
    why = never(Want("", where.needs, 1), nodes)
    return f"no node has room for a replica: it {why}" if why else ""


def app(args: ModelArgs) -> Application:
    """Serve's application builder (``import_path: serve_app.model:app``)."""
    where = placement(args)
    rolled = rollout(where, free_resources())
    logger.info(rolled.why)
    hopeless = None
    if lacking := no_room(where, cluster_nodes()):
        logger.error(lacking)
        # As the start of a replica that failed now: the card tells of it until one that begins later succeeds.
        hopeless = StartReport("", at=time.time(), error=lacking)
    model = Model.options(  # type: ignore[attr-defined]
        max_ongoing_requests=args.slots,
        ray_actor_options=where.actor_options,
        placement_group_bundles=where.bundles,
        placement_group_strategy=where.strategy,
        placement_group_bundle_label_selector=where.bundle_labels,
        # What a deployment file says of it wins: Serve puts its options over these.
        max_surge_percent=rolled.max_surge_percent,
    )
    application: Application = Card.bind(model.bind(args), where, args.max_num_seqs, hopeless)  # type: ignore[attr-defined]
    return application
