"""Nodes of a cluster as far as placing replicas goes, and what has to be free together on one of them. Pure.

Resources have Ray's names: ``CPU``, ``GPU``, ``accelerator_type:H100`` and custom ones.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

GIB = 1 << 30
ACCELERATOR = "accelerator_type:"
# What Ray gives a task or actor that asks for an accelerator type: it pins and takes nothing.
PIN = 0.001
# A label that nodes have which somebody adds and removes as they are needed: KubeRay, Ray's cluster launcher.
NODE_GROUP = "ray.io/node-group"
NODE_ID = "ray.io/node-id"


@dataclass(frozen=True, slots=True)
class Node:
    """One machine. ``resources``: its totals, or what is free, by Ray's names; an amount may be infinite.

    ``gpu_bytes``: memory of each of its GPUs; ``ram_bytes``: the machine's own. None: not known.
    """

    name: str
    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)
    gpu_bytes: int | None = None
    ram_bytes: int | None = None

    @property
    def gpus(self) -> int:
        """Whole GPUs."""
        return int(self.resources.get("GPU", 0) + 1e-6)

    @property
    def accelerators(self) -> tuple[str, ...]:
        """Accelerator types that the node answers to, the shortest first (A100 before A100-80G)."""
        found = (name.removeprefix(ACCELERATOR) for name in self.resources if name.startswith(ACCELERATOR))
        return tuple(sorted(found, key=lambda name: (len(name), name)))

    @property
    def gpu_name(self) -> str:
        """What its GPUs are called."""
        return self.accelerators[0] if self.accelerators else "GPU"

    @property
    def kind(self) -> str:
        """What a person would call such a node: ``8 H200, 141 GiB each``."""
        if not self.gpus:
            cpus = self.resources.get("CPU", 0)
            return "any number of CPUs" if math.isinf(cpus) else f"{cpus:g} {plural(cpus, 'CPU')}"
        size = f", {gib(self.gpu_bytes)}{' each' if self.gpus > 1 else ''}" if self.gpu_bytes else ""
        return f"{self.gpus} {self.gpu_name if self.accelerators else plural(self.gpus, 'GPU')}{size}"


@dataclass(frozen=True, slots=True)
class Need:
    """What has to be free together on one node. ``labels``: Ray's label selector, by key."""

    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)


_VALUES = re.compile(r"(?P<no>!?)(?:in\((?P<several>.*)\)|(?P<one>.*))")


def matches(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether a node with ``labels`` satisfies Ray's label ``selector``: ``a``, ``!a``, ``in(a, b)``, ``!in(a, b)``.

    A node without the label satisfies the negations.
    """
    for key, wanted in selector.items():
        found = _VALUES.fullmatch(wanted)
        assert found, "every text matches"
        several = found["several"]
        values = [found["one"]] if several is None else [v.strip() for v in several.split(",")]
        if (labels.get(key) in values) is bool(found["no"]):
            return False
    return True


class NodesError(ValueError):
    """``--nodes`` cannot be read; the message says where and how it is written."""


HOW = (
    'write COUNTxGPUSxTYPE-MEMORYG, for example "4x8xH200-141G,2x4xL4-24G"; nodes without GPUs: "3x16cpu"; '
    "after a colon CPUs, custom resources, memory of the machine and labels: 4x8xH200-141G:96cpu:1nvme:1000G:rack=a"
)
_GPU_GROUP = re.compile(r"(?:(?P<count>\d+)x)?(?P<gpus>\d+)x(?P<type>[A-Za-z][\w.-]*?)(?:-(?P<size>\d+(?:\.\d+)?)G)?")
# 141GB or 141GiB, which would else be part of the type.
_OTHER_UNIT = re.compile(r"-\d[\d.]*(?!G$)[A-Za-z]+$")
_CPU_GROUP = re.compile(r"(?:(?P<count>\d+)x)?(?P<cpus>\d+(?:\.\d+)?)cpu")
_AMOUNT = re.compile(r"(?P<amount>\d+(?:\.\d+)?)(?P<name>[A-Za-z]\w*)")
_LABEL = re.compile(r"(?P<key>[A-Za-z0-9][\w./-]*)=(?P<value>[\w.-]*)")


def parse_nodes(text: str, gpu_bytes: int | None = None) -> tuple[Node, ...]:
    """The nodes that ``text`` describes, groups separated by commas. NodesError: it cannot be read.

    ``4x8xH200-141G`` is four nodes with eight GPUs of Ray's accelerator type H200 and 141 GiB each. G is GiB, as
    vendors' tools print it (``nvidia-smi``: MiB / 1,024). A node whose CPUs are not given has enough of them.
    ``gpu_bytes``: memory of GPUs for which ``text`` says none.
    """
    nodes: list[Node] = []
    count: dict[str, int] = {}
    for group in (part.strip() for part in text.split(",")):
        many, kind, node = _group(group, gpu_bytes)
        for _ in range(many):
            count[kind] = count.get(kind, 0) + 1
            nodes.append(Node(f"{kind}-{count[kind]}", node.resources, node.labels, node.gpu_bytes, node.ram_bytes))
    return tuple(nodes)


def parse_gib(text: str) -> int:
    """Bytes of ``141G`` (GiB). NodesError: it cannot be read."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)G", text.strip())
    if not found or not float(found[1]):
        raise NodesError(f"{text!r} is no amount of memory: write it in GiB, for example 141G")
    return int(float(found[1]) * GIB)


