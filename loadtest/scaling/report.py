"""What was found, as a table: Modelyard beside Serve's policy as it comes and at its best, and fixed fleets."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from loadtest.scaling.outcome import Outcome
from loadtest.scaling.scenarios import scenarios
from loadtest.scaling.study import SERVE_DEFAULT, Choice, Fixed, Found, Modelyards
from loadtest.scaling.systems import ServeSettings

# Fewer GPU-hours by less than this are equal.
EQUAL = 1.005


@dataclass(frozen=True)
class Row:
    """One system over all seeds: shares in percent, GPU-hours and flaps per replay."""

    choice: Choice
    misses: float
    settled_misses: float
    slow: float
    gpu_hours: float
    flaps: float


@dataclass(frozen=True)
class Verdict:
    """Of one scenario. ``equal``: Serve's settings with the fewest misses of those that took no more GPU-hours than
    Modelyard; None where all took more. ``best``: those with the fewest misses of all."""

    scenario: str
    rows: dict[Choice, Row]
    equal: Row | None
    best: Row

    @property
    def modelyard(self) -> Row:
        return self.rows[Modelyards()]

    @property
    def default(self) -> Row:
        return self.rows[SERVE_DEFAULT]

    @property
    def met(self) -> bool:
        """At most half of the misses of Serve's default policy as it comes, at no more GPU-hours."""
        ours, serve = self.modelyard, self.default
        return ours.misses <= serve.misses / 2 and ours.gpu_hours <= serve.gpu_hours * EQUAL

    @property
    def met_tuned(self) -> bool:
        """The same against every setting of it: none that takes no more GPU-hours has fewer than twice the misses."""
        return self.equal is None or self.modelyard.misses <= self.equal.misses / 2


def verdicts(found: Sequence[Found]) -> list[Verdict]:
    by: dict[str, dict[Choice, list[Outcome]]] = {}
    for one in found:
        by.setdefault(one.job.scenario, {}).setdefault(one.job.choice, []).append(one.outcome)
    order = [name for name in scenarios() if name in by]
    return [_verdict(name, {choice: _row(choice, seen) for choice, seen in by[name].items()}) for name in order]


def _verdict(scenario: str, rows: dict[Choice, Row]) -> Verdict:
    ours = rows[Modelyards()]
    serve = [row for choice, row in rows.items() if isinstance(choice, ServeSettings)]
    equal = [row for row in serve if row.gpu_hours <= ours.gpu_hours * EQUAL]
    return Verdict(scenario, rows, min(equal, key=_worse, default=None), min(serve, key=_worse))


def _worse(row: Row) -> tuple[float, float]:
    return (row.misses, row.gpu_hours)


def _row(choice: Choice, seen: Sequence[Outcome]) -> Row:
    requests, settled = sum(o.requests for o in seen), sum(o.settled for o in seen)
    return Row(
        choice,
        misses=100 * sum(o.misses for o in seen) / requests,
        settled_misses=100 * sum(o.settled_misses for o in seen) / max(1, settled),
        slow=100 * sum(o.slow for o in seen) / requests,
        gpu_hours=sum(o.gpu_hours for o in seen) / len(seen),
        flaps=sum(o.flaps for o in seen) / len(seen),
    )


def table(verdict: Verdict, start_s: float) -> Table:
    what = scenarios()[verdict.scenario].what
    shown = Table(title=f"{verdict.scenario}: {what}; a start takes {start_s:g} s", title_justify="left")
    shown.add_column("system", no_wrap=True)
    for name in ("misses", "after 10 min", "slow", "GPU-hours", "flaps"):
        shown.add_column(name, justify="right", no_wrap=True)

    def add(name: str, row: Row | None, style: str = "") -> None:
        if row is None:
            shown.add_row(name, "none", "", "", "", "")
            return
        shares = (f"{share:.2f} %" for share in (row.misses, row.settled_misses, row.slow))
        shown.add_row(name, *shares, f"{row.gpu_hours:.2f}", f"{row.flaps:.1f}", style=style)

    add("fixed, smallest", verdict.rows[Fixed(False)])
    add("fixed, largest", verdict.rows[Fixed(True)])
    add("Serve's policy, defaults", verdict.default)
    best, equal = verdict.best, verdict.equal
    add(f"Serve's policy, fewest misses: {told(best.choice)}", best)
    add(f"… at Modelyard's GPU-hours: {told(equal.choice) if equal else 'all settings take more'}", equal)
    add("Modelyard, defaults", verdict.modelyard, "bold")
    shown.caption = (
        f"half the misses at no more GPU-hours: {_said(verdict.met)} against the defaults, "
        f"{_said(verdict.met_tuned)} against every setting"
    )
    return shown


def told(choice: Choice) -> str:
    """Settings of Serve's policy, in short."""
    if not isinstance(choice, ServeSettings):
        return ""
    return f"target {choice.target:g}, up {choice.up_s:g} s, down {choice.down_s:g} s"


def _said(met: bool) -> str:
    return "[green]met[/]" if met else "[red]not met[/]"
