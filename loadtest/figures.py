"""The arithmetic of ``relay_cost``: from raw rounds to medians, a ratio and a verdict. No clock, no processes."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

GOAL_RATIO = 0.20
REST = "rest of the cluster"


@dataclass(frozen=True)
class System:
    """One of the two systems under comparison.

    ``way``: what a chunk passes. ``counted``: roles whose CPU time is "proxy and gateway".
    ``roles``: role by a process's title.
    """

    key: str
    title: str
    way: str
    counted: tuple[str, ...]
    roles: Mapping[str, str]

    def role_of(self, title: str) -> str:
        # While a method runs, Ray shows its name too: ray::ProxyActor.listen_for_change
        head = title.partition(".")[0].strip()
        return self.roles.get(head, REST)


MODELYARD = System(
    key="modelyard",
    title="Modelyard",
    way="HAProxy, gateway, the replica's HTTP port",
    # Everything of Serve's that has to do with proxying is counted, idle or not.
    counted=("HAProxy", "HAProxy's manager", "Serve's fallback proxy", "gateway replica"),
    roles={
        "haproxy": "HAProxy",
        "ray::HAProxyManager": "HAProxy's manager",
        "ray::ProxyActor": "Serve's fallback proxy",
        "ray::ServeReplica:gateway:Gateway": "gateway replica",
        "ray::ServeReplica:fake:Model": "engine replica",
        "ray::ServeReplica:fake:Card": "card replica",
    },
)
HANDLE = System(
    key="handle",
    title="plain Serve",
    way="Serve's Python proxy, FastAPI ingress, DeploymentHandle",
    counted=("Serve's proxy", "ingress replica"),
    roles={
        "ray::ProxyActor": "Serve's proxy",
        "ray::ServeReplica:handle:Ingress": "ingress replica",
        "ray::ServeReplica:handle:Inner": "engine replica",
    },
)


@dataclass(frozen=True)
class Round:
    """Raw values of one round on one system.

    ``cpu_s``: user and system seconds by role, while ``chunks`` were streamed in ``seconds``. ``ttft_s``: each stream's
    time to its first chunk under that load. ``ttft_alone_s``: the same with one stream at a time. ``load_average``: the
    machine's, over the minute before.
    """

    system: str
    chunks: int
    seconds: float
    cpu_s: Mapping[str, float]
    ttft_s: Sequence[float]
    ttft_alone_s: Sequence[float]
    load_average: float

    def cpu_ms_per_1000(self, roles: Iterable[str]) -> float:
        """Milliseconds of CPU per 1,000 chunks."""
        return 1e6 * sum(self.cpu_s.get(role, 0.0) for role in roles) / self.chunks

    @property
    def chunks_per_s(self) -> float:
        return self.chunks / self.seconds


@dataclass(frozen=True)
class Spread:
    """Over the rounds."""

    median: float
    lowest: float
    highest: float

    def __str__(self) -> str:
        digits = 0 if self.median >= 1000 else 1 if self.median >= 10 else 2
        return f"{self.median:,.{digits}f} ({self.lowest:,.{digits}f}–{self.highest:,.{digits}f})"


def spread(values: Iterable[float]) -> Spread:
    found = list(values)
    return Spread(statistics.median(found), min(found), max(found))


def percentile(ordered: Sequence[float], share: float) -> float:
    """The least of the values, lowest first, that ``share`` of them do not exceed."""
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def of_system(rounds: Iterable[Round], system: System, figure: Callable[[Round], float]) -> Spread:
    return spread(figure(r) for r in rounds if r.system == system.key)


def cost(rounds: Iterable[Round], system: System) -> Spread:
    """Milliseconds of CPU of proxy and gateway per 1,000 chunks."""
    return of_system(rounds, system, lambda r: r.cpu_ms_per_1000(system.counted))


def ratio(rounds: Sequence[Round]) -> float:
    """Modelyard's median cost as a share of the other's."""
    return cost(rounds, MODELYARD).median / cost(rounds, HANDLE).median


def used(before: Mapping[int, float], after: Mapping[int, float], roles: Mapping[int, str]) -> dict[str, float]:
    """CPU seconds by role between two looks at processes (id → CPU seconds since its start).

    A process that ended in between takes its count along: ``KeyError``, with its role. Only of ``REST`` it is let pass.
    """
    total: dict[str, float] = {}
    for pid, role in roles.items():
        if pid not in after:
            if role == REST:
                continue
            raise KeyError(role)
        total[role] = total.get(role, 0.0) + after[pid] - before[pid]
    return total


def table(rounds: Sequence[Round], what: str) -> Table:
    """``what``: the load, in words."""
    one, two = MODELYARD, HANDLE
    ways = "\n".join(f"{system.title}: {system.way}" for system in (one, two))
    shown = Table(title=what, caption=f"medians over rounds (lowest–highest)\n{ways}")
    shown.add_column("CPU in ms per 1,000 chunks", no_wrap=True)
    for name in (one.title, two.title, "ratio", "goal"):
        shown.add_column(name, justify="right", no_wrap=True)

    def row(name: str, figure: Callable[[Round], float], goal: str = "") -> None:
        a, b = of_system(rounds, one, figure), of_system(rounds, two, figure)
        shown.add_row(name, str(a), str(b), f"{a.median / b.median:.3f}" if b.median else "", goal)

    a, b, share = cost(rounds, one), cost(rounds, two), ratio(rounds)
    verdict = "[green]met[/]" if met(rounds) else "[red]not met[/]"
    shown.add_row(
        "[bold]proxy and gateway[/]", str(a), str(b), f"[bold]{share:.3f}[/]", f"≤ {GOAL_RATIO:.2f} {verdict}"
    )
    for system in (one, two):
        for role in system.counted:
            part = str(of_system(rounds, system, lambda r, role=role: r.cpu_ms_per_1000((role,))))  # type: ignore[misc]
            shown.add_row(f"  {role}", *((part, "") if system is one else ("", part)))
    row("(not counted) engine replica", lambda r: r.cpu_ms_per_1000(("engine replica",)))
    row(f"(not counted) {REST}", lambda r: r.cpu_ms_per_1000((REST, "card replica")))
    row("chunks/s", lambda r: r.chunks_per_s)
    row("TTFT p50 ms, c=1", lambda r: 1e3 * statistics.median(r.ttft_alone_s))
    row("TTFT p50 ms, under the load", lambda r: 1e3 * statistics.median(r.ttft_s))
    return shown


def met(rounds: Sequence[Round]) -> bool:
    return ratio(rounds) <= GOAL_RATIO
