"""A Ray head on this machine: start it, find it again, and end it and nothing else.

Other Ray clusters may run here, so ``ray stop`` (which ends them all) is out of the question. Every process that we
start inherits a variable, ``MODELYARD_SESSION``, with a random value that a state file under ``$MODELYARD_HOME/run``
remembers. Processes that overwrite their environment with a title (Ray's workers and vLLM's engines do) are known by
their standard output, which Ray points into its session's folder, or by descent.
"""

import fcntl
import json
import os
import secrets
import shutil
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from serve_app import ray_env
from serve_app.home import home
from serve_app.ray_api import RayApi, token

SESSION_VARIABLE = "MODELYARD_SESSION"
HOST = "127.0.0.1"
GCS_PORT = 6379
DASHBOARD_PORT = 8265
# Ports that Ray Serve takes beside the endpoint's, by the variable that moves each.
SERVE_PORTS = {
    "RAY_SERVE_HAPROXY_METRICS_PORT": (9101, "HAProxy's metrics"),
    "RAY_SERVE_HAPROXY_STATS_PORT": (8404, "HAProxy's statistics"),
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": (8500, "Serve's proxy behind HAProxy"),
}

START_TIMEOUT_S = 120.0
# Enough for engines and HAProxy. Ray's own daemons outlive any patience once the others are gone (10 s and more), and
# have nothing to lose by then.
TERM_GRACE_S = 4.0
KILL_GRACE_S = 10.0


class LocalClusterError(RuntimeError):
    """The message says what is wrong and what to do about it."""


@dataclass(frozen=True)
class Session:
    """What the state file remembers of the Ray that we started.

    ``folder``: HAProxy's private files. ``session_dir``: Ray's own folder, empty until Ray has made it.
    ``ports``: TCP ports that must be free again after the end.
    """

    id: str
    folder: str
    dashboard: str
    ports: tuple[int, ...]
    session_dir: str = ""


@dataclass(frozen=True)
class View:
    """What one look at a process showed. ``outputs``: where its standard output and standard error go."""

    pid: int
    parent: int
    session: str | None
    outputs: tuple[str, ...]
    command: tuple[str, ...]


def members(views: Iterable[View], session: Session, spare: frozenset[int] = frozenset()) -> set[int]:
    """Process ids that belong to ``session``: marked ones, ones that log into its folder, and their descendants.

    A command line that names the session's folder is no proof: it may be somebody's editor or ``tail``.
    ``spare`` and what descends from it only through itself is left out.
    """
    views = [view for view in views if view.pid not in spare]
    logs = session.session_dir.rstrip("/") + "/" if session.session_dir else None
    found = {
        view.pid
        for view in views
        if view.session == session.id or (logs and any(output.startswith(logs) for output in view.outputs))
    }
    grew = True
    while grew:
        children = {view.pid for view in views if view.parent in found} - found
        found |= children
        grew = bool(children)
    return found


def session_dir_of(views: Iterable[View], session: Session) -> str:
    """Ray's folder of this session, from the command lines of the processes that carry its mark; else empty."""
    for view in views:
        if view.session == session.id:
            for argument in view.command:
                name, _, value = argument.partition("=")
                if name in ("--session-dir", "--session_dir") and value:
                    return value
    return ""


def look() -> dict[int, tuple[psutil.Process, View]]:
    """Every process that we may inspect. A ``psutil.Process`` knows a reused process id by its start time."""
    seen = {}
    for process in psutil.process_iter():
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            view = View(
                pid=process.pid,
                parent=process.ppid(),
                session=process.environ().get(SESSION_VARIABLE),
                outputs=tuple(_link(f"/proc/{process.pid}/fd/{fd}") for fd in (1, 2)),
                command=tuple(process.cmdline()),
            )
        except psutil.Error:
            continue  # gone, or another user's
        seen[process.pid] = (process, view)
    return seen


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def processes(session: Session) -> list[psutil.Process]:
    """The processes of ``session`` that live now; never this one or those that it descends from."""
    seen = look()
    us = frozenset([os.getpid(), *(parent.pid for parent in psutil.Process().parents())])
    pids = members((view for _, view in seen.values()), session, spare=us)
    return [seen[pid][0] for pid in sorted(pids)]


# The state file


def _run_folder() -> Path:
    return home() / "run"


def _state_file() -> Path:
    return _run_folder() / "ray.json"


