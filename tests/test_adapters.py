"""When adapters are loaded and unloaded, without an engine."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from serve_app import errors
from serve_app.asgi import Message, Receive, Scope, Send
from serve_app.model.adapters import FAULT_S, LOADED, Adapted, Adapters
from serve_app.model.engine_protocol import ADAPTER, Adapter

A, B, C = (Adapter(name, f"/adapters/{name}") for name in "abc")


class Engine:
    """What is in it, what was done to it in which order, and a gate that keeps loads waiting while it is closed."""

    def __init__(self, room: int = 2) -> None:
        self.log: list[str] = []
        self.inside: set[Adapter] = set()
        self.most = 0
        self.broken: set[str] = set()
        self.gate = asyncio.Event()
        self.gate.set()
        self.now = 0.0
        self.adapters = Adapters(self._load, self._unload, room, lambda: self.now)

    async def _load(self, adapter: Adapter) -> Adapter:
        self.log.append(f"+{adapter.path}")
        await self.gate.wait()
        if adapter.name in self.broken:
            raise errors.AdapterUnusable(f"{adapter.name} is broken")
        self.inside.add(adapter)
        self.most = max(self.most, len(self.inside))
        return adapter

    async def _unload(self, adapter: Adapter) -> None:
        self.log.append(f"-{adapter.path}")
        self.inside.remove(adapter)

    async def use(self, adapter: Adapter, until: asyncio.Event | None = None) -> Any:
        async with self.adapters.held(adapter) as loaded:
            if until is not None:
                await until.wait()
            assert loaded in self.inside, "it left while it was in use"
            return loaded


async def settle() -> None:
    """Let everything that can run do so."""
    for _ in range(30):
        await asyncio.sleep(0)


async def test_first_requests_at_once_load_once() -> None:
    """Ten requests for an adapter that is not there: one load, and all are served; later ones load nothing."""
    engine = Engine()
    engine.gate.clear()
    using = [asyncio.create_task(engine.use(A)) for _ in range(10)]
    await settle()
    assert engine.adapters.names == [], "it is not loaded yet"
    engine.gate.set()
    assert await asyncio.gather(*using) == [A] * 10
    assert await engine.use(A) == A
    assert (engine.log, engine.adapters.names) == (["+/adapters/a"], ["a"])


async def test_a_new_path_is_loaded_anew() -> None:
    """The config names another folder: requests get that one from then on, and whoever uses the old one keeps it."""
    engine, end = Engine(), asyncio.Event()
    old = asyncio.create_task(engine.use(A, end))
    await settle()
    new = Adapter("a", "/adapters/a-2")
    assert await engine.use(new) == new
    assert engine.adapters.names == ["a"]
    end.set()
    assert await old == A


async def test_a_fault_is_remembered_and_then_looked_at_again() -> None:
    """A flood of requests for a broken adapter loads once, each of them is told why; other adapters are served; after
    a few seconds it is tried again, and serves when it was mended."""
    engine = Engine()
    engine.broken = {"a"}
    for _ in range(5):
        with pytest.raises(errors.AdapterUnusable, match="a is broken"):
            await engine.use(A)
    assert await engine.use(B) == B
    engine.broken.clear()
    with pytest.raises(errors.AdapterUnusable, match="a is broken"):
        await engine.use(A)
    assert engine.log == ["+/adapters/a", "+/adapters/b"]
    engine.now += FAULT_S
    assert await engine.use(A) == A


async def test_all_who_waited_for_a_broken_one_are_told() -> None:
    """Requests that came while it was being loaded get the same answer as the first, and it is tried once."""
    engine = Engine()
    engine.broken = {"a"}
    engine.gate.clear()
    using = [asyncio.create_task(engine.use(A)) for _ in range(4)]
    await settle()
    engine.gate.set()
    told = await asyncio.gather(*using, return_exceptions=True)
    assert [type(error) for error in told] == [errors.AdapterUnusable] * 4
    assert len(engine.log) == 1


async def test_a_first_request_that_is_cancelled_spoils_nothing() -> None:
    """Its client leaves during the load: the others are served by that same load, and so are later ones."""
    engine = Engine()
    engine.gate.clear()
    first, second = (asyncio.create_task(engine.use(A)) for _ in range(2))
    await settle()
    first.cancel()
    await settle()
    assert first.cancelled()
    engine.gate.set()
    assert await second == A
    assert await engine.use(A) == A
    assert engine.log == ["+/adapters/a"]


async def test_the_longest_unused_makes_room() -> None:
    """The engine never has more than it keeps, or it would drop one by itself."""
    engine = Engine(room=2)
    for adapter in (A, B, A, C):
        await engine.use(adapter)
    assert engine.log == ["+/adapters/a", "+/adapters/b", "-/adapters/b", "+/adapters/c"]
    await engine.use(A)
    assert (engine.adapters.names, engine.most) == (["a", "c"], 2)


async def test_one_in_use_stays_and_nobody_waits_for_ever() -> None:
    """Both places are used without a pause. A third adapter waits for the requests under way on one of them, not for
    those that come later, which wait for their turn in a place; in the end all were served."""
    engine, end = Engine(room=2), asyncio.Event()
    running = [asyncio.create_task(engine.use(adapter, end)) for adapter in (A, B)]
    await settle()
    third = asyncio.create_task(engine.use(C))
    await settle()
    later = [asyncio.create_task(engine.use(adapter)) for adapter in (A, A, B)]
    await settle()
    assert not third.done()
    assert later[2].done(), "the one that stays serves on"
    assert engine.inside == {A, B}
    end.set()
    assert await asyncio.gather(*running, third, *later) == [A, B, C, A, A, B]
    assert engine.most == 2


async def test_many_adapters_in_one_place_all_get_their_turn() -> None:
    """Room for one, six adapters at once, three requests each: all are served, one adapter after the other."""
    engine = Engine(room=1)
    many = [Adapter(str(i), f"/{i}") for i in range(6)]
    assert await asyncio.gather(*(engine.use(adapter) for adapter in many * 3)) == many * 3
    assert engine.most == 1


async def test_a_broken_one_gives_its_place_back() -> None:
    """Also where it had to wait for it, and others after it."""
    engine = Engine(room=1)
    engine.broken = {"a"}
    served = await asyncio.gather(engine.use(A), engine.use(B), engine.use(A), engine.use(C), return_exceptions=True)
    assert [served[1], served[3]] == [B, C]
    assert all(isinstance(served[i], errors.AdapterUnusable) for i in (0, 2))


async def asked(adapter: Adapter | None, engine: Engine, app: Callable[..., Awaitable[None]]) -> list[Message]:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b""}

    async def send(message: Message) -> None:
        sent.append(message)

    async def request() -> None:
        ADAPTER.set(adapter)
        await Adapted(app, engine.adapters)({"type": "http"}, receive, send)

    await asyncio.create_task(request())
    return sent


async def test_a_request_runs_with_its_adapter_or_not_at_all() -> None:
    """The app finds the adapter of its request while it runs, and none where none is named; for a broken one it is not
    asked, and the client is told why."""
    engine, seen = Engine(), list[Any]()
    engine.broken = {"b"}

    async def app(_scope: Scope, _receive: Receive, _send: Send) -> None:
        seen.append(LOADED.get())

    for adapter in (A, None):
        assert await asked(adapter, engine, app) == []
    answer = await asked(B, engine, app)
    assert seen == [A, None]
    assert answer[0]["status"] == 400
    assert b'"code": "adapter_unusable"' in answer[1]["body"]


async def test_an_app_that_fails_lets_its_adapter_go() -> None:
    """And what it raised is not mistaken for a fault of the adapter."""
    engine = Engine(room=1)

    async def fails(_scope: Scope, _receive: Receive, _send: Send) -> None:
        raise errors.AdapterUnusable("from the app")

    with pytest.raises(errors.AdapterUnusable, match="from the app"):
        await asked(A, engine, fails)
    assert await engine.use(B) == B
    assert engine.adapters.names == ["b"]
