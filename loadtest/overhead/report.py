"""From raw answers to figures of one load, medians over loads, ratios against ``bare``, and tables. No clock."""

import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from loadtest.overhead.client import GAP_S, LATE_S, Answer, Level, Taken
from loadtest.overhead.targets import REST, ROLES

BASELINE = "bare"
SPEED = """medians over {loads} loads of {seconds:g} s; prompts of {prompt} {unit}, streamed answers of {tokens} tokens
TTFT: from a request, or from when it was due, to its first event with tokens, ms; ×: times bare
TPOT: an answer's (last event − first event) / (tokens − 1), ms"""
OPEN = """
load N/s: so many requests per second start, whatever becomes of the others; offered: that were due; late: share of them
that the client started {late:g} ms or more after they were due"""
COST = """CPU: user and system time, ms per 1,000 tokens; sum: without the rest of Ray, which takes as much idle
gap: between two events of a stream, ms; client: CPU of the busiest client process, share of a core"""


@dataclass(frozen=True)
class Sample:
    """One load on one target: ``streams`` at once, or ``rate`` requests per second (see ``client.Level``), measured for
    ``seconds``. ``tokens`` and ``done`` (requests) came within it. ``answers``: of the requests that came within it.
    ``gaps``, ``due``, ``late``: see ``client.Taken``. ``cpu_s``: user and system seconds within it, by role.
    ``client_busy``: of the busiest client process. ``load_average``: the machine's over the minute before."""

    target: str
    round: int
    repeat: int
    streams: int
    seconds: float
    tokens: float
    done: int
    answers: Sequence[Answer]
    gaps: Mapping[int, int]
    errors: Mapping[str, int]
    cpu_s: Mapping[str, float]
    client_busy: float
    load_average: float
    rate: float = 0.0
    due: int = 0
    late: int = 0

    @property
    def level(self) -> Level:
        return Level(self.streams, self.rate)


@dataclass(frozen=True)
class Figures:
    """Of one load, or medians over several. Times in ms; ``offered_s``: requests per second that were due, ``late``:
    share of them; ``cpu``: ms per 1,000 tokens, by role."""

    tok_s: float
    offered_s: float
    late: float
    req_s: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    tpot_p50: float
    tpot_p90: float
    tpot_p99: float
    gap_p50: float
    gap_p90: float
    gap_p99: float
    tokens_per_event: float
    errors: float
    client_busy: float
    cpu: Mapping[str, float]

    @property
    def cpu_sum(self) -> float:
        """Without the rest of Ray."""
        return sum(ms for role, ms in self.cpu.items() if role != REST)


def sample(
    target: str,
    where: tuple[int, int],
    level: Level,
    seconds: float,
    taken: Iterable[Taken],
    cpu_s: Mapping[str, float],
    load_average: float,
) -> Sample:
    """What all client processes of a load saw. ``where``: round and repeat."""
    taken = list(taken)
    gaps: Counter[int] = sum((one.gaps for one in taken), Counter())
    errors: Counter[str] = sum((one.errors for one in taken), Counter())
    return Sample(
        target,
        *where,
        level.streams,
        seconds,
        round(sum(one.tokens for one in taken), 1),
        sum(one.done for one in taken),
        [answer for one in taken for answer in one.answers],
        dict(gaps),
        dict(errors),
        {role: round(value, 3) for role, value in cpu_s.items()},
        round(max(one.busy for one in taken), 3),
        load_average,
        level.rate,
        sum(one.due for one in taken),
        sum(one.late for one in taken),
    )