def load() -> Session | None:
    """The session that we started last and have not ended; its processes may be gone."""
    try:
        fields = json.loads(_state_file().read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise LocalClusterError(
            f"{_state_file()} is damaged ({error}): look for Ray processes and delete it"
        ) from error
    return Session(**{**fields, "ports": tuple(fields["ports"])})


def save(session: Session) -> None:
    _run_folder().mkdir(parents=True, exist_ok=True)
    new = _state_file().with_suffix(".new")
    new.write_text(json.dumps(asdict(session), indent=1) + "\n")
    new.replace(_state_file())


@contextmanager
def alone() -> Iterator[None]:
    """One start or stop at a time; the next one waits."""
    _run_folder().mkdir(parents=True, exist_ok=True)
    with (_run_folder() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# Ports


@dataclass(frozen=True)
class Listener:
    """``who`` listens on ``port``; empty where the process is another user's."""

    port: int
    who: str


def listeners(ports: Iterable[int]) -> list[Listener]:
    """Which of ``ports`` are taken on this machine, and by whom."""
    wanted = set(ports)
    found: dict[int, str] = {}
    for connection in psutil.net_connections(kind="tcp"):
        port = connection.laddr.port if connection.laddr else None
        if connection.status == psutil.CONN_LISTEN and port in wanted:
            found[port] = _who(connection.pid) or found.get(port, "")
    return [Listener(port, who) for port, who in sorted(found.items())]


def _who(pid: int | None) -> str:
    if pid is None:
        return ""
    with suppress(psutil.Error):
        return f"{psutil.Process(pid).name()} (process {pid})"
    return f"process {pid}"


def port_faults(taken: Iterable[Listener], uses: dict[int, str], advice: dict[int, str]) -> list[str]:
    """One line per taken port: what we need it for, who has it, what to do."""
    return [
        f"port {t.port} ({uses[t.port]}) is in use by {t.who or 'a process of another user'}: "
        f"stop it{', or ' + advice[t.port] if t.port in advice else ''}"
        for t in taken
    ]


def check_ports(http_port: int, gcs_port: int, dashboard_port: int) -> tuple[int, ...]:
    """The ports that a local cluster takes, all free; raises with every one that is not."""
    uses = {gcs_port: "Ray", dashboard_port: "Ray's dashboard", http_port: "the endpoint"}
    advice = {
        gcs_port: "choose another with --ray-port",
        dashboard_port: "choose another with --dashboard-port",
        http_port: "change http_options.port in the file",
    }
    for name, (default, use) in SERVE_PORTS.items():
        port = int(os.environ.get(name) or default)
        uses.setdefault(port, use)
        advice.setdefault(port, f"choose another with {name}")
    faults = port_faults(listeners(uses), uses, advice)
    if faults:
        raise LocalClusterError("\n".join(faults))
    return tuple(sorted(uses))


# Start


def running(session: Session) -> bool:
    """Whether the Ray of ``session`` still runs: its head's two core processes live."""
    names = set()
    for process in processes(session):
        with suppress(psutil.Error):
            names.add(process.name())
    return {"gcs_server", "raylet"} <= names


def environment(session: Session) -> dict[str, str]:
    """What Ray's processes get. What the person set wins, but for the mark and HAProxy's private files."""
    scripts = sysconfig.get_path("scripts")
    env = ray_env.with_settings(os.environ)
    env.setdefault("RAY_AUTH_MODE", "token")
    # Ray's switch for "one machine only": every address is then 127.0.0.1, and no port of a replica faces the network.
    env.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    # A stop would otherwise wait half a minute for load balancers that a single machine does not have.
    env.setdefault("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "1")
    # Programs of the virtual environment that engines call, even where nobody activated it.
    env["PATH"] = os.pathsep.join([scripts, env.get("PATH", os.defpath)])
    # Drivers inside would connect to another cluster.
    env.pop("RAY_ADDRESS", None)
    return env | {
        SESSION_VARIABLE: session.id,
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{session.folder}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{session.folder}/admin.sock",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{session.folder}/metrics.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": session.folder,
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{session.folder}/server-state",
    }


def new_session(gcs_port: int, dashboard_port: int, ports: Sequence[int]) -> Session:
    """Remembered before anything starts, so that an interrupted start can be cleaned up too."""
    session = Session(
        id=secrets.token_hex(16),
        # Not under MODELYARD_HOME: HAProxy's sockets lie in a sub-folder with a 56-character name, and the whole path
        # of a socket must stay under 97 characters.
        folder=tempfile.mkdtemp(prefix="modelyard-", dir="/tmp"),
        dashboard=f"http://{HOST}:{dashboard_port}",
        ports=tuple(ports),
    )
    save(session)
    return session


def start(session: Session, gcs_port: int, dashboard_port: int, env: dict[str, str] | None = None) -> Session:
    """Start the head of ``session`` and wait until its dashboard answers. ``env``: by default ``environment``'s."""
    env = env or environment(session)
    ray = str(Path(sysconfig.get_path("scripts")) / "ray")
    if env["RAY_AUTH_MODE"].lower() == "token" and token(env) is None:
        # Ray makes a token by itself for `ray.init` only.
        _run([ray, "get-auth-token", "--generate"], env, "making Ray's authentication token")
    # No --node-ip-address: Ray replaces a loopback address by a reachable one. The token guards its ports.
    command = [ray, "start", "--head", f"--node-ip-address={HOST}", f"--port={gcs_port}"]
    command += [f"--dashboard-host={HOST}", f"--dashboard-port={dashboard_port}", "--include-dashboard=true"]
    command += ["--disable-usage-stats"]
    _run(command, env, "starting Ray")
    session = replace(session, session_dir=session_dir_of((view for _, view in look().values()), session))
    save(session)
    deadline = time.monotonic() + START_TIMEOUT_S
    api = RayApi(session.dashboard)
    while api.version() is None:
        if not running(session):
            raise LocalClusterError(f"Ray ended while it started; its logs are in {session.session_dir}/logs")
        if time.monotonic() > deadline:
            raise LocalClusterError(
                f"Ray's dashboard did not answer within {START_TIMEOUT_S:.0f} s; "
                f"its log is {session.session_dir}/logs/dashboard.log"
            )
        time.sleep(0.3)
    return session


def _run(command: list[str], env: dict[str, str], what: str) -> None:
    # A session of its own: the terminal's Ctrl-C is for us, and we stop Ray in order.
    # Output goes to a file: Ray's daemons would hold a pipe open for ever.
    with tempfile.TemporaryFile("w+") as output:
        try:
            status = subprocess.run(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                timeout=START_TIMEOUT_S,
                check=False,
            ).returncode
        except FileNotFoundError as error:
            raise LocalClusterError(f"{what}: {command[0]} is missing; run `make serve` to install") from error
        except subprocess.TimeoutExpired:
            status = -1
        if status != 0:
            output.seek(0)
            raise LocalClusterError(f"{what} failed (`{' '.join(command)}`, status {status}):\n{output.read().strip()}")


# Stop


@dataclass(frozen=True)
class Ended:
    """What a stop achieved. ``left``: processes that would not die. ``taken``: our ports that somebody listens on."""

    count: int
    left: tuple[str, ...]
    taken: tuple[Listener, ...]


def end(session: Session, term_grace_s: float = TERM_GRACE_S) -> Ended:
    """End every process of ``session``, SIGTERM first, and forget it once nothing is left."""
    count = end_processes(lambda: processes(session), term_grace_s)
    left = tuple(_describe(process) for process in processes(session))
    taken = tuple(listeners(session.ports))
    if not left:
        forget_address(session)
        shutil.rmtree(session.folder, ignore_errors=True)
        _state_file().unlink(missing_ok=True)
    return Ended(count, left, taken)


def forget_address(session: Session) -> None:
    """Remove Ray's note of "the cluster that runs here" where it is about ``session``.

    ``ray stop`` does so too: the next ``serve run`` on this machine would otherwise try to join a cluster that is gone.
    """
    if not session.session_dir:
        return
    note = Path(session.session_dir).parent / "ray_current_cluster"
    with suppress(OSError, ValueError):
        if int(note.read_text().strip().rpartition(":")[2] or 0) in session.ports:
            note.unlink()


def end_processes(
    find: Callable[[], list[psutil.Process]], term_grace_s: float, kill_grace_s: float = KILL_GRACE_S
) -> int:
    """SIGTERM what ``find`` finds, SIGKILL what outlives ``term_grace_s``; returns how many ended.

    ``find`` is asked again and again: a process may have been started between the look and the signal.
    """
    seen: dict[int, psutil.Process] = {}
    start = time.monotonic()
    while found := find():
        waited = time.monotonic() - start
        if waited > term_grace_s + kill_grace_s:
            break
        for process in found:
            with suppress(psutil.NoSuchProcess):
                if waited >= term_grace_s:
                    process.kill()
                elif seen.get(process.pid) != process:
                    process.terminate()
            seen[process.pid] = process
        psutil.wait_procs(found, timeout=0.5)
    return len(seen) - len(found)


def _describe(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return f"process {process.pid}: {' '.join(process.cmdline())[:100] or process.name()}"
    return f"process {process.pid}"
