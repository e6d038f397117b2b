"""From raw answers to a table: each key's figures, as ratios within a round, and medians over rounds. No clock."""

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from loadtest.fairness.load import Answer
from loadtest.figures import percentile

Order = Literal["alone", "arrival", "fair"]
ORDERS: tuple[Order, ...] = ("alone", "arrival", "fair")
COLUMNS = ("key", "order", "answered", "refused", "tokens", "tokens/s", "wait p50", "wait p99", "p50", "p99")
CAPTION = """medians over {rounds} rounds; all but the counts are ratios within a round
answered, refused: requests and 429s in {seconds:g} s; tokens: the key's share of all
× alone: against the same key on an idle system; × arrival: against one queue in order of arrival
wait: from a request's first try to its first token, pauses after refusals included"""


@dataclass(frozen=True)
class Round:
    """``order``: "fair": each user with a key of its own; "arrival": all with the same key, so the gateway serves them
    in order of arrival; "alone": one user after the other on an idle system. ``seconds``: how long each load ran.
    ``load_average``: the machine's over the minute before. ``answers``: by user."""

    scenario: str
    number: int
    order: Order
    seconds: float
    load_average: float
    answers: Mapping[str, Sequence[Answer]]


@dataclass(frozen=True)
class Figures:
    """One user's in one round. ``answered``, ``tokens_s``: what was done within the load's time. ``refused``: 429s, and
    waits in ms: of all requests that came within it. ``share``: of all users' tokens."""

    answered: int
    refused: int
    tokens_s: float
    share: float
    wait_p50: float
    wait_p99: float


def figures(of: Round, user: str) -> Figures:
    """Raises ``ValueError`` where none of its requests came within the load's time."""
    done = {name: [a for a in answers if 0 <= a.done < 1000 * of.seconds] for name, answers in of.answers.items()}
    tokens = {name: sum(answer.tokens for answer in answers) for name, answers in done.items()}
    came = [answer for answer in of.answers[user] if answer.came >= 0]
    if not came:
        raise ValueError(f"{of.scenario}, {of.order}, round {of.number}: nothing of {user}")
    waits = sorted(answer.wait for answer in came)
    return Figures(
        len(done[user]),
        sum(answer.refused for answer in came),
        tokens[user] / of.seconds,
        tokens[user] / max(1, sum(tokens.values())),
        statistics.median(waits),
        percentile(waits, 0.99),
    )


def rows(rounds: Sequence[Round], scenario: str) -> list[list[str]]:
    """The cells of ``table``."""
    found: dict[tuple[int, Order], Round] = {(r.number, r.order): r for r in rounds if r.scenario == scenario}
    numbers = sorted({number for number, _ in found})
    users = found[numbers[0], "fair"].answers

    def told(user: str, order: Order) -> Iterator[str]:
        mine, alone, arrival = ([figures(found[n, o], user) for n in numbers] for o in (order, "alone", "arrival"))

        def over(figure: Callable[[Figures], float], others: Sequence[Figures]) -> str:
            return times(statistics.median(figure(a) / figure(b) for a, b in zip(mine, others, strict=True)))

        yield f"{statistics.median(one.answered for one in mine):.0f}"
        yield f"{statistics.median(one.refused for one in mine):.0f}"
        yield f"{100 * statistics.median(one.share for one in mine):.0f} %"
        yield over(lambda one: one.tokens_s, alone)
        for others in (alone, arrival):
            same = order == "arrival" and others is arrival
            yield "1" if same else over(lambda one: one.wait_p50, others)
            yield "1" if same else over(lambda one: one.wait_p99, others)

    names: dict[Order, str] = {"arrival": "of arrival", "fair": "fair"}
    return [[user, name, *told(user, order)] for user in users for order, name in names.items()]


def times(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}" if ratio >= 1 else f"{ratio:.2f}"


def table(rounds: Sequence[Round], scenario: str, title: str) -> Table:
    of_it = [one for one in rounds if one.scenario == scenario]
    seconds = next(one.seconds for one in of_it if one.order == "fair")
    shown = Table(title=title, caption=CAPTION.format(rounds=len({one.number for one in of_it}), seconds=seconds))
    for number, name in enumerate(COLUMNS):
        against = "" if number < 5 else "\n× alone" if number < 8 else "\n× arrival"
        shown.add_column(name + against, justify="left" if number < 2 else "right", no_wrap=True)
    for number, row in enumerate(rows(rounds, scenario)):
        shown.add_row(*row, end_section=number % 2 == 1)
    return shown


def write(file: Path, about: Mapping[str, Any], rounds: Sequence[Round]) -> None:
    """JSON lines: about the run, then round by round."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [about, *(asdict(one) for one in rounds)]
    file.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def read(file: Path) -> tuple[dict[str, Any], list[Round]]:
    """What ``write`` wrote."""
    about, *lines = (json.loads(line) for line in file.read_text().splitlines())
    rounds = []
    for line in lines:
        answers = {user: [Answer(*values) for values in found] for user, found in line["answers"].items()}
        rounds.append(Round(**{**line, "answers": answers}))
    return about, rounds
