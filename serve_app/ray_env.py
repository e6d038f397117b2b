"""What must be in the environment before Ray starts, and why.

Ray reads these once, in each of its processes: on a running cluster it is too late. ``modelyard env`` prints them for a
shell, ``modelyard serve`` sets them itself, and the gateway names those that are missing.
"""

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from serve_app import haproxy


@dataclass(frozen=True)
class Setting:
    name: str
    value: str
    why: str


SETTINGS = (
    Setting(
        "RAY_SERVE_ENABLE_HA_PROXY",
        "1",
        "HAProxy in front of the gateway. Serve's own Python proxy costs four times the CPU per streamed token.",
    ),
    Setting(
        "RAY_SERVE_HAPROXY_BINARY_PATH",
        haproxy.program(),
        "HAProxy without kernel splicing, with which it overlooks clients that leave before their answer has begun.",
    ),
    Setting(
        "RAY_SERVE_HAPROXY_RETRY_ON",
        "conn-failure empty-response",
        "A request whose gateway dies before the answer begins is sent to another. Nothing is stored: a second run "
        "costs one generation, and the first ends with its gateway.",
    ),
    Setting(
        haproxy.MAXCONN,
        "16384",
        f"Clients at once per node; those beyond wait without a word. Serve's default: {haproxy.SERVES_MAXCONN:,}.",
    ),
    Setting(
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH",
        "serve_app.one_id:middlewares",
        "One x-request-id per answer. Serve adds the one that it knows to every answer, also to one that has it. Every "
        "node's proxy imports this, so Modelyard must be installed on each.",
    ),
    Setting(
        "RAY_process_group_cleanup_enabled",
        "true",
        "When a replica dies, Ray ends the processes that it had started too: an engine left behind keeps its memory.",
    ),
    Setting(
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS",
        "1",
        "A frozen replica is ended at once, so that its GPUs are free for the next one. Serve would first give it the "
        "whole time that streams have to finish.",
    ),
)

# Not read by the cluster, but by the commands of the shell that talk to it.
COMMANDS = (
    Setting(
        "RAY_AUTH_MODE",
        "token",
        "`serve deploy` and `serve status` send the token that Ray's clusters ask for by default.",
    ),
)


def missing(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Names that are unset. One that is set to something else was somebody's decision and is not missing."""
    return [setting.name for setting in SETTINGS if setting.name not in environ]


def with_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` and what it lacks."""
    return {setting.name: setting.value for setting in SETTINGS} | dict(environ)


def export_lines() -> str:
    """Shell lines for ``eval "$(modelyard env)"``, each after its reason."""
    return "\n".join(f"# {s.why}\nexport {s.name}={shlex.quote(s.value)}" for s in (*SETTINGS, *COMMANDS))
