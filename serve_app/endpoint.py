"""How commands ask a running endpoint."""

import os
from typing import Any

import httpx

TIMEOUT_S = 10.0
KEY_VARIABLE = "MODELYARD_API_KEY"


class EndpointError(RuntimeError):
    """The endpoint cannot be asked, or refuses; the message says why and what to do next."""


def get(url: str, path: str, **query: str | None) -> httpx.Response:
    """The answer to ``GET path``, whatever its status, with the key of ``KEY_VARIABLE``. ``url``: the endpoint's
    address, with or without ``/v1``. Raises ``EndpointError`` where there is none."""
    address = address_of(url)
    key = os.environ.get(KEY_VARIABLE, "")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    params = {name: value for name, value in query.items() if value is not None}
    try:
        return httpx.get(f"{address}{path}", params=params, headers=headers, timeout=TIMEOUT_S, trust_env=False)
    except (httpx.UnsupportedProtocol, httpx.InvalidURL):
        raise EndpointError(f"{url!r} is no address. Write it like http://127.0.0.1:8000.") from None
    except httpx.TimeoutException:
        raise EndpointError(
            f"{address} took the connection but did not answer within {TIMEOUT_S:g} s. Look at Ray's dashboard, or ask "
            "again."
        ) from None
    except httpx.HTTPError as error:
        raise EndpointError(
            f"Nothing answers at {address} ({error or type(error).__name__}). Start it with `modelyard serve FILE`, or "
            "name the endpoint: --url http://HOST:PORT."
        ) from None


def address_of(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


def told(answer: httpx.Response) -> dict[str, Any]:
    """Its JSON; empty where it is no JSON object."""
    try:
        read = answer.json()
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}


def refusal(url: str, path: str, answer: httpx.Response) -> EndpointError:
    """What an answer means that is not the one that was asked for."""
    address, error = address_of(url), told(answer).get("error")
    says = error.get("message") if isinstance(error, dict) else None
    if says and answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        return EndpointError(f"The gateway at {address} cannot say yet: {says} Ask again in a moment.")
    if says and answer.status_code == httpx.codes.UNAUTHORIZED:
        return EndpointError(f"The gateway at {address} asks for a key: put yours into {KEY_VARIABLE}. It says: {says}")
    if says and answer.is_client_error:
        return EndpointError(f"The gateway at {address} refuses: {says}")
    return EndpointError(
        f"What answers at {address} is no Modelyard gateway (status {answer.status_code} for {path}). Give the "
        "gateway's address with --url, with its route prefix if it has one."
    )