def figures(of: Sample) -> Figures:
    """Raises ``ValueError`` where nothing was answered: the load was too short, or all failed."""
    if not of.answers or not of.tokens:
        why = f": {next(iter(of.errors))}" if of.errors else " within its time"
        raise ValueError(f"{of.target}, load {of.level}, round {of.round}: nothing was answered{why}")
    ttft = Counter(answer.first for answer in of.answers)
    tpot = Counter((a.last - a.first) / (a.tokens - 1) for a in of.answers if a.tokens > 1)
    return Figures(
        tok_s=of.tokens / of.seconds,
        offered_s=of.due / of.seconds,
        late=of.late / of.due if of.due else 0.0,
        req_s=of.done / of.seconds,
        ttft_p50=percentile(ttft, 0.5),
        ttft_p90=percentile(ttft, 0.9),
        ttft_p99=percentile(ttft, 0.99),
        tpot_p50=percentile(tpot, 0.5),
        tpot_p90=percentile(tpot, 0.9),
        tpot_p99=percentile(tpot, 0.99),
        gap_p50=percentile(of.gaps, 0.5) * 1000 * GAP_S,
        gap_p90=percentile(of.gaps, 0.9) * 1000 * GAP_S,
        gap_p99=percentile(of.gaps, 0.99) * 1000 * GAP_S,
        tokens_per_event=sum(a.tokens for a in of.answers) / sum(a.events for a in of.answers),
        errors=sum(of.errors.values()),
        client_busy=of.client_busy,
        cpu={role: 1e6 * seconds / of.tokens for role, seconds in of.cpu_s.items()},
    )


def percentile(counts: Mapping[Any, int], share: float) -> float:
    """The least of the values, each with how often it came, that ``share`` of them do not exceed; 0 of none."""
    rest = share * sum(counts.values())
    for value in sorted(counts):
        rest -= counts[value]
        if rest <= 1e-9:
            return float(value)
    return 0.0


def medians(of: Sequence[Figures]) -> Figures:
    """Each figure's own. ``errors`` are a sum, ``client_busy`` the highest."""

    def median(figure: Callable[[Figures], float]) -> float:
        return statistics.median(figure(one) for one in of)

    names = [name for name in Figures.__dataclass_fields__ if name not in ("errors", "client_busy", "cpu")]
    roles = [role for role in ROLES if any(role in one.cpu for one in of)]
    return Figures(
        **{name: median(lambda one, name=name: getattr(one, name)) for name in names},  # type: ignore[misc]
        errors=sum(one.errors for one in of),
        client_busy=max(one.client_busy for one in of),
        cpu={role: median(lambda one, role=role: one.cpu.get(role, 0.0)) for role in roles},  # type: ignore[misc]
    )


def by_load(samples: Sequence[Sample]) -> dict[tuple[Level, str], Figures]:
    """(level, target) → medians over rounds and repeats; smallest level first, targets as they came. Loads without an
    answer are left out. ValueError: all are."""
    targets = list(dict.fromkeys(one.target for one in samples))
    found: dict[tuple[Level, str], list[Figures]] = {}
    for one in sorted(samples, key=lambda one: (one.level, targets.index(one.target))):
        with suppress(ValueError):
            found.setdefault((one.level, one.target), []).append(figures(one))
    answered = {key: medians(of) for key, of in found.items() if of}
    if not answered:
        raise ValueError(next(faults(samples)))
    return answered


def speed_rows(samples: Sequence[Sample]) -> Iterator[list[str]]:
    """The cells of the first table; with ``offered`` and ``late`` where a level has a rate."""
    with_rates = any(one.rate for one in samples)
    for level, target, mine, base in _beside_bare(samples):
        row = [
            str(level),
            target,
            f"{mine.tok_s:,.0f}",
            times(mine, base, "tok_s"),
            f"{mine.req_s:.1f}",
        ]
        if with_rates:
            row += [f"{mine.offered_s:.1f}", f"{mine.late:.0%}"] if level.rate else ["", ""]
        yield [
            *row,
            f"{mine.ttft_p50:.1f}",
            times(mine, base, "ttft_p50"),
            f"{mine.ttft_p90:.1f}",
            f"{mine.ttft_p99:.1f}",
            times(mine, base, "ttft_p99"),
            f"{mine.tpot_p50:.2f}",
            times(mine, base, "tpot_p50"),
            f"{mine.tpot_p90:.2f}",
            f"{mine.tpot_p99:.2f}",
        ]


def cost_rows(samples: Sequence[Sample]) -> Iterator[list[str]]:
    """The cells of the second table."""
    for level, target, mine, base in _beside_bare(samples):
        yield [
            str(level),
            target,
            f"{mine.tokens_per_event:.2f}",
            f"{mine.gap_p50:.1f}",
            f"{mine.gap_p90:.1f}",
            f"{mine.gap_p99:.1f}",
            *(cpu(mine, role) for role in ROLES if role != REST),
            f"{mine.cpu_sum:,.0f}",
            times(mine, base, "cpu_sum"),
            cpu(mine, REST),
            f"{mine.errors:.0f}",
            f"{mine.client_busy:.2f}",
        ]


