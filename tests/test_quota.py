"""Quotas: the ledger and its purses, and what a client of a limited key sees."""

import asyncio
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from serve_app import keys
from serve_app.admission import Ticket
from serve_app.config import FakeScript, GatewaySettings
from serve_app.gateway import key_file, quotas
from serve_app.gateway.fields import Fields
from serve_app.gateway.lease import Lease
from serve_app.gateway.record import Record
from serve_app.gateway.request import Request
from serve_app.gateway.routes import BY_PATH
from serve_app.gateway.upstream import Connection
from serve_app.lease import Counted, Grant
from serve_app.quota import Amount, Ledger, Limits, Purse, spare
from tests.inprocess import FakeModel, Noted, Replica, Yard, model, yard

KEY, OTHER = "my-" + "k" * 43, "my-" + "o" * 43
CHAT = "/v1/chat/completions"
NOTHING = Amount()

amounts = st.floats(0.5, 400)


@given(st.lists(st.tuples(st.floats(0, 20), amounts, st.integers(0, 2)), max_size=200), st.floats(10, 500))
def test_gateways_together_stay_within_the_limit(requests: list[tuple[float, float, int]], limit: float) -> None:
    """Three gateways draw with their spare parts and spend: in any time they spent no more than one bucket and what
    flowed into it, but for one request that is larger than the bucket."""
    ledger, purses, limits = Ledger(), [Purse(), Purse(), Purse()], Limits(tokens=limit)
    now = spent = 0.0
    for pause, tokens, at in requests:
        now += pause
        purse, need = purses[at], min(tokens, limit)
        if not purse.covers(limits, need):
            purse.add(ledger.draw("key", limits, purse.need(limits, need), spare(limits), now))
        if purse.covers(limits, need):
            purse.spend(1, need)
            spent += need
    assert spent <= limit + limit / 60 * now + 1e-6


@given(st.floats(1, 100), st.lists(amounts, min_size=1, max_size=50))
def test_the_wait_that_is_told_is_long_enough(limit: float, draws: list[float]) -> None:
    """Who comes back after ``wait_s`` gets it, and a moment earlier does not."""
    ledger, limits = Ledger(), Limits(tokens=limit)
    now = 0.0
    for tokens in draws:
        drawn = ledger.draw("key", limits, Amount(tokens=tokens), NOTHING, now)
        if drawn.wait_s > 1e-3:
            assert drawn.granted == NOTHING
            early = ledger.draw("key", limits, Amount(tokens=tokens), NOTHING, now + drawn.wait_s * 0.99)
            assert early.granted == NOTHING
            now += drawn.wait_s + 1e-6
            assert ledger.draw("key", limits, Amount(tokens=tokens), NOTHING, now).granted.tokens == tokens


def test_both_or_nothing() -> None:
    """A request that lacks tokens takes no request from the bucket either."""
    ledger, limits = Ledger(), Limits(requests=10, tokens=100)
    assert ledger.draw("k", limits, Amount(1, 100), NOTHING, 0.0).granted == Amount(1, 100)
    refused = ledger.draw("k", limits, Amount(1, 60), NOTHING, 0.0)
    assert (refused.granted, refused.left) == (NOTHING, Amount(9, 0))
    assert refused.wait_s == pytest.approx(36)


def test_what_is_given_back_is_there_again_and_full_buckets_are_forgotten() -> None:
    """A ledger holds nothing of keys that have all of their quota."""
    ledger, limits = Ledger(), Limits(requests=10, tokens=100)
    ledger.draw("k", limits, Amount(1, 50), spare(limits), 0.0)
    assert ledger._buckets
    ledger.draw("k", limits, Amount(-1.5, -55), NOTHING, 0.0)
    assert not ledger._buckets


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GatewaySettings:
    """``limited``: 5 requests and 300 tokens a minute; ``free``: without limits."""
    monkeypatch.setattr(key_file, "LOOK_EVERY_S", 0.0)
    limited = {"name": "limited", "hash": keys.hash_of(KEY), "requests_per_minute": 5, "tokens_per_minute": 300}
    path = tmp_path / "keys.yaml"
    path.write_text(yaml.safe_dump({"keys": [limited, {"name": "free", "hash": keys.hash_of(OTHER)}]}))
    return GatewaySettings(keys_file=str(path))


