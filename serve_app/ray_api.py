"""Ray's REST API, as far as Modelyard's commands need it: what runs and where, deploy, shut down.

The same calls as ``serve deploy``, ``serve status`` and ``serve shutdown``, without importing Ray: the command stays
in the foreground for days and should weigh little.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

_APPLICATIONS = "/api/serve/applications/"
# The most that Ray's state API lists.
_ALL = "10000"


class RayApiError(RuntimeError):
    """The dashboard refused, or did not answer. The message says which."""


@dataclass(frozen=True)
class Application:
    """One Serve application: ``replicas`` is a line such as ``Model 1/2, Card 1/1`` (running/wanted)."""

    name: str
    status: str
    replicas: str
    message: str


@dataclass(frozen=True)
class ServeState:
    running: bool
    applications: tuple[Application, ...]
    http_host: str | None
    http_port: int | None

    def application(self, name: str) -> Application | None:
        return next((a for a in self.applications if a.name == name), None)


def token(environ: Mapping[str, str] = os.environ) -> str | None:
    """Ray's authentication token, from where Ray itself looks for it."""
    if environ.get("RAY_AUTH_TOKEN"):
        return environ["RAY_AUTH_TOKEN"].strip()
    named = environ.get("RAY_AUTH_TOKEN_PATH")
    try:
        return (Path(named) if named else Path.home() / ".ray" / "auth_token").read_text().strip() or None
    except OSError:
        return None


class RayApi:
    def __init__(self, address: str) -> None:
        """``address``: the dashboard's URL."""
        self.address = address.rstrip("/")
        # Never through a proxy that the environment names: this is our own cluster.
        self._http = httpx.Client(base_url=self.address, trust_env=False, timeout=10)

    def version(self) -> str | None:
        """Ray's version; ``None`` where no Ray answers."""
        try:
            response = self._request("GET", "/api/version", timeout=3)
            return str(response.json()["ray_version"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return None

    def state(self) -> ServeState:
        return parse_state(self.serve())

    def serve(self) -> Any:
        """All that Serve tells of its applications: ``ServeInstanceDetails`` as JSON."""
        return self._checked("GET", _APPLICATIONS).json()

    def get(self, path: str, **query: str) -> Any:
        """The ``data`` of an answer of the dashboard."""
        try:
            return self._checked("GET", path, params=query).json()["data"]
        except (ValueError, KeyError, TypeError) as error:
            raise RayApiError(f"Ray's dashboard at {self.address} answered {path} with something else") from error

    def listed(self, what: str, **query: str) -> list[Any]:
        """Everything of a kind (``nodes``, ``actors``, ``placement_groups``) that Ray's state API knows, in detail."""
        found = self.get(f"/api/v0/{what}", detail="1", limit=_ALL, **query)
        try:
            return list(found["result"]["result"])
        except (KeyError, TypeError) as error:
            raise RayApiError(f"Ray's dashboard at {self.address} lists no {what}") from error

    def metrics_targets(self) -> list[str]:
        """``host:port`` of each process of the cluster that exports metrics."""
        try:
            found = self._checked("GET", "/api/prometheus/sd").json()
            return [str(target) for group in found for target in group["targets"]]
        except (ValueError, KeyError, TypeError) as error:
            raise RayApiError(f"Ray's dashboard at {self.address} lists no metrics") from error

    def deploy(self, config: Mapping[str, Any]) -> None:
        """Ask for the whole state ``config``: applications that it does not name are deleted."""
        self._checked("PUT", _APPLICATIONS, json=config, timeout=60)

    def shut_down(self, timeout_s: float) -> None:
        """Shut Serve down; returns when requests have ended or ``timeout_s`` is over."""
        self._checked("DELETE", _APPLICATIONS, timeout=timeout_s)

    def _checked(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            response = self._request(method, path, **options)
        except httpx.HTTPError as error:
            raise RayApiError(
                f"Ray's dashboard at {self.address} did not answer: {error or type(error).__name__}"
            ) from error
        if not response.is_success:
            raise RayApiError(f"Ray's dashboard at {self.address} answered {response.status_code}: {response.text}")
        return response

    def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        # Read anew each time: starting a cluster may have made the token.
        known = token()
        headers = {"Authorization": f"Bearer {known}"} if known else {}
        response = self._http.request(method, path, headers=headers, **options)
        if response.status_code in (401, 403):
            raise RayApiError(
                f"the Ray at {self.address} refused our token ({response.status_code}): it was started with another. "
                "Set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to that cluster's token"
            )
        return response


def parse_state(answer: Mapping[str, Any]) -> ServeState:
    """The answer of ``GET /api/serve/applications/``, reduced to what we show."""
    http = answer.get("http_options") or {}
    applications: Mapping[str, Any] = answer.get("applications") or {}
    return ServeState(
        running=bool((answer.get("controller_info") or {}).get("node_id")),
        applications=tuple(_application(name, details) for name, details in sorted(applications.items())),
        http_host=http.get("host"),
        http_port=http.get("port"),
    )


def _application(name: str, details: Mapping[str, Any]) -> Application:
    deployments: Mapping[str, Any] = details.get("deployments") or {}
    replicas = ", ".join(
        f"{deployment} {sum(r.get('state') == 'RUNNING' for r in d.get('replicas') or ())}"
        f"/{d.get('target_num_replicas', '?')}"
        for deployment, d in deployments.items()
    )
    messages = [details.get("message"), *(d.get("message") for d in deployments.values())]
    return Application(
        name=name,
        status=str(details.get("status", "UNKNOWN")),
        replicas=replicas,
        # An application's message can be a summary ("deployment X is unhealthy"); the reason is in the deployment's.
        message="\n".join(dict.fromkeys(m.strip() for m in messages if m and m.strip())),
    )
