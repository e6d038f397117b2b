"""The judge can say no: every verdict of the chaos suite, on records made by hand."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from serve_app import errors
from tests.chaos.judge import (
    CHAT,
    COMPLETIONS,
    GATEWAY_BREAK_S,
    Aftermath,
    Asked,
    Fault,
    Judged,
    Kind,
    Record,
    faults,
    judge,
    leaked,
    tally,
)

BROKEN = errors.sse_event(errors.UpstreamBroken("gone"))


def asked(path: str = CHAT, *, stream: bool = True, usage: bool = False, **more: Any) -> Asked:
    body: dict[str, Any] = {"model": "m", "max_tokens": 3, "stream": stream}
    body |= {"stream_options": {"include_usage": True}} if usage else {}
    return Asked(number=7, path=path, body=body, tokens=3, prompt_words=2, **more)


def record(of: Asked, body: bytes, end: Any = "complete", status: int | None = 200, **more: Any) -> Record:
    return Record(of, sent_at=10.0, ended_at=12.0, end=end, status=status, body=body, **more)


def chunk(path: str, text: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    part: dict[str, Any] = {"delta": {"content": text}} if path == CHAT else {"text": text}
    return {"id": "x-1", "model": "m", "choices": [{"index": 0, "finish_reason": finish} | part]} | more


def chunks(path: str, texts: Sequence[str] = ("t0 ", "t1 ", "t2 ")) -> list[dict[str, Any]]:
    *first, last = texts
    return [*(chunk(path, text) for text in first), chunk(path, last, "length")]


def sse(events: Sequence[dict[str, Any]], end: bytes = b"data: [DONE]\n\n") -> bytes:
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + end


def usage(completion: int = 3, prompt: int = 2) -> dict[str, Any]:
    return {
        "id": "x-1",
        "model": "m",
        "choices": [],
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion},
    }


def whole(path: str, text: str = "t0 t1 t2 ") -> bytes:
    part: dict[str, Any] = {"message": {"content": text}} if path == CHAT else {"text": text}
    return json.dumps(usage() | {"choices": [{"index": 0, "finish_reason": "length"} | part]}).encode()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_right_answers(path: str) -> None:
    """A right answer is one in every form: a stream, one with usage, one with comments in it, a whole body."""
    comment = b": still here\n\n"
    role = chunk(path, "")
    if path == CHAT:
        role["choices"][0]["delta"]["role"] = "assistant"
    for body, of in (
        (sse(chunks(path)), asked(path)),
        (sse([role, *chunks(path)]), asked(path)),
        (comment + sse(chunks(path)), asked(path)),
        (sse([*chunks(path), usage()]), asked(path, usage=True)),
        (whole(path), asked(path, stream=False)),
    ):
        assert judge(record(of, body)) == Judged(record(of, body), Kind.ANSWER)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("texts", "why"),
    [
        (("t0 ", "t1 ", "t1 ", "t2 "), "text from character"),
        (("t0 ", "t2 "), "text from character"),
        (("t0 ", "t1 "), "text from character"),
        (("t0 ", "t1 ", "t2 ", "t3 "), "text from character"),
        (("t0 ", "t", "2 "), "text from character"),
    ],
    ids=["repeated", "missing", "too short", "too long", "changed"],
)
def test_wrong_text(path: str, texts: Sequence[str], why: str) -> None:
    """A token twice, one left out, one too few or too many, another one: in a stream, and in a whole body."""
    for of, body in (
        (asked(path), sse(chunks(path, texts))),
        (asked(path, stream=False), whole(path, "".join(texts))),
    ):
        judged = judge(record(of, body))
        assert judged.kind is Kind.WRONG
        assert judged.why.startswith(why)


def _without_finish() -> bytes:
    return sse([chunk(CHAT, text) for text in ("t0 ", "t1 ", "t2 ")])


def _with_two_roles() -> bytes:
    events = chunks(CHAT)
    for event in events[:2]:
        event["choices"][0]["delta"]["role"] = "assistant"
    return sse(events)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (_without_finish(), "finish_reason must come once"),
        (sse([chunk(CHAT, "t0 ", "stop"), *chunks(CHAT)[1:]]), "finish_reason must come once"),
        (sse([*chunks(CHAT), chunk(CHAT, "")]), "finish_reason must come once"),
        (_with_two_roles(), "the role came 2 times"),
        (sse([chunk(CHAT, "t0 "), chunk(CHAT, "t1 ", id="x-2"), *chunks(CHAT)[2:]]), "id: 'x-2'"),
        (sse([chunk(CHAT, "t0 ", model="other"), *chunks(CHAT)[1:]]), "model: 'other'"),
        (sse([*chunks(CHAT), usage()]), "number of usages"),
        (sse(chunks(CHAT)) + sse(chunks(CHAT)), "something follows [DONE]"),
        (sse(chunks(CHAT)) + b"data: [DO", "something follows [DONE]"),
        (b"data: {oops\n\n" + sse(chunks(CHAT)), "not JSON"),
        (b"oops\n\n" + sse(chunks(CHAT)), "not SSE"),
        (sse(chunks(CHAT)[:1], BROKEN.partition(b"\n\n")[0] + b"\n\n") + sse(chunks(CHAT)[1:]), "an error event in"),
    ],
)
def test_streams_with_right_text_that_are_wrong(body: bytes, why: str) -> None:
    """No end, two ends, an end before the end, a second role, id, model, [DONE] or usage, and what is no event."""
    judged = judge(record(asked(), body))
    assert judged.kind is Kind.WRONG
    assert judged.why.startswith(why)


@pytest.mark.parametrize(
    ("events", "why"),
    [
        (chunks(CHAT), "number of usages"),
        ([*chunks(CHAT), usage(completion=2)], "completion_tokens"),
        ([*chunks(CHAT), usage(prompt=3)], "prompt_tokens"),
        ([*chunks(CHAT)[:2], usage(), chunks(CHAT)[2]], "usage must come last"),
    ],
)
def test_wrong_usage(events: Sequence[dict[str, Any]], why: str) -> None:
    """Usage that was asked for is there once, at the end, and counts every token of a resumed answer once."""
    judged = judge(record(asked(usage=True), sse(events)))
    assert judged.kind is Kind.WRONG
    assert judged.why.startswith(why)


@pytest.mark.parametrize("end", ["complete", "broken"])
def test_a_stream_without_an_end_is_silently_cut(end: str) -> None:
    """Closed politely or broken off: without [DONE] the client does not know that something is missing."""
    assert judge(record(asked(), sse(chunks(CHAT)[:2], b""), end)).kind is Kind.CUT


@pytest.mark.parametrize("status", [None, 200])
def test_an_answer_that_never_came_is_silently_cut(status: int | None) -> None:
    """A connection that broke before the first byte, or in the middle of a body with a length."""
    assert judge(record(asked(stream=False), b'{"id"', "broken", status)).kind is Kind.CUT


def test_a_cut_stream_with_wrong_text_is_wrong() -> None:
    """Whatever else happened to it."""
    body = sse(chunks(CHAT, ("t0 ", "t2 ")), b"")
    for end in ("complete", "broken", "left"):
        assert judge(record(asked(), body, end)).kind is Kind.WRONG
    assert judge(record(asked(), body + BROKEN)).kind is Kind.WRONG


def test_a_hung_request() -> None:
    """The client's patience ended, before an answer or in one."""
    assert judge(record(asked(), b"", "hung", None)).kind is Kind.HUNG
    assert judge(record(asked(), sse(chunks(CHAT)[:2], b""), "hung")).kind is Kind.HUNG


