"""The gateway and its replicas in one process, without Ray: real sockets, real ASGI servers, the scripted engine.

Only Serve is played: ``LeaseStream`` stands for its streaming call. What must be shown on real Serve is in
``tests/serve``.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

import httpx

from serve_app import catalog
from serve_app.asgi import ASGIApp, Message, Receive, Scope, Send
from serve_app.catalog import Catalog, Model, State
from serve_app.config import FakeScript, RequestLimits
from serve_app.gateway.affinity import Affinity
from serve_app.gateway.app import GatewayApp
from serve_app.gateway.exposition import Exposition
from serve_app.gateway.leases import LeasePool
from serve_app.gateway.meters import both
from serve_app.gateway.relay import Relay
from serve_app.gateway.tracing import Tracing
from serve_app.gateway.usage_book import UsageBook
from serve_app.lease import CardView, Counted, EngineFacts, Grant
from serve_app.model.engine_protocol import Engine
from serve_app.model.fake_engine import FakeEngine
from serve_app.model.http_server import HttpServer
from serve_app.model.journal import Journaled
from serve_app.model.lease_gate import Lease, LeaseGate
from serve_app.prefixes import Exchange, News, Passed
from serve_app.quota import Amount, Drawn, Ledger, Limits
from serve_app.replica_watch import ReplicaWatch
from serve_app.scaling import EngineStats
from serve_app.signals import BROKEN_STREAMS, FALLBACKS, MOVES, Metric

HOST = "127.0.0.1"


async def eventually(true: Callable[[], object]) -> None:
    """Wait for ``true``, 20 s at most."""
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.005)


class Door:
    """Around a replica's app: counts requests (not signs of life), lets nothing in or out while it is not open, and
    keeps back the end of an answer: with ``keep_back`` "last" the last part of its body, with "end" only its end."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.admitted = 0
        self.keep_back: Literal["nothing", "last", "end"] = "nothing"
        self.kept_back = asyncio.Event()
        self.open = asyncio.Event()
        self.open.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def out(message: Message) -> None:
            await self.open.wait()
            if self.keep_back != "nothing" and message.get("body") and not message.get("more_body"):
                if self.keep_back == "end":
                    await send({**message, "more_body": True})
                self.kept_back.set()
                await asyncio.Event().wait()
            await send(message)

        await self.open.wait()
        self.admitted += scope.get("method") == "POST"
        await self._app(scope, receive, out)


class Replica:
    """One model replica on a loopback port."""

    def __init__(self, name: str, engine: Engine, slots: int, generation: str = "1") -> None:
        self.name = name
        self.slots = slots
        self.generation = generation
        self.engine = engine
        self.gate = LeaseGate(Journaled(self.engine.asgi, generation))
        self.door = Door(self.gate)
        self.server = HttpServer(self.door, HOST)
        self.facts: EngineFacts | None = None
        self.alive = False
        self.streams: set[LeaseStream] = set()

    async def start(self) -> None:
        self.facts = await self.engine.start()
        await self.server.start()
        self.alive = True

    async def restart(self) -> None:
        """After ``die``: on a port of its own, as Serve's successor would be."""
        await self.server.stop()
        self.server = HttpServer(self.door, HOST)
        await self.start()

    def freeze(self) -> None:
        """As after SIGSTOP: its sockets stay open and nothing comes out of them."""
        self.door.open.clear()

    def thaw(self) -> None:
        self.door.open.set()

    async def die(self) -> None:
        """As after SIGKILL: its lease calls break and its sockets close."""
        self.sever()
        await self.server.stop()

    def sever(self) -> None:
        """``die``, as far as others see it at once."""
        self.alive = False
        for stream in list(self.streams):
            stream.broken.set()
        for connection in list(self.server._server.server_state.connections):
            connection.transport.abort()