def ask(tokens: int = 3, **more: object) -> dict[str, object]:
    return {"model": "chat", "messages": [{"role": "user", "content": "a b c d"}], "max_tokens": tokens} | more


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def settled(y: Yard) -> None:
    """Until every request is over and settled."""
    await y.quiet()
    while y.relay._quotas._unsettled:
        await asyncio.sleep(0.01)


def left(y: Yard) -> Amount:
    """What the key has left on chat: in the ledger and in the gateway's purse."""
    purse = y.relay._quotas._purses.get(("limited", "chat"), Purse())
    ledger = y.models["chat"].ledger.draw("limited", Limits(5, 300), NOTHING, NOTHING, 0.0).left
    return Amount(round(purse.requests + ledger.requests, 2), round(purse.tokens + ledger.tokens, 2))


async def test_requests_per_minute(settings: GatewaySettings) -> None:
    """Five, each with what is left in its headers; the sixth is 429 with an honest Retry-After; another model and
    another key have quotas of their own."""
    async with yard(model("chat"), model("other")) as y:
        y.relay.settings = settings
        for number in range(5):
            answer = await y.client.post(CHAT, json=ask(), headers=bearer(KEY))
            assert answer.status_code == 200
            assert answer.headers["x-ratelimit-limit-requests"] == "5"
            assert answer.headers["x-ratelimit-remaining-requests"] == str(4 - number)
            assert answer.headers["x-ratelimit-reset-requests"] == f"{12 * (number + 1)}s"
        refused = await y.client.post(CHAT, json=ask(), headers=bearer(KEY))
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert 10 <= int(refused.headers["retry-after"]) <= 12
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert (await y.client.post(CHAT, json=ask(model="other"), headers=bearer(KEY))).status_code == 200
        free = await y.client.post(CHAT, json=ask(), headers=bearer(OTHER))
        assert free.status_code == 200
        assert "x-ratelimit-limit-requests" not in free.headers


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_are_settled_by_what_was_counted(settings: GatewaySettings, stream: bool) -> None:
    """The estimate is charged at first, the replica's own count in the end: 4 of the prompt and 3 of the answer."""
    async with yard(model("chat")) as y:
        y.relay.settings = settings
        assert (await y.client.post(CHAT, json=ask(stream=stream), headers=bearer(KEY))).status_code == 200
        await settled(y)
        assert left(y) == Amount(4, 293)


@pytest.mark.parametrize(
    "words",
    [b"", b"x", b"1 2", b"1 -1 0.5000", b"1 2 3", b"1 2 0.5000\n", b"9" * 5000 + b" 1 0.5000", b"\xff 1 0.5000"],
)
async def test_what_is_no_count_is_none(words: bytes) -> None:
    """Whatever a replica says where its count should be; then the lease may still say it."""
    lease = Lease(Grant("r", "h", 1, "t", "g"), Connection(), None)
    request = Request(BY_PATH[CHAT], {}, Fields(model="chat"), b"", Ticket(1), Record(Noted(), CHAT))
    number = request.count_on(lease)
    request.counted(lease, number, words)
    assert request.tally.used is None
    lease.counting.pop(number)(Counted(number, 4, 3, 0.5))
    assert request.tally.used == 7


async def test_an_aborted_request_is_charged_for_what_was_generated(settings: GatewaySettings) -> None:
    """A client that leaves after some tokens of a hundred pays for about those, and not for a hundred."""
    async with yard(model("chat", script=FakeScript(token_interval_s=0.02))) as y:
        y.relay.settings = settings
        async with y.client.stream("POST", CHAT, json=ask(100, stream=True), headers=bearer(KEY)) as answer:
            seen = 0
            async for line in answer.aiter_lines():
                seen += line.startswith("data:")
                if seen == 6:
                    break
        await settled(y)
        assert 4 + 4 <= 300 - left(y).tokens < 4 + 100


