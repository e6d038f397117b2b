"""LoRA adapters of one engine: loaded when the first request for one comes, one by one made to leave for want of room.

How an adapter gets into an engine and out of it is the engine's; when, is decided here. An adapter that requests use
stays: an engine that had dropped it would load it again inside one of its steps, and where the files are gone by then
that ends the engine with everybody's requests in it.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import Context, ContextVar
from typing import Any

from serve_app import errors
from serve_app.asgi import ASGIApp, Receive, Scope, Send, respond
from serve_app.model.engine_protocol import ADAPTER, Adapter

logger = logging.getLogger("ray.serve")

# For so long a fault is repeated without a look at the adapter: a flood of requests costs nothing, and one whose files
# arrive is used soon after.
FAULT_S = 5.0

# What the engine calls the adapter of the request under way; None: the base model answers.
LOADED: ContextVar[Any] = ContextVar("loaded", default=None)


class _Stay:
    """One adapter's time in the engine. ``present``: it has a place there. ``leave``: it goes once ``idle``, and who
    wants it from now on waits until it is ``gone``."""

    def __init__(self) -> None:
        self.loaded: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.present = False
        self.users = 0
        self.idle, self.leave, self.gone = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.idle.set()
        self.task: asyncio.Task[None] | None = None


class Adapters:
    """``load``: puts an adapter into the engine and returns what the engine calls it; raises ``AdapterUnusable``.
    ``unload``: takes what ``load`` returned. ``room``: how many adapters the engine keeps at a time."""

    def __init__(
        self,
        load: Callable[[Adapter], Awaitable[Any]],
        unload: Callable[[Any], Awaitable[object]],
        room: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = load
        self._unload = unload
        self._room = room
        self._clock = clock
        self._places = asyncio.Semaphore(room)
        self._waiting = 0
        # By name and path: one whose path the config changed is another adapter. The longest unused comes first.
        self._stays: dict[Adapter, _Stay] = {}
        self._faults: dict[Adapter, tuple[str, float]] = {}

    @property
    def names(self) -> list[str]:
        """Of the adapters in the engine."""
        return sorted({adapter.name for adapter, stay in self._stays.items() if _is_in(stay)})

    @contextlib.asynccontextmanager
    async def held(self, adapter: Adapter) -> AsyncIterator[Any]:
        """What the engine calls ``adapter``, which is loaded now if need be and stays for the length of the block.

        AdapterUnusable: the engine cannot use it.
        """
        while (stay := self._stays.get(adapter)) is not None and stay.leave.is_set():
            await stay.gone.wait()
        if stay is None:
            self._repeat_fault(adapter)
            stay = _Stay()
            # In a context of its own: it outlasts the request that is first.
            stay.task = asyncio.create_task(self._live(adapter, stay), context=Context())
        self._stays.pop(adapter, None)
        self._stays[adapter] = stay
        stay.users += 1
        stay.idle.clear()
        try:
            yield await asyncio.shield(stay.loaded)
        finally:
            stay.users -= 1
            if not stay.users:
                stay.idle.set()

    async def _live(self, adapter: Adapter, stay: _Stay) -> None:
        await self._take_place(stay)
        try:
            try:
                loaded = await self._load(adapter)
            except Exception as error:
                if isinstance(error, errors.AdapterUnusable):
                    self._faults[adapter] = error.message, self._clock() + FAULT_S
                stay.loaded.set_exception(error)
                stay.loaded.exception()  # asked for here: its users may all have left
                return
            stay.loaded.set_result(loaded)
            await stay.leave.wait()
            await stay.idle.wait()
            try:
                await self._unload(loaded)
            except Exception as error:
                logger.warning("could not unload the adapter %s: %r", adapter.name, error)
        finally:
            del self._stays[adapter]
            stay.present = False
            stay.gone.set()
            self._places.release()

    async def _take_place(self, stay: _Stay) -> None:
        self._waiting += 1
        self._make_room()
        await self._places.acquire()
        self._waiting -= 1
        stay.present = True
        self._make_room()  # where more wait than had a place before, this one has to leave in its turn

    def _make_room(self) -> None:
        """Let as many leave as wait: those that nobody uses first, the longest unused first."""
        present = [stay for stay in self._stays.values() if stay.present]
        staying = [stay for stay in present if not stay.leave.is_set()]
        lacking = self._waiting - (self._room - len(staying))
        for stay in sorted(staying, key=lambda stay: stay.users > 0)[: max(0, lacking)]:
            stay.leave.set()

    def _repeat_fault(self, adapter: Adapter) -> None:
        message, until = self._faults.get(adapter, ("", 0.0))
        if self._clock() < until:
            raise errors.AdapterUnusable(message, param="model")
        self._faults.pop(adapter, None)


def _is_in(stay: _Stay) -> bool:
    return stay.loaded.done() and stay.loaded.exception() is None


class Adapted:
    """ASGI wrapper around an engine's app: a request that names an adapter gets it (``LOADED``), or a 400."""

    def __init__(self, app: ASGIApp, adapters: Adapters) -> None:
        self._app = app
        self._adapters = adapters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        adapter = ADAPTER.get()
        if scope["type"] != "http" or adapter is None:
            LOADED.set(None)
            await self._app(scope, receive, send)
            return
        async with contextlib.AsyncExitStack() as stack:
            try:
                LOADED.set(await stack.enter_async_context(self._adapters.held(adapter)))
            except errors.AdapterUnusable as error:
                await respond(send, *errors.render(error))
                return
            await self._app(scope, receive, send)
