"""nodes: what --nodes may say, and Ray's label selectors."""

import math

import pytest

from serve_app.planning.nodes import GIB, Node, NodesError, gib, matches, parse_gib, parse_nodes, several


def test_groups_of_gpu_nodes() -> None:
    """Count, GPUs, type and memory; numbered by type; CPUs enough unless they are given."""
    nodes = parse_nodes("2x8xH200-141G, 1x4xL4-24G:96cpu:rack=a:2nvme:512G")
    assert [node.name for node in nodes] == ["H200-1", "H200-2", "L4-1"]
    assert nodes[0] == Node("H200-1", {"CPU": math.inf, "GPU": 8.0, "accelerator_type:H200": 1.0}, {}, 141 * GIB)
    assert nodes[2].resources == {"CPU": 96.0, "GPU": 4.0, "accelerator_type:L4": 1.0, "nvme": 2.0}
    assert (nodes[2].labels, nodes[2].gpu_bytes, nodes[2].ram_bytes) == ({"rack": "a"}, 24 * GIB, 512 * GIB)
    assert [node.kind for node in nodes[1:]] == ["8 H200, 141 GiB each", "4 L4, 24 GiB each"]


def test_one_node_needs_no_count() -> None:
    """8xH200 is one node with eight; numbering goes on over groups of one type."""
    assert [node.name for node in parse_nodes("8xH200-141G,8xH200-141G")] == ["H200-1", "H200-2"]


def test_nodes_without_gpus() -> None:
    """CPUs and memory are all that they have."""
    (node,) = parse_nodes("16cpu:64G")
    assert (node.name, node.resources, node.gpus, node.ram_bytes) == ("cpu-1", {"CPU": 16.0}, 0, 64 * GIB)
    assert node.kind == "16 CPUs"
    assert len(parse_nodes("3x8cpu")) == 3


def test_memory_may_come_from_elsewhere() -> None:
    """A type without a size takes the given one; a size in the text wins."""
    known, unknown = parse_nodes("1x1xL4-22.5G,1x1xH200", gpu_bytes=141 * GIB)
    assert (known.gpu_bytes, unknown.gpu_bytes) == (int(22.5 * GIB), 141 * GIB)
    assert parse_nodes("1x1xH200")[0].gpu_bytes is None


def test_rays_name_with_a_size_in_it() -> None:
    """Ray knows A100-80G beside A100: such a node answers to both, and its memory is said once more."""
    (node,) = parse_nodes("1x8xA100-80G-80G")
    assert node.accelerators == ("A100", "A100-80G")
    assert parse_nodes("1x8xA100-80G")[0].accelerators == ("A100",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "'' in --nodes describes no node"),
        ("H200", "'H200' in --nodes describes no node"),
        ("4x8xH200-141GB", "write COUNTxGPUSxTYPE-MEMORYG"),
        ("4x8xH200-141G,", "'' in --nodes"),
        ("0x8xH200-141G", "counts begin at 1"),
        ("4x0xH200-141G", "counts begin at 1"),
        ("4x8xH200-0G", "'0G' is no amount of memory"),
        ("4x8xH200-141G:96 cpus", "'96 cpus' in --nodes says nothing about a node"),
        ("4x8xH200-141G:rack", "'rack' in --nodes says nothing"),
    ],
)
def test_what_cannot_be_read_is_quoted_and_shown_right(text: str, words: str) -> None:
    """The part that is wrong, and how it is written."""
    with pytest.raises(NodesError) as error:
        parse_nodes(text)
    assert words in str(error.value)


def test_amounts_of_memory() -> None:
    """GiB with a G, as vendors' tools count."""
    assert parse_gib("22.5G") == int(22.5 * GIB)
    for wrong in ("141", "141GB", "-1G", "G"):
        with pytest.raises(NodesError, match="write it in GiB, for example 141G"):
            parse_gib(wrong)
    assert [gib(x * GIB) for x in (141, 22.5, 1234.4, 0.25, 24, 1 / 16)] == [
        "141 GiB",
        "22.5 GiB",
        "1,234 GiB",
        "0.25 GiB",
        "24 GiB",
        "64 MiB",
    ]


@pytest.mark.parametrize(
    ("labels", "selector", "fits"),
    [
        ({}, {}, True),
        ({}, {"a": "x"}, False),
        ({"a": "x"}, {"a": "x"}, True),
        ({"a": "y"}, {"a": "!x"}, True),
        ({}, {"a": "!x"}, True),
        ({"a": "x"}, {"a": "!x"}, False),
        ({"a": "y"}, {"a": "in(x,y)"}, True),
        ({"a": "y"}, {"a": "in(x, y)"}, True),
        ({}, {"a": "in(x)"}, False),
        ({"a": "y"}, {"a": "!in(x,y)"}, False),
        ({}, {"a": "!in(x)"}, True),
        ({"a": "x"}, {"a": "x", "b": "y"}, False),
    ],
)
def test_label_selectors_mean_what_they_mean_in_ray(
    labels: dict[str, str], selector: dict[str, str], fits: bool
) -> None:
    """Read off ray 2.60, whose own match takes the space after a comma literally: placement never writes one."""
    assert matches(selector, labels) is fits


def test_lists_in_words() -> None:
    """One, two, many."""
    assert [several(["a"]), several(["a", "b"]), several(["a", "b", "c"], "or")] == ["a", "a and b", "a, b or c"]
