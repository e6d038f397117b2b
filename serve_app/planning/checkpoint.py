"""A model's ``config.json`` and the size of its weights, from wherever its source points. Reads no weights.

The hub is asked over plain HTTP, so that a plan needs nothing that only engines need. As with Hugging Face's own
tools: ``HF_ENDPOINT`` names a mirror, ``HF_TOKEN`` (or the file that `hf auth login` writes) opens gated models,
``HF_HUB_CACHE`` or ``HF_HOME`` is where downloads lie, ``HF_HUB_OFFLINE`` forbids the network.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from serve_app import demo_model
from serve_app.config import Source
from serve_app.sources import SHAPES, SourceError, read_shape, resolve

# For connecting, and for each pause of an answer.
TIMEOUT_S = 10.0
_HUB = "https://huggingface.co"
_INDEX = "model.safetensors.index.json"
_WEIGHTS = "model.safetensors"
_DEMO_SHAPE = SHAPES / "SmolLM2-135M-Instruct.json"


class CheckpointError(RuntimeError):
    """The config of a source cannot be had, in one line that says what to do."""


class Unobtainable(CheckpointError):
    """The hub has no such model, or not for this account, or it may not or cannot be asked: no engine would get it."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """``config``: the parsed ``config.json``. ``origin``: where it came from, in words.

    ``stored_bytes``: the size of the checkpoint's weights, None where nothing beside the config tells it.
    """

    config: Mapping[str, Any]
    origin: str
    stored_bytes: int | None = None


def checkpoint_config(source: Source, engine: Mapping[str, Any], env: Mapping[str, str] | None = None) -> Checkpoint:
    """The checkpoint of ``source``, as an engine with the arguments ``engine`` would load it.

    ``env``: variables that the entry sets for its engine; they win over those of this process.
    CheckpointError: it is not there, not readable, gated, or the hub cannot be reached.
    """
    if source.hub is not None:
        revision = str(engine.get("hf_config_revision") or engine.get("revision") or "main")
        return _from_hub(source.hub, revision, _Hub.of({**os.environ, **(env or {})}))
    try:
        if source.shape is not None:
            return Checkpoint(read_shape(resolve(source)), f"the shape {source.shape}")
        if source.path is not None:
            return _folder(resolve(source), f"the folder {source.path}")
        if source.demo is not None:
            return _demo()
    except SourceError as e:
        raise CheckpointError(str(e)) from e
    raise CheckpointError("the scripted fake engine has no checkpoint")


def hub_folder(repo: str, env: Mapping[str, str]) -> Path:
    """Where the hub cache keeps the model ``repo``; it need not be there."""
    return _cache_folder(repo, _Hub.of(env).cache)


def _demo() -> Checkpoint:
    try:
        return _folder(demo_model.path(), "the demo model")
    except demo_model.DemoModelError as e:
        if not _DEMO_SHAPE.is_file():
            raise CheckpointError(str(e)) from e
        # What the package carries has this very shape.
        return Checkpoint(read_shape(_DEMO_SHAPE), f"the shape {_DEMO_SHAPE.name}: the demo model is not prepared here")


def _folder(folder: Path, origin: str) -> Checkpoint:
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json on this machine: run the plan where the model's files are")
    stored = None
    try:
        if (folder / _INDEX).is_file():
            stored = _total_size((folder / _INDEX).read_bytes())
        elif (folder / _WEIGHTS).is_file():
            stored = (folder / _WEIGHTS).stat().st_size
    except OSError:
        pass  # the config tells enough
    return Checkpoint(read_shape(folder / "config.json"), origin, stored)


def _total_size(index: bytes) -> int | None:
    """The weights' size that an index of safetensors files names."""
    try:
        size = json.loads(index)["metadata"]["total_size"]
        return int(size) if int(size) > 0 else None
    except (ValueError, TypeError, KeyError):
        return None


# --- the hub


@dataclass(frozen=True, slots=True)
class _Hub:
    endpoint: str
    token: str | None
    cache: Path
    offline: bool

    @classmethod
    def of(cls, env: Mapping[str, str]) -> "_Hub":
        base = Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        home = Path(env["HF_HOME"]).expanduser() if env.get("HF_HOME") else base / "huggingface"
        cache = env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE")
        offline = env.get("HF_HUB_OFFLINE") or env.get("TRANSFORMERS_OFFLINE") or ""
        token = env.get("HF_TOKEN") or env.get("HUGGING_FACE_HUB_TOKEN")
        try:
            token = token or Path(env.get("HF_TOKEN_PATH") or home / "token").expanduser().read_text()
        except (OSError, UnicodeDecodeError):
            token = None
        return cls(
            endpoint=(env.get("HF_ENDPOINT") or _HUB).rstrip("/"),
            token=(token or "").strip() or None,
            cache=Path(cache).expanduser() if cache else home / "hub",
            offline=offline.upper() in ("1", "ON", "YES", "TRUE"),
        )


