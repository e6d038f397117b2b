"""A plan for people: tables with a bar per GPU. Wording and layout only."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from serve_app.planning.changes import Action
from serve_app.planning.figures import ModelFigures, model_figures
from serve_app.planning.nodes import Node, gib, plural, several
from serve_app.planning.packing import Packing
from serve_app.planning.plan import Plan, Problem

_BAR = 16
# Nodes in a row that look the same are shown once where there are so many.
_ALIKE = 3
_COLOURS = {Action.ADD: "green", Action.RESTART: "yellow", Action.REMOVE: "red", Action.NONE: "dim"}


def report(plan: Plan, unknown: Mapping[str, str]) -> RenderableType:
    """Everything that a person wants to know, readable at 80 columns and without colour.

    ``unknown``: why the memory of a model cannot be told, by model.
    """
    parts: list[RenderableType] = [_models(plan)]
    if plan.at_min is not None and plan.at_max is not None:
        if plan.at_min.placed == plan.at_max.placed:
            parts += _nodes(plan, plan.at_min, "On the nodes")
        else:
            parts += _nodes(plan, plan.at_min, "On the nodes, at min replicas")
            parts += _nodes(plan, plan.at_max, "On the nodes, at max replicas")
    if plan.changes is not None:
        parts += [Text("\nA deploy of this file", "bold"), _changes(plan)]
    if plan.problems:
        parts.append(Text("\nWhat does not fit", "bold red"))
        for i, problem in enumerate(plan.problems):
            parts += [*([Text()] if i else ()), *_problem(problem)]
        if plan.cure:
            parts.append(Text(f"\nAll of it fits with {plan.cure}."))
    parts += [Text(f"\nNote: {note}") for note in plan.notes]
    return Group(*parts, Text(f"\n{verdict(plan, unknown)}", "bold" if plan.fits else "bold red"))


def verdict(plan: Plan, unknown: Collection[str]) -> str:
    """One line."""
    if plan.at_min is None:
        gpus = sum(unit.least * sum(n.resources.get("GPU", 0) for n in unit.needs) for unit in plan.units)
        most = sum(unit.most * sum(n.resources.get("GPU", 0) for n in unit.needs) for unit in plan.units)
        count = f"{gpus:g} to {most:g}" if gpus < most else f"{gpus:g}" if gpus else "no"
        return (
            f"Needs {count} {plural(most or 1, 'GPU')}. Name nodes (--nodes) or a cluster (--cluster live) to place it."
        )
    if plan.fits:
        if unknown:
            return f"Fits by numbers of GPUs and CPUs. Cannot tell about the memory of {several(sorted(unknown))}."
        return "Fits."
    if plan.starts:
        return "Fits at min replicas, not at max."
    return "Does not fit."


def _models(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("model", overflow="fold")
    for name in ("replicas", "GPUs\neach", "weights\nper GPU", "KV cache\nper GPU", "KV tokens\nper replica"):
        table.add_column(name, justify="right")
    table.add_column("sequences at once,\nall replicas", justify="right")
    for unit in plan.units:
        figures = model_figures(plan, unit)
        replicas = f"{unit.least}" if unit.least == unit.most else f"{unit.least}–{unit.most}"
        gpus = sum(need.resources.get("GPU", 0) for need in unit.needs)
        table.add_row(Text(unit.name), replicas, f"{gpus:g}" if gpus else "", *_memory(figures))
    return table


def _memory(figures: ModelFigures | None) -> Iterator[str]:
    """Per GPU and replica; sequences of all replicas, at min and at max."""
    if figures is None:
        return
    yield gib(figures.weights)
    yield gib(figures.kv_bytes) if figures.kv_bytes is not None else "–"
    yield f"{figures.kv_tokens:,}" if figures.kv_tokens is not None else "–"
    if figures.at_min is None or figures.at_max is None:
        yield f"– × {figures.context:,}"
        return
    count = (
        f"{figures.at_min:,.0f}" if figures.at_min == figures.at_max else f"{figures.at_min:,.0f}–{figures.at_max:,.0f}"
    )
    yield f"{count} × {figures.context:,}"


class _Row(NamedTuple):
    """``part``: which GPU, or CPUs; ``filled``: 0 to 1."""

    part: str
    filled: float
    amount: str
    holds: tuple[str, ...]


def _nodes(plan: Plan, packing: Packing, title: str) -> list[RenderableType]:
    return [Text(f"\n{title}", "bold"), _bars(plan, packing), Text(_free(plan, packing))]


def _free(plan: Plan, packing: Packing) -> str:
    """What is left, and how it is cut up."""
    whole = [sum(share == 1 for share in left.gpus) for left in packing.left]
    if not any(node.gpus for node in plan.nodes):
        return ""
    total = sum(whole)
    if not total:
        return "No GPU is left wholly free."
    most = max(range(len(whole)), key=lambda i: whole[i])
    count = f"{total} of {sum(node.gpus for node in plan.nodes)} GPUs stay free"
    return (
        f"{count}, {'all' if whole[most] == total else f'at most {whole[most]}'} on one node ({plan.nodes[most].name})."
    )


def _bars(plan: Plan, packing: Packing) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("node", overflow="fold")
    table.add_column("GPU", justify="right")
    table.add_column("in use", width=_BAR)
    table.add_column("", justify="right")
    table.add_column("holds", overflow="fold")
    rows = _rows(plan, packing)
    for _, group in groupby(range(len(plan.nodes)), key=lambda i: (plan.nodes[i].kind, _anonymous(rows[i]))):
        alike = list(group)
        if len(alike) < _ALIKE:
            for i in alike:
                _add(table, plan.nodes[i].name, plan.nodes[i], rows[i])
        else:
            first, last = plan.nodes[alike[0]], plan.nodes[alike[-1]]
            _add(
                table, f"{first.name} … {last.name}", first, _anonymous(rows[alike[0]]), f"{len(alike)} nodes like this"
            )
    return table


def _add(table: Table, name: str, node: Node, rows: Sequence[_Row], more: str = "") -> None:
    lines = [name, node.kind, *([more] if more else [])]
    for i in range(max(len(rows), len(lines))):
        label = Text(lines[i] if i < len(lines) else "", "" if i == 0 else "dim")
        if i < len(rows):
            row = rows[i]
            # Without colour only the filled part of the bar is drawn, so it reads the same.
            bar = ProgressBar(1, min(row.filled, 1), width=_BAR, complete_style="cyan", finished_style="cyan")
            holds = Text(", ".join(row.holds)) if row.holds else Text("free", "dim")
            table.add_row(label, row.part, bar, row.amount, holds)
        else:
            table.add_row(label)


def _anonymous(rows: Sequence[_Row]) -> tuple[_Row, ...]:
    """Without the replicas' numbers."""
    return tuple(row._replace(holds=tuple(each.rpartition("#")[0] or each for each in row.holds)) for row in rows)


