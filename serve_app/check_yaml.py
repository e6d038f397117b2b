"""Reads YAML with the faults that PyYAML keeps to itself."""

import json
from collections.abc import Iterator
from typing import Any

import yaml

from serve_app.check_words import Fault


def read_yaml(content: bytes) -> tuple[Any, list[Fault]]:
    """The document in ``content`` and what is wrong with it; None where it has none or cannot be read."""
    try:
        loader = yaml.SafeLoader(content)
        root = loader.get_single_node()
        if root is None:
            return None, []
        faults = list(_duplicate_keys(root, set()))  # first: constructing a mapping unfolds its merge keys
        data = loader.construct_document(root)
        json.dumps(data, default=str, skipkeys=True)  # refuses what contains itself, as nothing after this does
        return data, faults
    except yaml.MarkedYAMLError as e:
        text = ", ".join(t for t in (e.context, e.problem) if t)
        return None, [Fault(_at(e.problem_mark or e.context_mark), f"not valid YAML: {text}")]
    except RecursionError:
        return None, [Fault("file", "not valid YAML: nested too deeply")]
    except (yaml.YAMLError, ValueError) as e:  # ValueError: such as a date that does not exist
        return None, [Fault("file", f"not valid YAML: {str(e).splitlines()[0]}")]


def _at(mark: yaml.Mark | None) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}" if mark else "file"


def _duplicate_keys(node: yaml.Node, seen: set[int]) -> Iterator[Fault]:
    """YAML forbids a key twice in one mapping, PyYAML silently keeps the last."""
    if id(node) in seen:  # an alias
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        first: dict[str, yaml.Mark] = {}
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in first:
                    where = f"the first is at {_at(first[key.value])}"
                    yield Fault(_at(key.start_mark), f"{key.value} is given twice in one mapping", where)
                first.setdefault(key.value, key.start_mark)
            yield from _duplicate_keys(value, seen)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _duplicate_keys(value, seen)
