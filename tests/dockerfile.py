"""What the Dockerfile says, by target."""

import functools
from pathlib import Path

import dockerfile_parse

ROOT = Path(__file__).resolve().parent.parent
Instruction = tuple[str, str]
TARGETS = ("cpu", "cuda")


@functools.cache
def stages() -> dict[str, list[Instruction]]:
    """Instructions by the name of their stage; the first one of each is its FROM."""
    found: dict[str, list[Instruction]] = {}
    for instruction in dockerfile_parse.DockerfileParser(str(ROOT), cache_content=True).structure:
        if instruction["instruction"] == "FROM":
            current = found.setdefault(instruction["value"].split(" AS ")[1], [])
        if instruction["instruction"] != "COMMENT":
            current.append((instruction["instruction"], instruction["value"]))
    return found


def instructions(target: str) -> list[Instruction]:
    """All that make the image, those of the stage that it comes from first."""
    (_, origin), *own = stages()[target]
    parent = origin.split(" AS ")[0]
    return (instructions(parent) if parent in stages() else [("FROM", parent)]) + own


def values(target: str, instruction: str) -> list[str]:
    return [value for name, value in instructions(target) if name == instruction]


def programs_of(target: str) -> str:
    """The folder of the image's installed programs."""
    (path,) = (value for value in values(target, "ENV") if value.startswith("PATH="))
    return path.removeprefix("PATH=").removesuffix(":$PATH")
