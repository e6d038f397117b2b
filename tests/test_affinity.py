"""Requests that begin alike go to one replica, whichever gateway they come to: in one process, replicas played or real
sockets."""

import asyncio
import time
from typing import Any

import httpx
import pytest

from serve_app import errors
from serve_app.config import FakeScript, RequestLimits
from serve_app.gateway import affinity, leases
from serve_app.gateway.affinity import Affinity
from serve_app.gateway.fields import SESSION_HEADER
from serve_app.prefixes import NOTHING, Exchange, News, Passed, Prefix, of_session
from tests.inprocess import FakeModel, Yard, eventually, model, yard

CHAT = "/v1/chat/completions"
LOADS = {"a": 0, "b": 0, "c": 0}
TEXT = Prefix((1, 2), (10, 20))


class Gateway:
    """An affinity whose card is ``exchange``. ``told``: how many news each call brought there."""

    def __init__(self, name: str, exchange: Exchange) -> None:
        self.exchange = exchange
        self.told: list[int] = []
        self.fails = False
        self.routing = "prefix"
        self.name = name
        self.affinity = Affinity(lambda: self.routing, self.tell)

    async def tell(self, news: tuple[News, ...], upto: int) -> Passed:
        if self.fails:
            raise RuntimeError("the card is gone")
        self.told.append(len(news))
        return self.exchange.swap(self.name, news, upto, time.monotonic())

    def prefers(self, prefix: Prefix = TEXT, loads: dict[str, int] = LOADS) -> str | None:
        return self.affinity.preferred(loads, lambda: prefix)

    def gives(self, replica: str, prefix: Prefix = TEXT) -> None:
        self.affinity.given(replica, LOADS, lambda: prefix)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "TELL_S", 0.01)


@pytest.mark.usefixtures("soon")
async def test_gateways_tell_each_other() -> None:
    """What one gave to whom the other knows a moment later; also what was given before the other was there, and after
    the card was replaced by one that knows nothing."""
    exchange = Exchange()
    one, two = Gateway("one", exchange), Gateway("two", exchange)
    one.gives("b")
    assert (one.prefers(), two.prefers()) == ("b", None)
    await eventually(lambda: one.told)
    assert sum(one.told) == 0, "told to nobody"
    two.gives("c", of_session(b"other"))
    await eventually(lambda: two.prefers() == "b" and one.prefers(of_session(b"other")) == "c")
    one.exchange = two.exchange = Exchange()
    one.gives("a", of_session(b"third"))
    await eventually(lambda: two.prefers(of_session(b"third")) == "a")
    for gateway in (one, two):
        gateway.affinity.close()


@pytest.mark.usefixtures("soon")
async def test_a_card_that_does_not_answer_is_asked_again() -> None:
    """Requests are routed meanwhile, and later news arrive."""
    exchange = Exchange()
    one, two = Gateway("one", exchange), Gateway("two", exchange)
    for gateway in (one, two):
        gateway.gives("a", of_session(b"x"))
        await eventually(lambda g=gateway: g.told)
        gateway.fails = True
    one.gives("b")
    await asyncio.sleep(0.05)
    assert (one.prefers(), two.prefers()) == ("b", None)
    one.fails = two.fails = False

    def arrived() -> bool:
        one.gives("c", of_session(b"later"))
        return two.prefers(of_session(b"later")) == "c"

    await eventually(arrived)
    for gateway in (one, two):
        gateway.affinity.close()


async def test_without_a_choice_nothing_is_read_or_told() -> None:
    """One replica, another strategy, or a request without a prefix: the body is not hashed, the card not asked."""

    def unread() -> Prefix:
        raise AssertionError("the prefix was asked for")

    one = Gateway("one", Exchange())
    assert one.affinity.preferred({"a": 3}, unread) is None
    one.affinity.given("a", {"a": 3}, unread)
    one.routing = "least_loaded"
    assert one.prefers() is None
    one.affinity.given("a", LOADS, unread)
    one.routing = "prefix"
    assert one.prefers(NOTHING) is None
    one.gives("a", NOTHING)
    assert one.affinity._task is None
    one.routing = "round_robin"
    assert {one.prefers(NOTHING) for _ in range(3)} == set(LOADS)


