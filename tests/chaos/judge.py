"""What became of each request, and whether a run is good. Pure: no clock, no sockets, no processes.

The scripted engine's text is known beforehand (token ``i`` is ``"t<i> "``), so a repeated, missing or changed token
shows wherever a stream was broken and continued.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
DONE = "[DONE]"

# A killed gateway takes the answers under way on it along. The client does not know which gateway it was on, so what
# was open before the process was gone, and broke within so many seconds after, is laid to that.
GATEWAY_BREAK_S = 3.0
# Of the requests that could have been finished elsewhere, so many must have been.
FINISHED = 0.99


@dataclass(frozen=True)
class Asked:
    """One request. ``tokens``: of its right answer. ``resumable``: whether another replica could finish it.

    ``leaves_after_s``: the client closes its connection after so long on purpose. ``pause_s``: before its next request.
    """

    number: int
    path: str
    body: Mapping[str, Any]
    tokens: int
    prompt_words: int
    resumable: bool = True
    leaves_after_s: float | None = None
    pause_s: float = 0.0

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def wants_usage(self) -> bool:
        return not self.stream or bool(self.body.get("stream_options", {}).get("include_usage"))


@dataclass(frozen=True)
class Record:
    """What the client saw. Times on one clock. ``status`` is None where no answer began.

    ``end``: the answer was complete (as HTTP), the connection broke before that, the client left as it meant to, or
    its patience ended.
    """

    asked: Asked
    sent_at: float
    ended_at: float
    end: Literal["complete", "broken", "left", "hung"]
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True)
class Fault:
    """What was done to the cluster. ``at``: when it began, on the clock of the records. ``until``: when it was done; a
    process that is killed on a busy machine takes connections for a while longer."""

    kind: str
    at: float
    until: float
    what: str = ""


class Kind(StrEnum):
    ANSWER = "answered"
    ERROR = "error"
    ABORT = "left early"
    GATEWAY = "gateway broke"
    HUNG = "hung"
    CUT = "silently cut"
    WRONG = "wrong text"


# None of these may happen.
NEVER = (Kind.HUNG, Kind.CUT, Kind.WRONG)


@dataclass(frozen=True)
class Judged:
    """``why``: an error's kind, or what is wrong; empty where all is well."""

    record: Record
    kind: Kind
    why: str = ""


class Wrong(Exception):
    """The answer says something that it must not."""


def right_text(tokens: int) -> str:
    return "".join(f"t{i} " for i in range(tokens))


def judge(record: Record, gateway_kills: Sequence[Fault] = ()) -> Judged:
    try:
        kind, why = _judge(record)
    except Wrong as wrong:
        kind, why = Kind.WRONG, str(wrong)
    # An error in our own words comes from a living gateway.
    unexplained = kind is Kind.CUT or (kind is Kind.ERROR and why.endswith(NO_ENVELOPE))
    if unexplained and _gateway_died_under(record, gateway_kills):
        kind, why = Kind.GATEWAY, ""
    return Judged(record, kind, why)


NO_ENVELOPE = "without our envelope"


def _judge(record: Record) -> tuple[Kind, str]:
    if record.end == "hung":
        return Kind.HUNG, f"after {len(record.body)} bytes, status {record.status}"
    if record.status is None:
        return (Kind.ABORT, "") if record.end == "left" else (Kind.CUT, "the connection broke before an answer began")
    if record.status != 200:
        return (Kind.ABORT, "") if record.end == "left" else (Kind.ERROR, _error(record))
    if not record.asked.stream:
        if record.end == "complete":
            check_whole(record.asked, record.body)
            return Kind.ANSWER, ""
        return (Kind.ABORT, "") if record.end == "left" else (Kind.CUT, "the answer's body broke off")
    return _judge_stream(record)