def _beside_bare(samples: Sequence[Sample]) -> Iterator[tuple[Level, str, Figures, Figures | None]]:
    """Level, target, its figures, and those of ``bare`` under the same load: None for itself, or where it is not
    there."""
    found = by_load(samples)
    for (level, target), mine in found.items():
        yield level, target, mine, found.get((level, BASELINE)) if target != BASELINE else None


def cpu(mine: Figures, role: str) -> str:
    return f"{mine.cpu[role]:,.0f}" if role in mine.cpu else ""


def times(mine: Figures, base: Figures | None, figure: str) -> str:
    """The ratio; empty without a base, or where that is 0."""
    return f"{getattr(mine, figure) / of:.2f}" if base and (of := getattr(base, figure)) else ""


def tables(samples: Sequence[Sample], about: Mapping[str, Any]) -> Iterator[Table]:
    """Raises ``ValueError`` as ``by_load`` does."""
    loads = max(Counter((one.level, one.target) for one in samples).values())
    asked = about["load"]
    unit = "words" if asked.get("words") else "tokens"
    caption = SPEED.format(
        loads=loads, seconds=samples[0].seconds, prompt=asked["prompt_tokens"], unit=unit, tokens=asked["tokens"]
    )
    names = ["load", "target", "tok/s", "×", "req/s"]
    if any(one.rate for one in samples):
        caption += OPEN.format(late=1000 * LATE_S)
        names += ["offered req/s", "late"]
    names += ["TTFT p50", "×", "TTFT p90", "TTFT p99", "×", "TPOT p50", "×", "TPOT p90", "TPOT p99"]
    yield _table(about["model"], caption, names, speed_rows(samples))
    names = ["load", "target", "tokens /event", "gap p50", "gap p90", "gap p99"]
    names += [*(f"CPU {r}" for r in ROLES if r != REST), "CPU sum", "×", f"CPU {REST}", "errors", "client"]
    yield _table("what it costs", COST, names, cost_rows(samples))


def _table(title: str, caption: str, names: Sequence[str], rows: Iterable[list[str]]) -> Table:
    shown = Table(title=title, caption=caption, box=box.SIMPLE, pad_edge=False)
    for number, name in enumerate(names):
        shown.add_column(
            name.replace(" ", "\n"), justify="left" if number == 1 else "right", vertical="bottom", no_wrap=True
        )
    listed = list(rows)
    for row, after in zip(listed, [*listed[1:], None], strict=True):
        shown.add_row(*row, end_section=after is None or after[0] != row[0])
    return shown


def faults(samples: Sequence[Sample]) -> Iterator[str]:
    """Each load without an answer; and what else went wrong, once for each target."""
    for one in samples:
        try:
            figures(one)
        except ValueError as error:
            yield str(error)
    for target in dict.fromkeys(one.target for one in samples):
        errors: Counter[str] = sum((Counter(one.errors) for one in samples if one.target == target), Counter())
        if errors:
            message, count = errors.most_common(1)[0]
            yield f"{target}: {errors.total()} requests failed, {count} of them so: {message}"


def line(record: Mapping[str, Any] | Sample) -> str:
    """One of a file of raw values: the first is about the run, each further one a sample."""
    fields = asdict(record) if isinstance(record, Sample) else record
    return json.dumps(fields, separators=(",", ":")) + "\n"


def read(file: Path) -> tuple[dict[str, Any], list[Sample]]:
    """What was written by ``line``. ValueError: nothing was measured."""
    about, *lines = (json.loads(each) for each in file.read_text().splitlines())
    if not lines:
        raise ValueError(f"{file}: the run ended before anything was measured")
    samples = []
    for each in lines:
        answers = [Answer(*values) for values in each["answers"]]
        gaps = {int(gap): count for gap, count in each["gaps"].items()}
        samples.append(Sample(**{**each, "answers": answers, "gaps": gaps}))
    return about, samples
