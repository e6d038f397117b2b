"""The README's promises that can be checked: its files exist, its targets exist, its examples are right."""

import io
import re
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from serve_app import plan_command
from serve_app.check import check_config

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
LOADTESTS = ROOT / "loadtest" / "README.md"
DOCS = [ROOT / "README.md", ROOT / "SECURITY.md", LOADTESTS, *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("doc", DOCS, ids=lambda p: p.name)
def test_links_lead_somewhere(doc: Path) -> None:
    """Every relative link names a file that is there."""
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", doc.read_text()):
        assert (doc.parent / target).exists(), f"{doc.name} links to {target}"


@pytest.mark.parametrize("doc", DOCS, ids=lambda p: p.name)
def test_named_files_exist(doc: Path) -> None:
    """Every file of ours that the text names in backticks is there: the "to change X, edit Y" table stays true."""
    for name in re.findall(r"`((?:serve_app|deployments|tests|loadtest|docs)/[\w./-]+\.\w+)`", doc.read_text()):
        assert (ROOT / name).exists(), f"{doc.name} names {name}"


def test_the_index_of_load_tests_is_whole() -> None:
    """Each command of the folder is in it, and each that it names exists."""
    folder = LOADTESTS.parent
    commands = {file.stem for file in folder.glob("*.py") if "typer.run" in file.read_text()}
    commands |= {file.parent.name for file in folder.glob("*/__main__.py")}
    assert set(re.findall(r"python -m loadtest\.(\w+)", LOADTESTS.read_text())) == commands


def test_make_targets_exist() -> None:
    """Every `make X` of the README is a target."""
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"\bmake ([a-z]+)\b", README)) - {"a", "it"}:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"


def test_the_model_entry_is_valid() -> None:
    """The example entry passes `modelyard check`, beside a gateway."""
    (entry,) = [block for block in blocks("yaml") if "import_path" in block]
    gateway = {"name": "gateway", "import_path": "serve_app.gateway:app", "route_prefix": "/"}
    config = {"applications": [gateway, *yaml.safe_load(entry)]}
    known = {"max_model_len": int}
    report = check_config(config, base=ROOT, engine_fields=lambda: known, frontend_fields=dict)
    assert report.faults == ()


def test_the_plan_is_what_the_command_prints() -> None:
    """To the letter, at the README's width."""
    (block,) = re.findall(r"^```\n(\$ modelyard plan.*?)^```", README, re.DOTALL | re.MULTILINE)
    command, _, shown = block.partition("\n")
    file, nodes = command.split()[3], command.split()[5]
    out = io.StringIO()
    status = plan_command.run(
        ROOT / file, plan_command.Asked(nodes=nodes), Console(file=out, width=90, highlight=False)
    )
    assert status == plan_command.FITS
    printed = [line.rstrip() for line in out.getvalue().replace(f"{ROOT}/", "").splitlines()]
    assert printed == shown.splitlines()


def test_the_python_example_is_python() -> None:
    """It compiles (the engine tier talks to the real thing through the same library)."""
    for block in blocks("python"):
        compile(block, "README.md", "exec")