class LeaseStream:
    """What ``handle.options(stream=True).lease.remote()`` returns, as far as the pool uses it."""

    def __init__(self, model: "FakeModel", preferred: str) -> None:
        self._model = model
        self._preferred = preferred
        self._replica: Replica | None = None
        self._lease: Lease | None = None
        self._cancelled = asyncio.Event()
        self.broken = asyncio.Event()

    def __aiter__(self) -> "LeaseStream":
        return self

    async def __anext__(self) -> Grant | Counted:
        if self._replica is None:
            self._replica = await self._place()
            self._lease = self._replica.gate.grant()
            self._replica.streams.add(self)
            replica = self._replica
            return Grant(replica.name, HOST, replica.server.port, self._lease.token, replica.generation)
        assert self._lease is not None
        counted = asyncio.ensure_future(self._lease.counted.get())
        ends = [counted, *(asyncio.ensure_future(e.wait()) for e in (self._cancelled, self.broken))]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
        if counted.done() and not counted.cancelled():
            return counted.result()
        self._give_back()
        raise RuntimeError("replica died") if self.broken.is_set() else asyncio.CancelledError

    async def _place(self) -> Replica:
        """The least leased replica with a free slot that Serve's router may choose; waits for one."""
        watch, name = self._model.watch, self._model.name
        while not self._cancelled.is_set():
            running = watch.running(name)
            free = [
                r
                for r in self._model.replicas
                if r.alive
                and len(r.streams) < r.slots
                and (running is None or r.name in running)
                and not watch.is_shunned(name, r.name)
            ]
            if free:
                return min(free, key=lambda r: (r.name != self._preferred, len(r.streams)))
            await asyncio.sleep(0.005)
        raise asyncio.CancelledError

    def _give_back(self) -> None:
        if self._replica is not None and self._lease is not None:
            self._replica.streams.discard(self)
            self._replica.gate.end(self._lease)

    def cancel(self) -> None:
        self._cancelled.set()
        self._give_back()


@dataclass
class FakeModel:
    name: str
    replicas: list[Replica]
    also_known_as: tuple[str, ...] = ()
    adapters: dict[str, str] = field(default_factory=dict)
    limits: RequestLimits = field(default_factory=RequestLimits)
    state: State | None = None
    pool: LeasePool | None = None
    streams: int = 0
    watch: ReplicaWatch = field(default_factory=ReplicaWatch)
    routing: str = "prefix"
    ledger: Ledger = field(default_factory=Ledger)
    exchange: Exchange = field(default_factory=Exchange)
    load: EngineStats | None = None
    reason: str = ""
    waking_for_s: float | None = None
    held: list[int] = field(default_factory=list)  # what the gateway told the card, call by call

    def entry(self) -> Model:
        running = [r for r in self.replicas if r.alive]
        facts = self.replicas[0].facts if self.replicas else None
        card = CardView(
            also_known_as=self.also_known_as,
            adapters=self.adapters,
            limits=self.limits,
            facts=facts,
            start_s=7.0,
            waking_for_s=self.waking_for_s,
            load=self.load,
            created=1,
        )
        state = self.state or (State.READY if running else State.STARTING)
        return Model(self.name, state, self.reason, len(running), card)

    async def pass_on(self, news: tuple[News, ...], upto: int) -> Passed:
        return self.exchange.swap("one", news, upto, time.monotonic())

    async def tell_held(self, requests: int) -> None:
        self.held.append(requests)

    def open(self, preferred: str) -> LeaseStream:
        self.streams += 1
        return LeaseStream(self, preferred)


class FakeDirectory:
    """The directory without Serve."""

    def __init__(self, models: list[FakeModel]) -> None:
        self.models = {m.name: m for m in models}
        self.known = True
        self.gateways = 1

    async def draw(self, name: str, key: str, limits: Limits, need: Amount, more: Amount) -> Drawn:
        return self.models[name].ledger.draw(key, limits, need, more, time.monotonic())

    def report(self) -> dict[str, dict[str, int]]:
        return {name: fake.pool.report() for name, fake in self.models.items() if fake.pool}

    def running(self, name: str, *replicas: Replica) -> None:
        """As Serve would say it: these replicas of the model may get new requests, the others are leaving."""
        self.models[name].watch.update(name, [replica.name for replica in replicas])

    @property
    def catalog(self) -> Catalog:
        return catalog.build((m.entry() for m in self.models.values()), Catalog())

    def pool(self, model: Model) -> LeasePool:
        fake = self.models[model.name]
        if fake.pool is None:
            fake.pool = LeasePool(
                fake.name,
                fake.open,
                limits=lambda: fake.limits,
                affinity=Affinity(lambda: fake.routing, fake.pass_on),
                replicas=lambda: sum(r.alive for r in fake.replicas),
                ready_in_s=lambda: 7.0,
                tell_held=fake.tell_held,
                watch=fake.watch,
                keep_idle_s=0.1,
            )
        return fake.pool

    async def close(self) -> None:
        from serve_app.errors import Unavailable

        for model in self.models.values():
            if model.pool is not None:
                await model.pool.close(Unavailable("closing"))