def _group(text: str, gpu_bytes: int | None) -> tuple[int, str, Node]:
    """How many nodes, what they are called, and one of them."""
    head, *options = text.split(":")
    resources: dict[str, float] = {}
    labels: dict[str, str] = {}
    ram = None
    if (found := _GPU_GROUP.fullmatch(head)) and not _OTHER_UNIT.search(found["type"]):
        kind = found["type"]
        resources |= {"CPU": math.inf, "GPU": float(found["gpus"]), f"{ACCELERATOR}{kind}": 1.0}
        # Ray gives an A100 its plain name, and one with the size where somebody declared it.
        if short := re.fullmatch(r"(.+)-\d+G", kind):
            resources[f"{ACCELERATOR}{short[1]}"] = 1.0
        gpu_bytes = parse_gib(found["size"] + "G") if found["size"] else gpu_bytes
    elif found := _CPU_GROUP.fullmatch(head):
        kind = "cpu"
        resources["CPU"] = float(found["cpus"])
        gpu_bytes = None
    else:
        raise NodesError(f"{head!r} in --nodes describes no node: {HOW}")
    many = int(found["count"] or 1)
    if not many or resources.get("GPU") == 0:
        raise NodesError(f"{head!r} in --nodes: counts begin at 1")
    for option in options:
        if re.fullmatch(r"[\d.]+G", option):
            ram = parse_gib(option)
        elif amount := _AMOUNT.fullmatch(option):
            resources["CPU" if amount["name"] == "cpu" else amount["name"]] = float(amount["amount"])
        elif label := _LABEL.fullmatch(option):
            labels[label["key"]] = label["value"]
        else:
            raise NodesError(f"{option!r} in --nodes says nothing about a node: {HOW}")
    return many, kind, Node("", resources, labels, gpu_bytes, ram)


def gib(count: float) -> str:
    """Bytes with the digits that matter: ``141 GiB``, ``22.5 GiB``, ``0.25 GiB``, ``64 MiB``."""
    size = count / GIB
    if size < 0.1:
        return f"{count / (1 << 20):,.0f} MiB"
    if size < 0.95:
        return f"{size:.2f} GiB"
    return f"{size:,.0f} GiB" if size >= 100 or abs(size - round(size)) < 0.05 else f"{size:.1f} GiB"


def plural(count: float, noun: str) -> str:
    return noun if count == 1 else f"{noun}s"


def several(words: Sequence[str], joint: str = "and") -> str:
    """``a, b and c``."""
    *most, last = words
    return f"{', '.join(most)} {joint} {last}" if most else last