def _from_hub(repo: str, revision: str, hub: _Hub) -> Checkpoint:
    snapshot = _cached(repo, revision, hub.cache)
    if snapshot is not None:
        try:
            return _folder(snapshot, f"the hub cache, {repo} at {snapshot.name[:12]}")
        except SourceError as e:
            raise CheckpointError(f"{e}; remove it to have it fetched again") from e
    if hub.offline:
        raise Unobtainable(
            f"{repo} ({revision}) is not in the hub cache {hub.cache} and HF_HUB_OFFLINE is set: fetch it with "
            f"`hf download {repo} config.json`, or unset HF_HUB_OFFLINE"
        )
    headers = {"authorization": f"Bearer {hub.token}"} if hub.token else {}
    try:
        with httpx.Client(timeout=TIMEOUT_S, headers=headers, follow_redirects=True) as client:
            at = f"{hub.endpoint}/{repo}/resolve/{revision}"
            answer = client.get(f"{at}/config.json")
            config = _parsed(answer, repo, revision, hub)
            return Checkpoint(config, f"{hub.endpoint}, {repo} at {revision}", _stored_bytes(client, at))
    except (httpx.UnsupportedProtocol, httpx.InvalidURL, UnicodeError):
        raise CheckpointError(f"HF_ENDPOINT is {hub.endpoint!r}, which is no address: write it like {_HUB}") from None
    except httpx.TimeoutException:
        why = f"no answer within {TIMEOUT_S:g} s"
    except httpx.HTTPError as error:
        why = str(error) or type(error).__name__
    raise Unobtainable(
        f"{hub.endpoint} cannot be reached for {repo} ({why}): set HF_ENDPOINT to a mirror, or plan with a local copy "
        "of the model's config.json as source.path or source.shape"
    )


def _cached(repo: str, revision: str, cache: Path) -> Path | None:
    """The folder of a downloaded revision that has a ``config.json``."""
    root = _cache_folder(repo, cache)
    try:
        commit = (root / "refs" / revision).read_text().strip()
    except OSError:
        commit = revision
    snapshot = root / "snapshots" / commit
    return snapshot if (snapshot / "config.json").is_file() else None


def _cache_folder(repo: str, cache: Path) -> Path:
    return cache / f"models--{repo.replace('/', '--')}"


def _parsed(answer: httpx.Response, repo: str, revision: str, hub: _Hub) -> Mapping[str, Any]:
    if not answer.is_success:
        raise _refusal(answer, repo, revision, hub)
    try:
        config = answer.json()
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise CheckpointError(f"{hub.endpoint} sent something else than a config.json for {repo}: is it a hub?")
    return config


def _refusal(answer: httpx.Response, repo: str, revision: str, hub: _Hub) -> CheckpointError:
    code, status = answer.headers.get("x-error-code"), answer.status_code
    page = f"{hub.endpoint}/{repo}"
    if code == "GatedRepo" or (status == 403 and code is None):
        if hub.token is None:
            return Unobtainable(
                f"{repo} is gated: accept its licence at {page}, then set HF_TOKEN to a token of that account"
            )
        return Unobtainable(
            f"{repo} is gated and the account of your token has no access: accept its licence at {page}"
        )
    if status == 404 and code == "RevisionNotFound":
        return Unobtainable(f"{repo} has no revision {revision}: see {page}, then correct engine.revision")
    if status == 404 and code == "EntryNotFound":
        return CheckpointError(f"{repo} ({revision}) has no config.json, which plan needs: see {page}")
    if status in (401, 404):
        hint = "set HF_TOKEN if it is private" if hub.token is None else "your token may lack access to it"
        return Unobtainable(f"{repo} is not at {hub.endpoint}: correct source.hub; {hint}")
    return CheckpointError(f"{hub.endpoint} answered {status} for the config.json of {repo}: try again later")


def _stored_bytes(client: httpx.Client, at: str) -> int | None:
    """The weights' size, from the index or from the head of the single file. None: neither tells."""
    try:
        index = client.get(f"{at}/{_INDEX}")
        if index.is_success:
            return _total_size(index.content)
        # The hub redirects to where the file is, and says its size on the way.
        head = client.head(f"{at}/{_WEIGHTS}", follow_redirects=False)
        size = head.headers.get("x-linked-size") or (head.headers.get("content-length") if head.is_success else None)
        return int(size) if size and int(size) > 0 else None
    except (httpx.HTTPError, ValueError):
        return None