def _judge_stream(record: Record) -> tuple[Kind, str]:
    *parts, rest = record.body.split(b"\n\n")
    events = [event for part in parts if (event := _event(part)) is not None]
    if DONE not in events:
        _check_stream_so_far(record.asked, [event for event in events if not _is_error(event)])
        if record.end == "left":
            return Kind.ABORT, ""
        return Kind.CUT, f"after {len(events)} events, {'closed' if record.end == 'complete' else 'broken off'}"
    if events.index(DONE) != len(events) - 1 or rest:
        raise Wrong(f"something follows {DONE}")
    events.pop()
    if events and _is_error(events[-1]):
        _check_stream_so_far(record.asked, events[:-1])
        return Kind.ERROR, f"event {events[-1]['error'].get('code')}"
    check_stream(record.asked, events)
    return Kind.ANSWER, ""


def check_whole(asked: Asked, body: bytes) -> None:
    """A complete answer that is no stream; raises ``Wrong``."""
    answer = _json(body)
    choices = answer.get("choices") or [{}]
    _same("model", answer.get("model"), asked.body["model"])
    _same_text(_text(asked, choices[0], "message"), right_text(asked.tokens))
    if not choices[0].get("finish_reason"):
        raise Wrong("no finish_reason")
    _check_usage(asked, answer.get("usage"))


def check_stream(asked: Asked, events: Sequence[Any]) -> None:
    """A complete stream without its [DONE]; raises ``Wrong``."""
    _same_text(_check_stream_so_far(asked, events), right_text(asked.tokens))
    with_choices = [event for event in events if event["choices"]]
    reasons = [event["choices"][0].get("finish_reason") for event in with_choices]
    if sum(map(bool, reasons)) != 1 or not reasons[-1]:
        raise Wrong(f"finish_reason must come once, in the last choice; found {[r for r in reasons if r]}")
    usages = [event for event in events if event.get("usage")]
    _same("number of usages", len(usages), int(asked.wants_usage))
    if usages:
        if usages[0] is not events[-1] or usages[0]["choices"]:
            raise Wrong("usage must come last, without choices")
        _check_usage(asked, usages[0]["usage"])


def _check_stream_so_far(asked: Asked, events: Sequence[Any]) -> str:
    """What must be true of every stream, wherever it ended; its text."""
    text = ""
    for event in events:
        if _is_error(event):
            raise Wrong("an error event in the middle")
        if not isinstance(event, dict) or not isinstance(event.get("choices"), list):
            raise Wrong(f"an event that is no chunk: {str(event)[:80]}")
        _same("model", event.get("model"), asked.body["model"])
        _same("id", event.get("id"), events[0].get("id"))
        text += "".join(_text(asked, choice, "delta") for choice in event["choices"])
    roles = [c["delta"] for event in events for c in event["choices"] if "role" in c.get("delta", {})]
    if len(roles) > 1:
        raise Wrong(f"the role came {len(roles)} times")
    if not right_text(asked.tokens).startswith(text):
        _same_text(text, right_text(asked.tokens))
    return text


def _check_usage(asked: Asked, usage: Any) -> None:
    found = usage or {}
    _same("completion_tokens", found.get("completion_tokens"), asked.tokens)
    _same("prompt_tokens", found.get("prompt_tokens"), asked.prompt_words)


def _text(asked: Asked, choice: Mapping[str, Any], part: str) -> str:
    return str((choice.get(part, {}).get("content") if asked.path == CHAT else choice.get("text")) or "")


def _event(part: bytes) -> Any:
    """The data of one SSE event; None for a comment."""
    lines = part.decode(errors="replace").split("\n")
    data = [line.removeprefix("data:").strip() for line in lines if line.startswith("data:")]
    if not all(line.startswith(("data:", ":")) for line in lines):
        raise Wrong(f"not SSE: {part[:80]!r}")
    if not data:
        return None
    return DONE if data == [DONE] else _json("\n".join(data))


def _is_error(event: Any) -> bool:
    return isinstance(event, dict) and isinstance(event.get("error"), dict)


