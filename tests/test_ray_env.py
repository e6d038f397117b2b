"""ray_env: what must be set before Ray starts."""

import subprocess

from serve_app import ray_env


def test_missing_names_what_is_unset_only() -> None:
    """A variable that somebody set to another value was a decision: it is not reported as missing."""
    names = [setting.name for setting in ray_env.SETTINGS]
    assert ray_env.missing({}) == names
    assert ray_env.missing({names[0]: "0"}) == names[1:]
    assert ray_env.missing(ray_env.with_settings({})) == []


def test_with_settings_keeps_what_the_person_set() -> None:
    """The table fills gaps and overrides nothing."""
    name = ray_env.SETTINGS[0].name
    env = ray_env.with_settings({name: "0", "HOME": "/h"})
    assert env[name] == "0"
    assert env["HOME"] == "/h"


def test_export_lines_set_the_table_in_a_shell() -> None:
    """`eval "$(modelyard env)"` works in a plain POSIX shell and sets exactly the table, reasons and all."""
    script = f"{ray_env.export_lines()}\nexec env"
    out = subprocess.run(
        ["/bin/sh", "-eu", "-c", script], env={"PATH": "/bin:/usr/bin"}, capture_output=True, text=True
    )
    assert out.returncode == 0, out.stderr
    lines = out.stdout.splitlines()
    for setting in ray_env.SETTINGS:
        assert f"{setting.name}={setting.value}" in lines
