"""The plan for a deployment file: snapshot in, plan out. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from serve_app.planning.advice import Case, cure, gpu_sizes, kinds, nearest
from serve_app.planning.changes import Action, Change
from serve_app.planning.fleet import Unit
from serve_app.planning.nodes import Node, gib, several
from serve_app.planning.packing import Packing, Want, pack
from serve_app.planning.reasons import crowded, never
from serve_app.planning.sizing import ModelMemory, Sizer, too_small_cache, want

# Of so many models that do not fit the nearest change is looked for; one change often helps the others too.
_ADVISED = 3
# So many models are named in a note.
_NAMED = 3


@dataclass(frozen=True, slots=True)
class Problem:
    """``found`` of ``wanted`` replicas of the unit ``name`` find a place. ``at``: min or max (replicas).

    ``never``: not even one does on these nodes when nothing else is on them. ``changes``: each was planned and fits,
    the smallest first.
    """

    name: str
    at: str
    wanted: int
    found: int
    never: bool
    why: str
    changes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """``memory`` by model, for those that could be counted. ``at_min``, ``at_max``: None where no nodes are known.

    ``cure``: what would make everything fit at once, where several things do not. ``changes``: what a deploy would do
    to the cluster, None where it was not asked about one. ``grows``: nodes are added to it as they are needed.
    """

    units: tuple[Unit, ...]
    memory: Mapping[str, ModelMemory]
    nodes: tuple[Node, ...]
    at_min: Packing | None
    at_max: Packing | None
    problems: tuple[Problem, ...]
    cure: str
    notes: tuple[str, ...]
    changes: tuple[Change, ...] | None = None
    grows: bool = False

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def starts(self) -> bool:
        """Whether everything fits at its fewest replicas."""
        return not any(problem.at == "min" for problem in self.problems)


def make_plan(
    units: Sequence[Unit],
    sizers: Mapping[str, Sizer],
    nodes: Sequence[Node] | None,
    changes: Sequence[Change] | None = None,
    running: Mapping[tuple[str, str], Sequence[tuple[int, ...]]] | None = None,
    *,
    grows: bool = False,
) -> Plan:
    """``sizers``: for the models whose checkpoint is known. ``nodes``: None plans what is needed and places nothing.

    ``changes``, ``running`` and ``grows`` are a running cluster's: what a deploy would do, where replicas lie by
    application and deployment, and whether nodes are added by themselves. PlanError: a model's memory cannot be
    counted.
    """
    sizes = gpu_sizes(nodes or ())
    memory = {
        unit.name: ModelMemory.of(sizers[unit.name], unit.args, sizes)
        for unit in units
        if unit.args and unit.name in sizers
    }
    case = Case(tuple(units), memory, tuple(nodes or ()), _standing(units, changes or (), running or {}))
    packings = None if nodes is None else (pack(case.wants("min"), nodes), pack(case.wants("max"), nodes))
    # What no node can help says itself what to change.
    problems = _cache_problems(units, memory)
    hopeless = len(problems)
    for at, packing in zip(("min", "max"), packings or (), strict=False):
        taken = {problem.name for problem in problems}
        problems += [problem for problem in _problems(case, at, packing) if problem.name not in taken]
    asking = slice(hopeless, hopeless + _ADVISED)
    problems[asking] = [_advised(problem, case, sizers) for problem in problems[asking]]
    return Plan(
        units=tuple(units),
        memory=memory,
        nodes=tuple(nodes or ()),
        at_min=packings[0] if packings else None,
        at_max=packings[1] if packings else None,
        problems=tuple(problems),
        cure=cure(case) if packings and len(problems) > 1 else "",
        notes=tuple(_notes(case, packings[0], problems, grows)) if packings else (),
        changes=None if changes is None else tuple(changes),
        grows=grows,
    )


def _cache_problems(units: Sequence[Unit], memory: Mapping[str, ModelMemory]) -> list[Problem]:
    return [
        Problem(unit.name, "min", unit.least, 0, True, why)
        for unit in units
        if unit.name in memory and (why := too_small_cache(memory[unit.name].on(None)))
    ]


def _problems(case: Case, at: str, packing: Packing) -> list[Problem]:
    wants: dict[str, Want] = {each.name: each for each in case.wants(at)}
    count = {unit.name: unit.least if at == "min" else unit.most for unit in case.units}
    free = [left.node for left in packing.left]
    problems = []
    for name, missing in packing.missing.items():
        alone = never(wants[name], case.nodes)
        why = alone or crowded(wants[name], free)
        problems.append(Problem(name, at, count[name], count[name] - missing, alone is not None, why))
    return problems


def _advised(problem: Problem, case: Case, sizers: Mapping[str, Sizer]) -> Problem:
    changes = nearest(case, problem.name, problem.at, problem.found, sizers.get(problem.name))
    return replace(problem, changes=tuple(changes))


def _standing(
    units: Sequence[Unit], changes: Sequence[Change], running: Mapping[tuple[str, str], Sequence[tuple[int, ...]]]
) -> dict[str, Sequence[tuple[int, ...]]]:
    """The replicas that a deploy leaves alone, by unit."""
    stay = {change.application for change in changes if change.action in (Action.LIVE, Action.NONE)}
    return {
        unit.name: running[unit.application, unit.deployment]
        for unit in units
        if unit.application in stay and (unit.application, unit.deployment) in running
    }


def _notes(case: Case, at_min: Packing, problems: Sequence[Problem], grows: bool) -> list[str]:
    notes = []
    if problems and grows:
        notes.append("Nodes are added to this cluster as they are needed: what does not fit now may fit then.")
    if case.memory and any(node.gpus and node.gpu_bytes is None for node in case.nodes):
        notes.append(
            "The GPUs' memory is not known, so whether the models fit into it was not checked: say it with "
            "--gpu-memory 141G."
        )
    if astray := [said for unit in case.units if (said := _astray(case, unit))]:
        more = f" and {len(astray) - _NAMED} more" if len(astray) > _NAMED else ""
        notes.append(
            f"Ray does not look at GPU memory. It may put {'; '.join(astray[:_NAMED])}{more}: set "
            "resources.accelerator_type, or resources.labels."
        )
    notes += _greedy_caches(case, at_min)
    if not at_min.missing and (spread := pack(case.wants("min"), case.nodes, spread=True).missing):
        notes.append(
            f"All of it fits, but only where replicas are packed. Serve spreads them over the nodes, and then "
            f"{several(sorted(spread))} may find no room: set RAY_SERVE_USE_PACK_SCHEDULING_STRATEGY=1 before Ray "
            "starts, or bind models to nodes with resources.labels."
        )
    return notes


def _greedy_caches(case: Case, at_min: Packing) -> list[str]:
    """CPU engines beside each other that would each take nearly all the memory of their node."""
    takers = {
        unit.name
        for unit in case.units
        if unit.name in case.memory and unit.args and not unit.args.resources.num_gpus
        if case.memory[unit.name].on(None).kv_bytes is None
    }
    on: dict[int, list[str]] = {}
    for placed in at_min.placed:
        if placed.name in takers:
            on.setdefault(placed.spots[0].node, []).append(placed.name)
    crowded = sorted({name for names in on.values() if len(names) > 1 for name in names})
    if not crowded:
        return []
    return [
        f"A CPU engine without engine.kv_cache_memory_bytes takes nearly all the memory of its NUMA node: set it for "
        f"{several(crowded[:_NAMED])}, of which several are on one node."
    ]


def _astray(case: Case, unit: Unit) -> str:
    """A model that may land where it cannot run, although there are nodes where it can."""
    memory = case.memory.get(unit.name)
    if memory is None or unit.args is None or not unit.args.resources.num_gpus:
        return ""
    one = want(unit, memory)
    needs = [need for need in one.needs if need.resources.get("GPU")]
    anywhere = replace(one, needs=(needs[0],), gpu_bytes=0)
    may = [node for node in kinds(case.nodes) if node.gpu_bytes is not None and never(anywhere, [node]) is None]
    small = sorted({node.gpu_name for node in may if (node.gpu_bytes or 0) < one.gpu_bytes})
    if not small or all((node.gpu_bytes or 0) < one.gpu_bytes for node in may):
        return ""
    return f"{unit.name}, which needs {gib(one.gpu_bytes)}, on {several(small, 'or')}"
