"""From answers to figures: of each traffic, over time, by kind of error, and whether the target was met. No clock."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from loadtest.figures import percentile
from loadtest.load.record import Answer, Run
from loadtest.load.scenario import Target

# A bin of time has one of these widths, s: the first that makes no more than so many bins.
WIDTHS, MOST_BINS = (1, 2, 5, 10, 30, 60, 120, 300), 60


@dataclass(frozen=True)
class Judged:
    """Some requests. Times in ms, None where no answer had any."""

    requests: int
    failed: int
    good: int
    ttft_p50: float | None
    ttft_p90: float | None
    ttft_p99: float | None
    itl_p50: float | None
    itl_p99: float | None


@dataclass(frozen=True)
class Figures(Judged):
    """``tokens_s``: of all answers together, in the time from the first request's coming to the last token.
    ``late_p99``: how much later than due the client sent them."""

    gap_p99: float | None
    total_p50: float | None
    total_p99: float | None
    prompt_mean: float
    output_mean: float
    tokens_s: float
    late_p99: float


@dataclass(frozen=True)
class Check:
    """One part of the target: what was promised and what was found. ``found``: None where nothing was answered."""

    what: str
    promised: float
    found: float | None
    met: bool


@dataclass(frozen=True)
class Bin(Judged):
    """Of the requests that came in ``width`` s from ``at`` on, unless told otherwise. ``tokens_s``: those that
    came within it. ``waiting``, ``streaming``: requests without and with their first token, mean over it."""

    at: float
    width: float
    tokens_s: float
    waiting: float
    streaming: float
    errors: dict[str, int]


@dataclass(frozen=True)
class Queue:
    """Requests that waited ``at`` s from the test's begin: ``held`` at gateways, ``waiting`` in engines."""

    at: float
    held: int
    waiting: int


def figures(answers: Sequence[Answer], target: Target) -> Figures:
    whole = [each for each in answers if not each.error]
    ttft, itl = firsts(answers), itls(answers)
    total = sorted(each.last for each in whole)
    tokens = sum(each.tokens for each in whole)
    return Figures(
        requests=len(answers),
        failed=len(answers) - len(whole),
        good=sum(not each.miss(target) for each in answers),
        ttft_p50=_at(ttft, 0.5),
        ttft_p90=_at(ttft, 0.9),
        ttft_p99=_at(ttft, 0.99),
        itl_p50=_at(itl, 0.5),
        itl_p99=_at(itl, 0.99),
        gap_p99=_at(sorted(each.gap for each in whole), 0.99),
        total_p50=_at(total, 0.5),
        total_p99=_at(total, 0.99),
        prompt_mean=sum(each.prompt for each in whole) / max(1, len(whole)),
        output_mean=tokens / max(1, len(whole)),
        tokens_s=tokens / _span_s(whole) if whole else 0.0,
        late_p99=_at(sorted(each.late for each in answers), 0.99) or 0.0,
    )


def firsts(answers: Iterable[Answer]) -> list[float]:
    """Times to the first token, ms, lowest first; of requests that failed later, too."""
    return sorted(each.first for each in answers if each.first is not None)


def itls(answers: Iterable[Answer]) -> list[float]:
    """Mean times between tokens of whole answers, ms, lowest first."""
    return sorted(each.itl for each in answers if each.itl is not None and not each.error)


def _at(ordered: Sequence[float], share: float) -> float | None:
    return percentile(ordered, share) if ordered else None


def _span_s(whole: Sequence[Answer]) -> float:
    return max(1e-3, max(each.ended for each in whole) - min(each.came for each in whole))


def judged(run: Run) -> list[Answer]:
    names = {traffic.name for traffic in run.scenario.traffic if traffic.judged}
    return [each for each in run.answers if each.traffic in names]


def checks(run: Run) -> list[Check]:
    """Of the traffic that is judged."""
    target, answers = run.scenario.target, judged(run)
    found = figures(answers, target)
    made = [
        _least("good answers", target.goodput, found.good / found.requests if answers else None),
        _most("failed", target.errors, found.failed / found.requests if answers else None),
    ]
    if target.ttft_p99_ms is not None:
        made.append(_most("TTFT p99, ms", target.ttft_p99_ms, found.ttft_p99))
    if target.itl_p99_ms is not None:
        made.append(_most("ITL p99, ms", target.itl_p99_ms, found.itl_p99))
    return made


