"""The nearest change that would make a model fit: candidates, each planned again before it is named. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from serve_app.config import ModelArgs
from serve_app.model.placement import placement
from serve_app.planning.fleet import Unit
from serve_app.planning.memory import PlanError
from serve_app.planning.nodes import NODE_ID, Node, plural
from serve_app.planning.packing import Want, pack
from serve_app.planning.reasons import never
from serve_app.planning.sizing import ModelMemory, Sizer, want

# How many changes are named for one model.
NAMED = 3
# More nodes than this are not "the nearest change".
_MORE_NODES = 16
_FEWEST_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Case:
    """What is planned: the units, what is known of their memory, the nodes, and on them the replicas that run already
    and stay where they are: of each unit, for each replica the nodes of its needs, by number."""

    units: tuple[Unit, ...]
    memory: Mapping[str, ModelMemory]
    nodes: tuple[Node, ...]
    standing: Mapping[str, Sequence[tuple[int, ...]]] = field(default_factory=dict)

    @property
    def sizes(self) -> frozenset[int]:
        """How large the GPUs are that are known, in bytes."""
        return gpu_sizes(self.nodes)

    def wants(self, at: str) -> list[Want]:
        """At ``min`` or ``max`` replicas. The fewest of each model come before the further ones of any."""
        wants = []
        for unit in self.units:
            standing = tuple(self.standing.get(unit.name, ()))
            one = want(unit, self.memory.get(unit.name))
            if unit.least:
                wants.append(replace(one, count=unit.least, standing=standing[: unit.least]))
            if at == "max" and unit.most > unit.least:
                more = unit.most - unit.least
                wants.append(replace(one, count=more, turn=1, standing=standing[unit.least : unit.most]))
        return wants

    def missing(self, at: str) -> Mapping[str, int]:
        return pack(self.wants(at), self.nodes).missing

    def with_unit(self, unit: Unit) -> "Case":
        return replace(self, units=tuple(unit if each.name == unit.name else each for each in self.units))


def nearest(case: Case, name: str, at: str, found: int, sizer: Sizer | None) -> list[str]:
    """Changes after which the unit ``name`` fits at ``at`` and nothing else fits worse; the smallest first.

    ``found``: how many of its replicas find a place now. ``sizer``: None where its memory is not known.
    """
    unit = next(each for each in case.units if each.name == name)
    before = case.missing(at)
    named: dict[str, str] = {}
    for text, changed in _candidates(case, unit, at, found, sizer):
        # Of one setting the first value that helps is the smallest change.
        if (setting := text.partition(":")[0]) in named:
            continue
        after = changed.missing(at)
        if name not in after and all(count <= before.get(other, 0) for other, count in after.items()):
            named[setting] = text
            if len(named) == NAMED:
                break
    return list(named.values())


def cure(case: Case) -> str:
    """How many more nodes of one kind make all of it fit; empty where that does not help."""
    options = [(more, node) for node in kinds(case.nodes) if (more := _more_nodes(case, node, "max"))]
    if not options:
        return ""
    more, node = min(options, key=lambda option: (option[0], option[1].gpus, option[1].gpu_bytes or 0))
    return f"{more} more {plural(more, 'node')} like {node.name} ({node.kind})"


def _candidates(case: Case, unit: Unit, at: str, found: int, sizer: Sizer | None) -> Iterator[tuple[str, Case]]:
    alone = want(unit, case.memory.get(unit.name))
    by_memory = never(alone, case.nodes) is not None and never(replace(alone, gpu_bytes=0), case.nodes) is None
    if by_memory:
        yield from _less_memory(case, unit, sizer)
    else:
        yield from _fewer_replicas(case, unit, at, found)
        yield from _fewer_gpus(case, unit, sizer)
    yield from _other_accelerator(case, unit)
    if case.standing:
        yield "stop what runs and deploy anew: its replicas stand in the way", replace(case, standing={})
    for node in kinds(case.nodes):
        if more := _more_nodes(case, node, at, unit.name):
            text = f"{more} more {plural(more, 'node')} like {node.name} ({node.kind})"
            yield text, replace(case, nodes=case.nodes + (node,) * more)
    together = max(need.resources.get("GPU", 0.0) for need in unit.needs)
    for node in kinds(case.nodes):
        if 0 < node.gpus < together:
            larger = replace(node, resources={**node.resources, "GPU": together})
            yield f"1 node with {larger.kind}", replace(case, nodes=(*case.nodes, larger))


def _less_memory(case: Case, unit: Unit, sizer: Sizer | None) -> Iterator[tuple[str, Case]]:
    if unit.args is None or sizer is None:
        return
    engine = unit.args.engine
    if engine.get("kv_cache_dtype", "auto") == "auto":
        yield from _with(case, unit, sizer, "engine.kv_cache_dtype: fp8", engine={**engine, "kv_cache_dtype": "fp8"})
    alone = want(unit, None)
    may = [
        node for node in case.nodes if any(never(replace(alone, needs=(need,)), [node]) is None for need in unit.needs)
    ]
    largest = max((node.gpu_bytes or 0 for node in may if node.gpus), default=0)
    tokens = case.memory[unit.name].on(largest).kv_tokens(largest) // _FEWEST_TOKENS * _FEWEST_TOKENS
    if tokens:
        yield from _with(
            case, unit, sizer, f"engine.max_model_len: {tokens}", engine={**engine, "max_model_len": tokens}
        )
    size = unit.args.tensor_parallel_size
    while (size := size * 2) <= max(node.gpus for node in case.nodes):
        yield from _with(case, unit, sizer, f"tensor_parallel_size: {size}", tensor_parallel_size=size)


def _fewer_replicas(case: Case, unit: Unit, at: str, found: int) -> Iterator[tuple[str, Case]]:
    if not found:
        return
    fixed = unit.least == unit.most
    key = "num_replicas" if fixed else f"{at}_replicas"
    if at == "max":
        yield f"{key}: {found}", case.with_unit(replace(unit, most=found))
    else:
        yield f"{key}: {found}", case.with_unit(replace(unit, least=found, most=found if fixed else unit.most))


def _fewer_gpus(case: Case, unit: Unit, sizer: Sizer | None) -> Iterator[tuple[str, Case]]:
    if unit.args is None or sizer is None:
        return
    size = unit.args.tensor_parallel_size
    while size % 2 == 0:
        size //= 2
        yield from _with(case, unit, sizer, f"tensor_parallel_size: {size}", tensor_parallel_size=size)


def _other_accelerator(case: Case, unit: Unit) -> Iterator[tuple[str, Case]]:
    if unit.args is None or unit.args.resources.accelerator_type is None:
        return
    types = sorted({kind for node in case.nodes for kind in node.accelerators[:1]})
    for kind in types:
        if kind != unit.args.resources.accelerator_type:
            resources = {**unit.args.resources.model_dump(), "accelerator_type": kind}
            yield from _with(case, unit, None, f"resources.accelerator_type: {kind}", resources=resources)


def _with(case: Case, unit: Unit, sizer: Sizer | None, text: str, **changed: Any) -> Iterator[tuple[str, Case]]:
    """The case with other arguments; nothing where vLLM would refuse them. ``sizer``: None where memory stays."""
    assert unit.args is not None
    try:
        args = ModelArgs.model_validate({**unit.args.model_dump(), **changed})
        memory = ModelMemory.of(sizer, args, case.sizes) if sizer else None
    except (PlanError, ValueError):
        return
    changed_case = case.with_unit(replace(unit, args=args, needs=placement(args).needs))
    # Other arguments restart its replicas.
    standing = {name: where for name, where in case.standing.items() if name != unit.name}
    memories = {**case.memory, unit.name: memory} if memory else case.memory
    yield text, replace(changed_case, memory=memories, standing=standing)


def gpu_sizes(nodes: Sequence[Node]) -> frozenset[int]:
    return frozenset(node.gpu_bytes for node in nodes if node.gpus and node.gpu_bytes is not None)


def kinds(nodes: Sequence[Node]) -> list[Node]:
    """One node of each kind."""
    found = {(tuple(sorted(n.resources.items())), _kept_labels(n), n.gpu_bytes): n for n in nodes[::-1]}
    return list(found.values())[::-1]


def _kept_labels(node: Node) -> tuple[tuple[str, str], ...]:
    """Labels without the one that is different on every node."""
    return tuple(sorted(label for label in node.labels.items() if label[0] != NODE_ID))


def _more_nodes(case: Case, node: Node, at: str, name: str | None = None) -> int:
    """How many more nodes like ``node`` let ``name`` (None: everything) fit at ``at``; 0: not even many do."""

    def fits(more: int) -> bool:
        missing = replace(case, nodes=case.nodes + (node,) * more).missing(at)
        return name not in missing if name else not missing

    if not fits(_MORE_NODES):
        return 0
    low, high = 0, _MORE_NODES
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