class Noted:
    """A gateway's metrics: what was counted, how high each gauge is, what each histogram was told, in order."""

    def __init__(self) -> None:
        self.counters: Counter[tuple[str, ...]] = Counter()
        self.gauges: Counter[tuple[str, ...]] = Counter()
        self.observed: defaultdict[tuple[str, ...], list[float]] = defaultdict(list)

    def __call__(self, metric: Metric, *labels: str, value: float = 1.0) -> None:
        assert len(labels) == len(metric.labels)
        at = (metric.name, *labels)
        if metric.kind == "histogram":
            self.observed[at].append(value)
        else:
            counts = self.counters if metric.kind == "counter" else self.gauges
            counts[at] += value  # type: ignore[assignment]


@dataclass
class Yard:
    """A running gateway: ``client`` talks to ``server``, ``models`` are its insides, ``noted`` its metrics."""

    client: httpx.AsyncClient
    models: dict[str, FakeModel]
    directory: FakeDirectory
    relay: Relay
    app: GatewayApp
    server: HttpServer
    port: int
    noted: Noted

    @property
    def counted(self) -> Counter[tuple[str, ...]]:
        """Moves, fallbacks and broken streams: what befell requests."""
        names = {metric.name for metric in (MOVES, FALLBACKS, BROKEN_STREAMS)}
        return Counter({at: count for at, count in self.noted.counters.items() if at[0] in names})

    async def quiet(self) -> None:
        """Wait (5 s at most) until no request runs anywhere, every lease was given back and no pool waits for anything.

        Its pulses look around once a second, so they may end a little later."""
        async with asyncio.timeout(5):
            while any(
                r.engine.report()["running"] or r.gate.busy or r.gate.held or r.streams
                for m in self.models.values()
                for r in m.replicas
            ) or any(
                m.pool and sum(m.pool.report().values()) > m.pool.report()["pulses"] for m in self.models.values()
            ):
                await asyncio.sleep(0.01)


def model(
    name: str,
    *,
    replicas: int = 1,
    slots: int = 64,
    script: FakeScript | None = None,
    also_known_as: tuple[str, ...] = (),
    adapters: dict[str, str] | None = None,
    limits: RequestLimits | None = None,
) -> FakeModel:
    members = [Replica(f"{name}-{i}", FakeEngine(script or FakeScript(), name), slots) for i in range(replicas)]
    return FakeModel(name, members, also_known_as, adapters or {}, limits or RequestLimits())


@asynccontextmanager
async def yard(*models: FakeModel, tracing: Tracing | None = None) -> AsyncIterator[Yard]:
    for fake in models:
        for replica in fake.replicas:
            await replica.start()
    directory = FakeDirectory(list(models))
    noted = Noted()
    exposition = Exposition("one", lambda: directory.catalog)
    usage: UsageBook = UsageBook(lambda: relay.settings.usage_dir)
    note = both(noted, exposition.note)
    relay = Relay(directory, note, usage.add, tracing or Tracing())  # type: ignore[arg-type]
    app = GatewayApp(directory, relay, exposition, usage)  # type: ignore[arg-type]
    gateway = HttpServer(app, HOST)
    await gateway.start()
    base = f"http://{HOST}:{gateway.port}"
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=base, timeout=20, trust_env=False, limits=limits) as client:
        try:
            yield Yard(client, directory.models, directory, relay, app, gateway, gateway.port, noted)
        finally:
            await directory.close()
            await gateway.stop()
            for fake in models:
                for replica in fake.replicas:
                    await replica.die()