def _rows(plan: Plan, packing: Packing) -> list[list[_Row]]:
    """Of each node, a row per GPU and one for its CPUs where something is there that takes no GPU."""
    gpus: list[list[list[tuple[str, float]]]] = [[[] for _ in range(node.gpus)] for node in plan.nodes]
    cpus: list[list[str]] = [[] for _ in plan.nodes]
    for placed in packing.placed:
        label = f"{placed.name}#{placed.replica}"
        takes_gpus = any(spot.gpus for spot in placed.spots)
        for spot in placed.spots:
            for i in spot.gpus:
                gpus[spot.node][i].append((label, spot.share))
            if not spot.gpus and not takes_gpus:
                cpus[spot.node].append(label)
    found = []
    for at, node in enumerate(plan.nodes):
        rows = [_gpu_row(plan, node, i, held) for i, held in enumerate(gpus[at])]
        if cpus[at]:
            rows.append(_cpu_row(node, packing.left[at].node, cpus[at]))
        elif not rows:
            rows.append(_Row("CPU", 0, "", ()))
        found.append(rows)
    return found


def _gpu_row(plan: Plan, node: Node, i: int, held: Sequence[tuple[str, float]]) -> _Row:
    labels = tuple(label if share == 1 else f"{share:g} {label}" for label, share in held)
    filled = 0.0
    for label, share in held:
        found = plan.memory.get(label.rpartition("#")[0])
        if found is None:
            filled += share
            continue
        memory = found.on(node.gpu_bytes)
        if memory.kv_bytes is not None and node.gpu_bytes:
            filled += (memory.weights + memory.working + memory.kv_bytes) / node.gpu_bytes
        else:
            filled += memory.utilization
    if not held:
        return _Row(str(i), 0, "", ())
    amount = f"{gib(filled * node.gpu_bytes).removesuffix(' GiB')}/{gib(node.gpu_bytes)}" if node.gpu_bytes else ""
    return _Row(str(i), filled, amount or f"{filled:.0%}", labels)


def _cpu_row(node: Node, left: Node, held: Sequence[str]) -> _Row:
    total = node.resources.get("CPU", 0.0)
    used = total - left.resources.get("CPU", 0.0)
    if not total or total == float("inf"):
        return _Row("CPU", 0, "", tuple(held))
    return _Row("CPU", used / total, f"{used:g}/{total:g} CPUs", tuple(held))


def _changes(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(overflow="fold")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for change in plan.changes or ():
        lines = Text("\n".join((change.why, *change.keys)))
        table.add_row(Text(change.application), Text(change.action, _COLOURS.get(change.action, "")), lines)
    return table


def _problem(problem: Problem) -> Iterator[Text]:
    head = f"{problem.name}: {problem.found} of {problem.wanted} {plural(problem.wanted, 'replica')} fit"
    yield Text(f"{head}{' at max' if problem.at == 'max' else ''}. It {problem.why}.")
    if problem.changes:
        yield Text("Nearest changes that fit:")
    yield from (Text(f"  • {change}") for change in problem.changes)
