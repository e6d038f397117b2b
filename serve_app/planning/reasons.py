"""Why a replica finds no place, in words: what it needs and what there is. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from serve_app.planning.nodes import ACCELERATOR, Need, Node, gib, matches, plural, several
from serve_app.planning.packing import Want, pack

_LESS_THAN_RAY_COUNTS = 1e-5
_NODES_NAMED = 4


def never(want: Want, nodes: Sequence[Node]) -> str | None:
    """Why not even one replica fits on ``nodes`` while nothing else is on them; None: one does."""
    if not pack([replace(want, count=1, standing=())], nodes).missing:
        return None
    return _why(want, nodes, "")


def crowded(want: Want, free: Sequence[Node]) -> str:
    """Why no further replica fits into what is ``free`` on the nodes."""
    return _why(want, free, " free")


def waiting(want: Want, nodes: Sequence[Node], free: Sequence[Node]) -> str | None:
    """Why ``want`` finds no place in a running cluster, and what is free on its nodes; None: one replica would fit, so
    it is about to be placed. ``nodes``: with their totals."""
    if not pack([replace(want, count=1, standing=())], free).missing:
        return None
    why = never(want, nodes) or crowded(want, free)
    name = "GPU" if want.gpus else "CPU"
    both = [(left.resources.get(name, 0.0), node) for node, left in zip(nodes, free, strict=True)]
    both = sorted((pair for pair in both if pair[1].resources.get(name)), key=lambda pair: -pair[0])
    there = [f"{node.name} {left:g} of {node.resources[name]:g} {name}s" for left, node in both[:_NODES_NAMED]]
    if more := len(both) - len(there):
        there.append(f"{more} more {plural(more, 'node')} no more than that")
    count = f"{want.count} {plural(want.count, 'replica')}"
    return f"no room for {count}: {why}" + (f" (free: {', '.join(there)})" if there else "")


class _Condition(NamedTuple):
    """``words``: what is needed. ``there``: what those nodes have of it that met everything before, in words."""

    words: str
    met: Callable[[Node], bool]
    there: Callable[[Sequence[Node]], str]


def _why(want: Want, nodes: Sequence[Node], free: str) -> str:
    """``free``: the word to put behind what the nodes have, or nothing."""
    for need in sorted(want.needs, key=lambda need: -need.resources.get("GPU", 0.0)):
        left, words = list(nodes), []
        for condition in _conditions(want, need, free):
            words.append(condition.words)
            met = [node for node in left if condition.met(node)]
            if not met:
                whose = "such nodes have" if len(left) < len(nodes) else "the cluster has"
                return f"needs {several(words)}; {whose} {condition.there(left)}"
            left = met
    suiting = [node for node in nodes if all(matches(need.labels, node.labels) for need in want.needs)]
    there = f"{_number(sum(node.gpus for node in suiting))}{free}"
    return f"needs {_number(want.gpus)}, on one node or several; such nodes have {there}"


def _conditions(want: Want, need: Need, free: str) -> list[_Condition]:
    """In the order in which a person would ask."""
    amounts = {name: amount for name, amount in need.resources.items() if amount}
    kinds = [name for name in amounts if name.startswith(ACCELERATOR)]
    conditions = [_accelerator(name) for name in kinds]
    conditions += [_label(key, value) for key, value in need.labels.items()]
    if gpus := amounts.get("GPU"):
        conditions.append(_gpus(gpus, free))
        if want.gpu_bytes:
            conditions.append(_gpu_memory(want))
    conditions += [_amount(name, amount, free) for name, amount in amounts.items() if name not in ("GPU", *kinds)]
    if want.ram_bytes:
        conditions.append(_memory(want, free))
    return conditions


def _accelerator(name: str) -> _Condition:
    def there(nodes: Sequence[Node]) -> str:
        return several(sorted({each for node in nodes for each in node.accelerators}) or ["none"])

    kind = name.removeprefix(ACCELERATOR)
    return _Condition(f"accelerator type {kind}", lambda node: node.resources.get(name, 0) > 0, there)


def _label(key: str, value: str) -> _Condition:
    def there(nodes: Sequence[Node]) -> str:
        found = sorted({node.labels[key] for node in nodes if key in node.labels})
        return f"{key}: {several(found)}" if found else f"no label {key}"

    return _Condition(f"label {key}: {value}", lambda node: matches({key: value}, node.labels), there)


def _gpus(amount: float, free: str) -> _Condition:
    def there(nodes: Sequence[Node]) -> str:
        if amount < 1 and (part := max((node.resources.get("GPU", 0.0) for node in nodes), default=0.0)):
            return f"at most {part:g} of one{free}"
        total = sum(node.gpus for node in nodes)
        most = max((node.gpus for node in nodes), default=0)
        return f"{_number(total)}{free}" + (f", but at most {most} on one node" if total >= amount else "")

    words = f"{amount:g} of a GPU" if amount < 1 else _number(amount)
    return _Condition(
        words if amount <= 1 else f"{words} of one node",
        lambda node: node.resources.get("GPU", 0) >= amount - _LESS_THAN_RAY_COUNTS,
        there,
    )


def _number(gpus: float) -> str:
    return f"{gpus:g} {plural(gpus, 'GPU')}" if gpus else "no GPU"


def _gpu_memory(want: Want) -> _Condition:
    def there(nodes: Sequence[Node]) -> str:
        return f"at most {gib(max((node.gpu_bytes or 0 for node in nodes), default=0))} on each"

    return _Condition(
        f"{gib(want.gpu_bytes)} on each" + (f" ({want.of_what})" if want.of_what else ""),
        lambda node: node.gpu_bytes is None or node.gpu_bytes >= want.gpu_bytes,
        there,
    )


def _amount(name: str, amount: float, free: str) -> _Condition:
    def there(nodes: Sequence[Node]) -> str:
        most = max((node.resources.get(name, 0.0) for node in nodes), default=0.0)
        return f"at most {most:g}{free} on one node" if most else f"none{free}"

    def met(node: Node) -> bool:
        return node.resources.get(name, 0) >= amount - _LESS_THAN_RAY_COUNTS

    return _Condition(f"{amount:g} {plural(amount, 'CPU') if name == 'CPU' else name}", met, there)


def _memory(want: Want, free: str) -> _Condition:
    def there(nodes: Sequence[Node]) -> str:
        return f"at most {gib(max((node.ram_bytes or 0 for node in nodes), default=0))}{free} on one node"

    return _Condition(
        f"{gib(want.ram_bytes)} of memory",
        lambda node: node.ram_bytes is None or node.ram_bytes >= want.ram_bytes,
        there,
    )