# --- In one process, over real sockets


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is: no wish is given up for an idle lease elsewhere."""
    monkeypatch.setattr(leases, "IMPATIENT_S", 0.2)
    monkeypatch.setattr(leases, "PREFERRED_S", 10.0)


def fleet(**more: Any) -> FakeModel:
    fake = model("m", replicas=3, **more)
    fake.watch.update("m", [replica.name for replica in fake.replicas])
    return fake


def ask(number: int, turns: int) -> dict[str, Any]:
    said = [{"role": "user", "content": f"Conversation {number}, turn {i}. " + "a b c " * 400} for i in range(turns)]
    return {"model": "m", "messages": said, "max_tokens": 3}


async def answered_by(y: Yard, *bodies: dict[str, Any], **headers: str) -> list[str]:
    """The replica of each, one after the other; an idle lease of one request is there for the next."""
    found = []
    for body in bodies:
        before = {r.name: r.door.admitted for r in y.models["m"].replicas}
        answer = await y.client.post(CHAT, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        found += [r.name for r in y.models["m"].replicas if r.door.admitted > before[r.name]]
    return found


async def test_a_conversation_stays_where_it_began() -> None:
    """All turns of each of six, interleaved, and one after the other, so that every replica is always idle. They begin
    on all replicas: each cache gets its share."""
    async with yard(fleet()) as y:
        found = [await answered_by(y, *(ask(n, turns) for n in range(6))) for turns in (1, 2, 3, 4)]
        assert found == [found[0]] * 4
        assert len(set(found[0])) == 3
        await y.quiet()


async def test_short_requests_take_the_lease_that_is_idle() -> None:
    """One that nobody has seen and that is cheap to compute is not worth a call to Serve."""
    async with yard(fleet()) as y:
        await answered_by(y, ask(0, 1))
        streams = y.models["m"].streams
        shorts = [{"model": "m", "messages": [{"role": "user", "content": f"Hello {n}"}]} for n in range(9)]
        assert len(set(await answered_by(y, *shorts))) == 1
        assert y.models["m"].streams == streams
        await y.quiet()


async def test_a_session_keeps_its_replica_whatever_it_says() -> None:
    """By the header; another strategy, live, ignores it."""
    async with yard(fleet()) as y:
        session = {SESSION_HEADER.decode(): "s1"}
        bodies = [ask(n, 1) for n in range(9)]
        assert len(set(await answered_by(y, *bodies, **session))) == 1
        y.models["m"].routing = "round_robin"
        assert len(set(await answered_by(y, *bodies, **session))) == 3
        await y.quiet()


async def test_a_hot_prefix_spreads_when_its_replica_is_busy() -> None:
    """Thirty requests at once that begin alike: no replica gets everything."""
    script = FakeScript(token_interval_s=0.05)
    async with yard(fleet(script=script)) as y:
        home = (await answered_by(y, ask(1, 1)))[0]
        before = {r.name: r.door.admitted for r in y.models["m"].replicas}
        body = ask(1, 2) | {"max_tokens": 20}
        answers = await asyncio.gather(*(y.client.post(CHAT, json=body) for _ in range(30)))
        assert {answer.status_code for answer in answers} == {200}
        got = {r.name: r.door.admitted - before[r.name] for r in y.models["m"].replicas}
        assert sum(got.values()) == 30
        assert min(got.values()) >= 5, got
        assert got[home] < 20, got
        await y.quiet()


async def test_a_full_home_keeps_nobody_waiting() -> None:
    """Its only place is taken: the next turn goes to a replica that is free, at once."""
    async with yard(fleet(slots=1, script=FakeScript(token_interval_s=0.01))) as y:
        home = (await answered_by(y, ask(1, 1)))[0]
        async with y.client.stream("POST", CHAT, json=ask(1, 2) | {"stream": True, "max_tokens": 100_000}) as held:
            await anext(held.aiter_bytes())
            assert next(r for r in y.models["m"].replicas if r.name == home).gate.busy == 1
            assert (await answered_by(y, ask(1, 2)))[0] != home
        await y.quiet()


async def test_an_idle_lease_is_better_than_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The home is full, and what is free elsewhere is an idle lease's slot, so Serve has none to give: the request
    takes that lease long before it gives up its wish."""
    monkeypatch.setattr(leases, "PREFERRED_S", 1000.0)
    fake = model("m", replicas=2, slots=1)
    fake.watch.update("m", [replica.name for replica in fake.replicas])
    async with yard(fake) as y:
        pool = y.directory.pool(fake.entry())
        pool._keep_idle_s = 1000.0
        now = asyncio.get_running_loop().time
        session = of_session(b"s")
        home = await pool.acquire(now(), prefix=lambda: session)
        other = await pool.acquire(now())
        waits = asyncio.create_task(pool.acquire(now(), prefix=lambda: session))
        await asyncio.sleep(0.01)
        pool.release(other)
        async with asyncio.timeout(20):
            assert (await waits) is other
        pool.release(home)
        pool.release(other)
        await pool.close(errors.Unavailable("over"))
        await y.quiet()


async def test_a_client_that_leaves_while_its_lease_is_made_leaves_nothing() -> None:
    """The lease that it would have had is given back or away."""
    fake = fleet(slots=1, limits=RequestLimits(wait_s=30))
    async with yard(fake) as y:
        await answered_by(y, ask(1, 1))
        pool = y.directory.pool(fake.entry())
        taken = [await pool.acquire(asyncio.get_running_loop().time()) for _ in range(3)]
        tasks = [asyncio.create_task(y.client.post(CHAT, json=ask(1, 2))) for _ in range(3)]
        await eventually(lambda: pool.report()["openers"])
        for task in tasks:
            task.cancel()
        with pytest.raises((asyncio.CancelledError, httpx.HTTPError)):
            await tasks[0]
        for lease in taken:
            pool.release(lease)
        await y.quiet()