def _json(text: bytes | str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise Wrong(f"not JSON: {text[:80]!r}") from None


def _same(what: str, found: Any, wanted: Any) -> None:
    if found != wanted:
        raise Wrong(f"{what}: {found!r} instead of {wanted!r}")


def _same_text(found: str, wanted: str) -> None:
    """With the place where they part."""
    same = next(
        (i for i, (f, w) in enumerate(zip(found, wanted, strict=False)) if f != w), min(len(found), len(wanted))
    )
    start = max(0, same - 12)
    _same(f"text from character {start}", found[start : same + 12], wanted[start : same + 12])


def _error(record: Record) -> str:
    """An error answer in a few words. An honest one has our envelope, and says when to come back where it should."""
    try:
        code = json.loads(record.body)["error"]["code"]
    except (ValueError, LookupError, TypeError):
        return f"{record.status} {NO_ENVELOPE}"
    dishonest = record.status in (429, 503) and "retry-after" not in record.headers
    return f"{record.status} {code}{' without Retry-After' if dishonest else ''}"


def _gateway_died_under(record: Record, kills: Sequence[Fault]) -> bool:
    return any(
        record.sent_at <= kill.until and kill.at <= record.ended_at <= kill.until + GATEWAY_BREAK_S for kill in kills
    )


# The run as a whole


@dataclass(frozen=True)
class Aftermath:
    """How the cluster was left. ``leaked``: leases, busy slots and running requests in the replicas' reports,
    leases, waiting requests and tasks in the gateways'.

    ``not_replaced``: what was killed or stopped and is still there, or its replica is. ``trouble``: what kept the run
    from being one.
    """

    leaked: int = 0
    orphans: tuple[str, ...] = ()
    not_replaced: tuple[str, ...] = ()
    trouble: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tally:
    """``resumable``: requests that could have been finished whatever happened to replicas; ``finished``: of those.

    ``examples``: one line per loss, with the fault that came before its end.
    """

    kinds: Counter[Kind]
    errors: Counter[str]
    resumable: int
    finished: int
    examples: tuple[str, ...]


def tally(judged: Iterable[Judged], faults: Sequence[Fault] = ()) -> Tally:
    judged = list(judged)
    counted = [j for j in judged if j.record.asked.resumable and j.kind not in (Kind.ABORT, Kind.GATEWAY)]
    return Tally(
        kinds=Counter(j.kind for j in judged),
        errors=Counter(j.why for j in judged if j.kind is Kind.ERROR),
        resumable=len(counted),
        finished=sum(j.kind is Kind.ANSWER for j in counted),
        examples=tuple(_told(j, faults) for j in judged if j.kind in NEVER or (j in counted and j.kind is Kind.ERROR)),
    )


def _told(judged: Judged, faults: Sequence[Fault]) -> str:
    record = judged.record
    what = f"request {record.asked.number} ({'stream' if record.asked.stream else 'whole'}), "
    what += f"after {record.ended_at - record.sent_at:.1f} s: {judged.kind}: {judged.why}"
    before = max((fault for fault in faults if fault.at <= record.ended_at), key=lambda fault: fault.at, default=None)
    return what + (f"; {record.ended_at - before.at:.1f} s after {before.kind}" if before else "")


def leaked(reports: Iterable[Mapping[str, Any]]) -> int:
    """What idle replicas still count."""
    return sum(report["leases"] + report["busy"] + report["engine"]["running"] for report in reports)


def faults(tally: Tally, after: Aftermath) -> list[str]:
    """Why the run is not good; empty where it is."""
    found = [f"{kind}: {tally.kinds[kind]}" for kind in NEVER if tally.kinds[kind]]
    if after.leaked:
        found.append(f"leaked counters: {after.leaked}")
    found += [f"orphan: {orphan}" for orphan in after.orphans]
    found += [f"not replaced: {process}" for process in after.not_replaced]
    found += after.trouble
    if not tally.resumable:
        found.append("no request was there to be finished")
    elif tally.finished < FINISHED * tally.resumable:
        found.append(f"finished {tally.finished} of {tally.resumable} resumable requests, less than {FINISHED:.0%}")
    return found
