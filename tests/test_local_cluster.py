"""local_cluster: which processes are ours, and how they end."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from serve_app import local_cluster, ray_env
from serve_app.local_cluster import Listener, LocalClusterError, Session, View

LOGS = "/tmp/ray/session_1"
SESSION = Session(id="mark", folder="/tmp/x", dashboard="http://127.0.0.1:1", ports=(), session_dir=LOGS)


def view(
    pid: int,
    parent: int = 1,
    session: str | None = None,
    outputs: tuple[str, ...] = ("", ""),
    command: tuple[str, ...] = (),
) -> View:
    return View(pid, parent, session, outputs, command)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELYARD_HOME", str(tmp_path))


def test_members_by_mark_by_log_and_by_descent() -> None:
    """A marked process, one that logs into the session's folder, and whatever these started, at any depth."""
    views = [
        view(10, session="mark"),
        view(20, outputs=(f"{LOGS}/logs/worker.out", "")),
        view(31, parent=30),
        view(30, parent=20),
        view(40),
    ]
    assert local_cluster.members(views, SESSION) == {10, 20, 30, 31}


def test_members_leave_other_clusters_and_readers_alone() -> None:
    """Another Ray, another session with the same beginning, and an editor that has our log open are not ours."""
    views = [
        view(10, session="other"),
        view(11, outputs=("/tmp/ray/session_12/logs/raylet.out", "")),
        view(12, command=("tail", "-f", f"{LOGS}/logs/raylet.out")),
    ]
    assert local_cluster.members(views, SESSION) == set()


def test_members_never_hold_the_spared() -> None:
    """The stopping process does not end itself, wherever it was started."""
    assert local_cluster.members([view(10, session="mark"), view(11, parent=10)], SESSION, frozenset([11])) == {10}


def test_members_without_a_session_folder() -> None:
    """Before Ray has made its folder nothing is ours by its output: an empty name matches nothing."""
    fresh = Session(id="mark", folder="/tmp/x", dashboard="", ports=())
    assert local_cluster.members([view(10, outputs=("/dev/null", "")), view(11, session="mark")], fresh) == {11}


@pytest.mark.parametrize("flag", ["--session-dir", "--session_dir"])
def test_session_dir_is_read_from_our_processes_only(flag: str) -> None:
    """Ray spells the flag in two ways; another cluster's folder is never taken."""
    views = [view(1, session="other", command=(f"{flag}=/no",)), view(2, session="mark", command=("x", f"{flag}=/yes"))]
    assert local_cluster.session_dir_of(views, SESSION) == "/yes"
    assert local_cluster.session_dir_of(views[:1], SESSION) == ""


def test_state_survives_and_is_forgotten(tmp_path: Path) -> None:
    """What is saved is loaded; no file means nothing was started; a damaged one says what to do."""
    assert local_cluster.load() is None
    local_cluster.save(SESSION)
    assert local_cluster.load() == SESSION
    (tmp_path / "run" / "ray.json").write_text("{")
    with pytest.raises(LocalClusterError, match="delete it"):
        local_cluster.load()