async def test_a_refused_request_costs_no_tokens(settings: GatewaySettings) -> None:
    """What the engine refuses counts as a request; what reached no engine as nothing."""
    async with yard(model("chat"), model("down", replicas=0)) as y:
        y.relay.settings = settings
        refused = await y.client.post(CHAT, json=ask(fake={"status": 400}), headers=bearer(KEY))
        assert refused.status_code == 400
        assert refused.headers["x-ratelimit-limit-tokens"] == "300"
        await settled(y)
        assert left(y) == Amount(4, 300)
        late = bearer(KEY) | {"x-modelyard-timeout-s": "0.05"}
        assert (await y.client.post(CHAT, json=ask(model="down"), headers=late)).status_code == 503
        await settled(y)
        purse = y.relay._quotas._purses[("limited", "down")]
        assert purse.left.requests + purse.requests == 5


async def test_a_stream_that_moves_is_charged_once(settings: GatewaySettings) -> None:
    """Its replica is cut off in the middle: the other one's count covers the whole answer."""
    two = model("chat", replicas=2, script=FakeScript(token_interval_s=0.01))
    async with yard(two) as y:
        y.relay.settings = settings
        async with y.client.stream("POST", CHAT, json=ask(20, stream=True), headers=bearer(KEY)) as answer:
            seen = 0
            async for line in answer.aiter_lines():
                seen += line.startswith("data:")
                if seen == 8:
                    busy = next(r for r in two.replicas if r.gate.busy)
                    for lease in two.pool._busy[busy.name] if two.pool else ():
                        lease.connection.close()
        await settled(y)
        assert left(y).tokens == 300 - 24


async def test_purses_go_back(settings: GatewaySettings) -> None:
    """A moment after the last request the gateway holds nothing, and all that was not used is in the ledger."""
    async with yard(model("chat")) as y:
        y.relay.settings = settings
        await y.client.post(CHAT, json=ask(), headers=bearer(KEY))
        async with asyncio.timeout(10):
            while y.relay._quotas.open:
                await asyncio.sleep(0.05)
        ledger = y.models["chat"].ledger
        there = ledger.draw("limited", Limits(5, 300), NOTHING, NOTHING, time.monotonic()).left
        assert there.tokens > 292


async def test_a_request_that_outlasts_its_purse_is_settled(
    settings: GatewaySettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The purse goes back while the answer is still being made; its settlement goes back as well."""
    monkeypatch.setattr(quotas, "KEEP_S", 0.05)
    async with yard(model("chat", script=FakeScript(token_interval_s=0.2))) as y:
        y.relay.settings = settings
        asking = asyncio.create_task(y.client.post(CHAT, json=ask(4), headers=bearer(KEY)))
        async with asyncio.timeout(20):
            while not y.relay._quotas._purses:
                await asyncio.sleep(0.01)
            while y.relay._quotas._purses:
                await asyncio.sleep(0.01)
            assert (await asking).status_code == 200
            await settled(y)
            while y.relay._quotas.open:
                await asyncio.sleep(0.01)


async def test_two_gateways_share_one_limit(settings: GatewaySettings) -> None:
    """Forty requests over two gateways at once: five of them are served, in any order."""
    shared = model("chat")
    async with yard(shared) as one:
        other = FakeModel("chat", [Replica("b", shared.replicas[0].engine, 64)])
        other.ledger = shared.ledger
        async with yard(other) as two:
            one.relay.settings = two.relay.settings = settings
            asked = [y.client.post(CHAT, json=ask(), headers=bearer(KEY)) for y in (one, two) for _ in range(20)]
            codes = [answer.status_code for answer in await asyncio.gather(*asked)]
    assert codes.count(200) == 5
    assert codes.count(429) == 35


async def test_a_card_that_does_not_answer_stops_nobody(settings: GatewaySettings) -> None:
    """Quotas are no reason to fail: the request goes in, and the log says so."""
    async with yard(model("chat")) as y:
        y.relay.settings = settings

        async def silent(*_args: object) -> None:
            raise RuntimeError("the card is being replaced")

        y.relay._quotas._draw = silent  # type: ignore[assignment]
        assert (await y.client.post(CHAT, json=ask(), headers=bearer(KEY))).status_code == 200
