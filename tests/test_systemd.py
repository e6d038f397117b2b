"""The systemd unit."""

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest

from serve_app import cli, local_cluster, local_serve
from tests.dockerfile import ROOT, programs_of

UNIT = ROOT / "deployments" / "systemd" / "modelyard.service"
INSTALLED = f"{programs_of('cuda')}/modelyard"  # the same place as in the image


needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")


def systemd_says(text: str, folder: Path) -> str:
    """What systemd finds wrong with a unit of this text; our programs are not installed here."""
    unit = folder / UNIT.name
    unit.write_text(text.replace(INSTALLED, "/bin/true"))
    command = ["systemd-analyze", "verify", str(unit)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return said.stdout + said.stderr


@needs_systemd
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """systemd has nothing to say about the unit."""
    assert systemd_says(UNIT.read_text(), tmp_path) == ""


@needs_systemd
def test_systemd_does_not_take_a_misspelt_key(tmp_path: Path) -> None:
    """The check above is one that can fail."""
    assert "KilMode" in systemd_says(UNIT.read_text().replace("KillMode", "KilMode"), tmp_path)


def test_the_unit_stops_as_a_person_would() -> None:
    """The signal goes to `modelyard serve` alone, which then has all the time that it may take; what it leaves is
    cleaned up by `modelyard stop`."""
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str
    unit.read(UNIT)
    service = unit["Service"]
    names = {command.callback.__name__ for command in cli.app.registered_commands if command.callback}
    assert service["ExecStart"] == f"{INSTALLED} serve ${{MODELYARD_CONFIG}}"
    assert service["ExecStopPost"] == f"{INSTALLED} stop"
    assert {"serve", "stop"} <= names
    assert service["KillMode"] == "mixed"
    longest_s = local_serve.STOP_GRACE_S + local_cluster.TERM_GRACE_S + local_cluster.KILL_GRACE_S
    assert int(service["TimeoutStopSec"]) > longest_s
    assert "MODELYARD_CONFIG=" in (UNIT.parent / "environment").read_text()
