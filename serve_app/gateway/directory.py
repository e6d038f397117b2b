"""What the gateway knows of the cluster's models: Serve's public status and each model's card, polled.

Serve stays the source of truth; this keeps the last picture of it (``catalog``) and one lease pool per model.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from contextvars import Context
from dataclasses import dataclass, replace
from typing import Any

from ray import serve
from ray.serve.exceptions import RayServeException

from serve_app import catalog, errors
from serve_app.catalog import AppSnapshot, Catalog, Model, State
from serve_app.config import CARD_DEPLOYMENT, MODEL_DEPLOYMENT, GatewaySettings
from serve_app.gateway.affinity import Affinity
from serve_app.gateway.held import GATEWAY
from serve_app.gateway.leases import LeasePool
from serve_app.gateway.serve_state import applications, gateways_of, snapshot_of
from serve_app.lease import CardView
from serve_app.prefixes import News, Passed
from serve_app.quota import Amount, Drawn, Limits
from serve_app.replica_watch import WATCH

logger = logging.getLogger("ray.serve")

CARD_TIMEOUT_S = 2.0
# A settled model's card is asked again only every so many rounds: a thousand models stay cheap.
SETTLED_ROUNDS = 3


def apart(call: Callable[..., Any], *args: Any) -> Any:
    """``call`` a handle, outside of the client's request that is under way.

    Serve gives its id to every call that is made within it. Of several calls with one id that wait for a replica Serve
    serves one and loses sight of the others, and it cancels those that wait once the client has left.
    """
    return Context().run(call, *args)


@dataclass(frozen=True, slots=True)
class Calls:
    """What is asked of one application. Serve copies a handle each time that a method is taken from it, which costs
    nearly a millisecond: so each is taken once."""

    lease: Any
    card: Any
    held: Any
    pass_on: Any
    draw: Any

    @classmethod
    def of(cls, model: Any, card: Any) -> "Calls":
        return cls(lease=model.lease, card=card.card, held=card.held, pass_on=card.pass_on, draw=card.draw)


class Directory:
    """``catalog``: the last picture. ``known``: whether Serve has answered at least once. ``gateways``: replicas of the
    gateway that run."""

    def __init__(self, settings: Callable[[], GatewaySettings]) -> None:
        self._settings = settings
        self.catalog = Catalog()
        self.gateways = 1
        self._looked = asyncio.Event()
        self._pools: dict[str, LeasePool] = {}
        # Made once per application, in a thread: looking a deployment up asks Serve's controller and blocks.
        self._calls: dict[str, Calls] = {}
        self._last: dict[str, tuple[AppSnapshot, CardView]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._round = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def known(self) -> bool:
        return self._looked.is_set()

    async def start(self, wait_s: float) -> None:
        """Begin to look at Serve, and wait until it has answered once, ``wait_s`` at most."""
        self._task = asyncio.create_task(self._poll())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._looked.wait(), wait_s)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await asyncio.gather(*(p.close(errors.Unavailable("This gateway is stopping.")) for p in self._pools.values()))

    def pool(self, model: Model) -> LeasePool:
        pool = self._pools.get(model.name)
        if pool is None:
            pool = self._pools[model.name] = self._new_pool(model.name)
        return pool

    async def draw(self, name: str, key: str, limits: Limits, need: Amount, more: Amount) -> Drawn:
        """From the ledger in the card of the model ``name``."""
        drawn: Drawn = await apart(self._calls[name].draw.remote, key, limits, need, more)
        return drawn

    def report(self) -> dict[str, dict[str, int]]:
        """What each model's pool holds, by model."""
        return {name: pool.report() for name, pool in self._pools.items()}

    def _new_pool(self, name: str) -> LeasePool:
        calls = self._calls[name]

        def now() -> Model:
            return self.catalog.models.get(name) or Model(name, State.STARTING)

        async def tell_held(requests: int) -> None:
            await apart(calls.held.remote, GATEWAY, requests, now().state is State.ASLEEP)

        async def pass_on(news: tuple[News, ...], upto: int) -> Passed:
            passed: Passed = await apart(calls.pass_on.remote, GATEWAY, news, upto)
            return passed

        return LeasePool(
            name,
            lambda preferred: apart(calls.lease.remote, preferred),
            affinity=Affinity(lambda: now().card.routing, pass_on),
            limits=lambda: now().card.limits,
            replicas=lambda: now().replicas,
            ready_in_s=lambda: now().card.ready_in_s,
            tell_held=tell_held,
            watch=WATCH,
        )

    async def _poll(self) -> None:
        while True:
            try:
                await self._refresh()
            except Exception as error:  # Serve's controller restarts, say: keep the last picture and ask again
                logger.warning("could not read Serve's status: %r", error)
            await asyncio.sleep(self._settings().refresh_s)

    async def _refresh(self) -> None:
        # A blocking call into Ray: never on the event loop that relays bytes.
        found = await asyncio.to_thread(applications)
        apps = {name: snapshot for name, app in found.items() if (snapshot := snapshot_of(name, app))}
        self.gateways = gateways_of(found.values()) or self.gateways
        await asyncio.to_thread(self._look_up, apps)
        # What failed is shown even where Serve has nothing to look up; nothing else can be asked or routed to yet.
        apps = {name: app for name, app in apps.items() if app.failed or name in self._calls}
        for gone in self._calls.keys() - apps.keys():
            del self._calls[gone]
        self._round += 1
        due = [app for app in apps.values() if self._card_is_due(app)]
        cards = await asyncio.gather(*(self._ask_card(app.name) for app in due))
        for app, card in zip(due, cards, strict=True):
            self._last[app.name] = (app, card)
        self._last = {name: (apps[name], self._last[name][1]) for name in apps}
        models = (catalog.model_of(app, card) for app, card in self._last.values())
        self.catalog = catalog.build(models, self.catalog)
        self._looked.set()
        for name, pool in self._pools.items():
            if name in self.catalog.models and self.catalog.models[name].state is State.FAILED:
                pool.refuse_waiting(errors.failed_to_start(name))
        for name in self._pools.keys() - apps.keys():
            removed = errors.UnknownModel(f"The model {name!r} was removed.", param="model")
            closing = asyncio.create_task(self._pools.pop(name).close(removed))
            self._closing.add(closing)  # the loop itself keeps only a weak reference
            closing.add_done_callback(self._closing.discard)

    def _look_up(self, names: Iterable[str]) -> None:
        """Handles of applications that are new here; blocks."""
        for name in names:
            if name not in self._calls:
                # Between two looks an application may be gone; one that could not be built has no deployments.
                with contextlib.suppress(KeyError, RayServeException):
                    model = serve.get_deployment_handle(MODEL_DEPLOYMENT, name).options(stream=True)
                    self._calls[name] = Calls.of(model, serve.get_deployment_handle(CARD_DEPLOYMENT, name))

    def _card_is_due(self, app: AppSnapshot) -> bool:
        before = self._last.get(app.name)
        return before is None or before[0] != app or not app.running or self._round % SETTLED_ROUNDS == 0

    async def _ask_card(self, name: str) -> CardView:
        """The model's card, or the last one that it gave. A card that is new itself has not heard of any start yet."""
        last = self._last[name][1] if name in self._last else CardView()
        try:
            card: CardView = await asyncio.wait_for(self._calls[name].card.remote(), CARD_TIMEOUT_S)
        except Exception:
            return last
        if card.facts:
            return card
        return replace(card, facts=last.facts, start_s=card.start_s or last.start_s, wake_s=card.wake_s or last.wake_s)