def _least(what: str, promised: float, found: float | None) -> Check:
    return Check(what, promised, found, found is not None and found >= promised)


def _most(what: str, promised: float, found: float | None) -> Check:
    return Check(what, promised, found, found is not None and found <= promised)


def met(run: Run) -> bool:
    return all(check.met for check in checks(run))


def answered(run: Run) -> bool:
    """Whether any answer came at all."""
    return any(not each.error for each in run.answers)


def misses(run: Run) -> dict[str, int]:
    """Why judged answers were not good, the most frequent first."""
    return dict(Counter(why for each in judged(run) if (why := each.miss(run.scenario.target))).most_common())


def errors(answers: Iterable[Answer]) -> dict[str, int]:
    """By kind, the most frequent first."""
    return dict(Counter(each.error for each in answers if each.error).most_common())


def bins(run: Run, traffic: str | None = None) -> list[Bin]:
    """The test over time, until its last token; of one kind of traffic or of all."""
    end = max([run.seconds, *(each.ended for each in run.answers)])
    width = next((wide for wide in WIDTHS if end / wide <= MOST_BINS), math.ceil(end / MOST_BINS))
    answers = [each for each in run.answers if traffic in (None, each.traffic)]
    came: dict[int, list[Answer]] = {}
    for each in answers:
        came.setdefault(int(each.came // width), []).append(each)
    of = range(math.ceil(end / width))
    return [_bin(answers, came.get(number, []), run.scenario.target, number * width, width) for number in of]


def _bin(answers: Sequence[Answer], came: Sequence[Answer], target: Target, at: float, width: float) -> Bin:
    of = figures(came, target)
    until = at + width

    def over(begin: Callable[[Answer], float], end: Callable[[Answer], float]) -> float:
        """How many were between ``begin`` and ``end`` of theirs, in ms after they came; mean over the bin."""
        return (
            sum(_overlap(at, until, each.came + begin(each) / 1000, each.came + end(each) / 1000) for each in answers)
            / width
        )

    return Bin(
        **{field.name: getattr(of, field.name) for field in fields(Judged)},
        at=at,
        width=width,
        tokens_s=tokens_within(answers, at, until) / width,
        waiting=over(lambda each: 0.0, lambda each: each.last if each.first is None else each.first),
        streaming=over(lambda each: each.last if each.first is None else each.first, lambda each: each.last),
        errors=errors(came),
    )


def tokens_within(answers: Iterable[Answer], at: float, until: float) -> float:
    """Each answer's tokens are taken to be spread evenly between its first and its last."""
    tokens = 0.0
    for each in answers:
        if each.first is None:
            continue
        begin, end = each.came + each.first / 1000, each.ended
        if end <= begin:
            tokens += each.tokens * (at <= begin < until)
        else:
            tokens += each.tokens * _overlap(at, until, begin, end) / (end - begin)
    return tokens


def _overlap(at: float, until: float, begin: float, end: float) -> float:
    return max(0.0, min(until, end) - max(at, begin))


def queues(run: Run) -> list[Queue]:
    """Of all models together, each time that the endpoint was asked."""
    found: dict[float, Queue] = {}
    for sample in run.samples:
        before = found.get(sample.at, Queue(sample.at, 0, 0))
        found[sample.at] = Queue(sample.at, before.held + sample.held, before.waiting + (sample.waiting or 0))
    return list(found.values())


def document(run: Run) -> dict[str, Any]:
    """All figures, as JSON has them."""
    target = run.scenario.target
    by_traffic = {
        traffic.name: asdict(figures([each for each in run.answers if each.traffic == traffic.name], target))
        for traffic in run.scenario.traffic
    }
    return {
        "met": met(run),
        "checks": [asdict(check) for check in checks(run)],
        "misses": misses(run),
        "errors": errors(run.answers),
        "traffic": by_traffic,
        "over_time": {name or "all": [asdict(each) for each in bins(run, name)] for name in (None, *by_traffic)},
    }