def test_environment_marks_and_keeps_what_the_person_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray gets the mark, token authentication, and HAProxy's files in the session's folder."""
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "0")
    monkeypatch.setenv("RAY_ADDRESS", "ray://elsewhere")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    env = local_cluster.environment(SESSION)
    assert env[local_cluster.SESSION_VARIABLE] == "mark"
    assert env["RAY_AUTH_MODE"] == "token"
    assert env["RAY_SERVE_ENABLE_HA_PROXY"] == "0"
    assert "RAY_ADDRESS" not in env
    table = {setting.name for setting in ray_env.SETTINGS}
    ours = [name for name in env if name.startswith("RAY_SERVE_HAPROXY_") and not name.endswith("PORT")]
    files = [env[name] for name in ours if name not in table]
    assert len(files) == 5
    assert all(value.startswith("/tmp/x") for value in files)


def test_haproxy_socket_paths_are_short_enough() -> None:
    """HAProxy refuses socket paths of 97 characters or more; Ray puts a 56-character node id into them."""
    session = local_cluster.new_session(1, 2, ())
    try:
        path = f"{session.folder}/{'a' * 56}/metrics.sock"
        assert len(path) < 97
    finally:
        os.rmdir(session.folder)


def test_port_faults_say_who_and_what_to_do() -> None:
    """Every taken port is one line: its use, the process, the way out."""
    faults = local_cluster.port_faults(
        [Listener(6379, "redis-server (process 7)"), Listener(9101, "")],
        {6379: "Ray", 9101: "HAProxy's metrics"},
        {6379: "choose another with --ray-port"},
    )
    assert faults == [
        "port 6379 (Ray) is in use by redis-server (process 7): stop it, or choose another with --ray-port",
        "port 9101 (HAProxy's metrics) is in use by a process of another user: stop it",
    ]


def test_check_ports_finds_a_real_listener() -> None:
    """A listening socket of this very process is found, with its name."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(LocalClusterError, match=rf"port {port} \(the endpoint\) is in use by .*{os.getpid()}"):
            local_cluster.check_ports(port, gcs_port=1, dashboard_port=2)


STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
POLITE = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("ended politely", flush=True)))
print("up", flush=True)
time.sleep(60)
"""


def last_words(child: subprocess.Popen[str]) -> str:
    """All that ``child`` still said before its end. (Its exit status is psutil's, which waited for it.)"""
    assert child.stdout is not None
    return child.stdout.read()


class Children:
    def __init__(self) -> None:
        self.started: list[subprocess.Popen[str]] = []

    def start(self, code: str, mark: str) -> subprocess.Popen[str]:
        env = os.environ | {local_cluster.SESSION_VARIABLE: mark}
        child = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)
        self.started.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        return child


@pytest.fixture
def children() -> Iterator[Children]:
    made = Children()
    yield made
    for child in made.started:
        child.kill()
        child.wait(10)
        assert child.stdout is not None
        child.stdout.close()


def test_end_ends_ours_and_only_ours(children: Children, tmp_path: Path) -> None:
    """Polite processes get SIGTERM, stubborn ones SIGKILL; a process of another session lives; the state is gone."""
    folder = tmp_path / "private"
    folder.mkdir()
    session = Session(id="ours", folder=str(folder), dashboard="", ports=())
    local_cluster.save(session)
    polite, stubborn = children.start(POLITE, "ours"), children.start(STUBBORN, "ours")
    other = children.start(POLITE, "theirs")
    ended = local_cluster.end(session, term_grace_s=0.3)
    assert (ended.count, ended.left) == (2, ())
    assert (last_words(polite), last_words(stubborn)) == ("ended politely\n", "")
    assert other.poll() is None
    assert local_cluster.load() is None
    assert not folder.exists()


def test_end_finds_what_starts_meanwhile(children: Children) -> None:
    """A process that appears after the first look is ended too."""
    first, late = children.start(POLITE, "a"), children.start(POLITE, "b")
    looks = [[psutil.Process(first.pid)], [psutil.Process(late.pid)], []]
    assert local_cluster.end_processes(lambda: looks.pop(0), term_grace_s=5) == 2
    assert last_words(first) == last_words(late) == "ended politely\n"


@pytest.mark.parametrize(
    ("noted", "kept"), [("127.0.0.1:6379", False), ("10.0.0.7:6379", False), ("127.0.0.1:7000", True)]
)
def test_rays_note_of_the_current_cluster_goes_with_ours(tmp_path: Path, noted: str, kept: bool) -> None:
    """After a stop no `serve run` is sent to a cluster that is gone; another cluster's note stays."""
    note = tmp_path / "ray_current_cluster"
    note.write_text(noted)
    session = replace(SESSION, session_dir=str(tmp_path / "session_1"), ports=(8000, 6379))
    local_cluster.forget_address(session)
    assert note.exists() == kept