def test_a_client_that_left() -> None:
    """On purpose: neither an answer nor a loss."""
    assert judge(record(asked(), b"", "left", None)).kind is Kind.ABORT
    assert judge(record(asked(), sse(chunks(CHAT)[:2], b""), "left")).kind is Kind.ABORT


def test_errors_have_names() -> None:
    """An error event, a refusal with and without Retry-After, and an error page of somebody else's."""
    event = record(asked(), sse(chunks(CHAT)[:1], BROKEN))
    assert judge(event) == Judged(event, Kind.ERROR, "event upstream_error")
    busy = errors.body(errors.Unavailable("busy"))
    honest = record(asked(), busy, status=503, headers={"retry-after": "1"})
    assert judge(honest) == Judged(honest, Kind.ERROR, "503 model_unavailable")
    assert judge(record(asked(), busy, status=503)).why == "503 model_unavailable without Retry-After"
    assert judge(record(asked(), b"<html>", status=500)).why == "500 without our envelope"


def gateway_kill(at: float, until: float | None = None) -> list[Fault]:
    return [Fault("kill gateway", at, at if until is None else until)]


def test_a_killed_gateway_excuses_what_it_took_along() -> None:
    """A break of what was open when it died, soon after it; nothing else, and never wrong text or a hang."""
    cut = record(asked(), sse(chunks(CHAT)[:2], b""), "broken")  # sent at 10, ended at 12
    assert judge(cut, gateway_kill(11.5)).kind is Kind.GATEWAY
    assert judge(cut, gateway_kill(9.0, until=10.5)).kind is Kind.GATEWAY, "sent to a process that was not gone yet"
    assert judge(record(asked(), b"<html>", status=500), gateway_kill(11.5)).kind is Kind.GATEWAY
    assert judge(cut, gateway_kill(9.9)).kind is Kind.CUT, "sent after the kill"
    assert judge(cut, gateway_kill(12.1)).kind is Kind.CUT, "broken before the kill"
    late = Record(asked(), 0.0, 12.0, "broken", 200, body=cut.body)
    assert judge(late, gateway_kill(11.9 - GATEWAY_BREAK_S)).kind is Kind.CUT, "broken by something else"
    assert judge(record(asked(), sse(chunks(CHAT)[:1], BROKEN)), gateway_kill(11.5)).kind is Kind.ERROR
    assert judge(record(asked(), b"", "hung"), gateway_kill(11.5)).kind is Kind.HUNG
    wrong = record(asked(), sse(chunks(CHAT, ("t0 ", "t2 ")), b""), "broken")
    assert judge(wrong, gateway_kill(11.5)).kind is Kind.WRONG


def of_kind(kind: Kind, count: int, **more: Any) -> list[Judged]:
    return [Judged(record(asked(**more), b""), kind, "event upstream_error" if kind is Kind.ERROR else "")] * count


def test_a_good_run() -> None:
    """One error in a hundred, clients that left, a gateway's victims, and errors of what nobody could resume."""
    judged = of_kind(Kind.ANSWER, 99) + of_kind(Kind.ERROR, 1)
    judged += of_kind(Kind.ABORT, 5) + of_kind(Kind.GATEWAY, 5) + of_kind(Kind.ERROR, 5, resumable=False)
    found = tally(judged)
    assert (found.finished, found.resumable, found.errors) == (99, 100, {"event upstream_error": 6})
    assert faults(found, Aftermath()) == []


@pytest.mark.parametrize("kind", [Kind.HUNG, Kind.CUT, Kind.WRONG])
def test_what_may_never_happen(kind: Kind) -> None:
    """One in ten thousand is one too many, also where nobody could have resumed it."""
    for resumable in (True, False):
        found = tally(of_kind(Kind.ANSWER, 10_000) + of_kind(kind, 1, resumable=resumable))
        assert faults(found, Aftermath()) == [f"{kind}: 1"]
        assert len(found.examples) == 1


def test_a_loss_names_the_fault_before_it() -> None:
    """So that a failed run says where to look. What nobody could resume is no loss."""
    judged = of_kind(Kind.ERROR, 1) + of_kind(Kind.ERROR, 1, resumable=False) + of_kind(Kind.ANSWER, 1)
    kinds = [Fault("early", 1.0, 1.1), Fault("right", 11.5, 11.6), Fault("late", 12.5, 12.6)]
    assert tally(judged, kinds).examples == (
        "request 7 (stream), after 2.0 s: error: event upstream_error; 0.5 s after right",
    )


def test_too_few_finished() -> None:
    """Two errors in a hundred, or nothing to judge by."""
    assert faults(tally(of_kind(Kind.ANSWER, 98) + of_kind(Kind.ERROR, 2)), Aftermath()) == [
        "finished 98 of 100 resumable requests, less than 99%"
    ]
    assert faults(tally(of_kind(Kind.ABORT, 3)), Aftermath()) == ["no request was there to be finished"]


def test_what_a_run_must_not_leave() -> None:
    """A held lease, a busy slot or a running request in a report; an orphan; a stopped process; no faults."""
    quiet = {"leases": 0, "busy": 0, "engine": {"running": 0}}
    assert leaked([quiet, quiet]) == 0
    for held in (quiet | {"leases": 1}, quiet | {"busy": 1}, quiet | {"engine": {"running": 1}}):
        assert leaked([quiet, held]) == 1
    after = Aftermath(leaked=1, orphans=("replica a",), not_replaced=("engine b",), trouble=("no faults",))
    assert faults(tally(of_kind(Kind.ANSWER, 1)), after) == [
        "leaked counters: 1",
        "orphan: replica a",
        "not replaced: engine b",
        "no faults",
    ]
