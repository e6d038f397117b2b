"""Who may ask for what: API keys and what each of them allows. Pure.

A keys file (``gateway/key_file.py`` finds it) holds hashes, never keys. A key is 32 random bytes, so one SHA-256 of it
can neither be guessed nor reversed, and costs a request a microsecond.
"""

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError, model_validator
from pydantic_core import ErrorDetails

from serve_app import errors
from serve_app.config import Int, ModelId, Spec
from serve_app.quota import UNLIMITED, Limits

# A whole keys file in the gateway's environment, for those who keep such things there.
KEYS_VARIABLE = "MODELYARD_KEYS"
PREFIX = "my-"
HASH_PREFIX = "sha256:"
# Longer than any key of ours: what is longer is not hashed.
MAX_KEY_BYTES = 512

KeyName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Priority = Literal["high", "normal", "low"]
_RANKS: dict[Priority, int] = {"high": -1, "normal": 0, "low": 1}


class Key(Spec):
    """One entry of the keys file."""

    name: KeyName = Field(description="What logs, metrics and quotas call it. Not secret.")
    hash: str = Field(
        pattern=rf"^{HASH_PREFIX}[0-9a-f]{{64}}$",
        repr=False,
        description="Of the key; `modelyard key NAME` makes both.",
    )
    models: tuple[ModelId, ...] | None = Field(
        default=None, description="Ids that it may ask for; a model's name stands for its further ids too. None: all."
    )
    metrics: bool = Field(
        default=False,
        description="Whether it may read `/metrics`, which names every model, and every key's `/usage`; `models: []`: "
        "only that.",
    )
    priority: Priority = Field(default="normal", description="Whose requests go first where a model is full.")
    max_concurrent: Int | None = Field(
        default=None,
        ge=1,
        description="Requests that it may have open at once, at each gateway replica; beyond it: 429.",
    )
    requests_per_minute: Int | None = Field(
        default=None, ge=1, description="On each model, over all gateway replicas; beyond it: 429."
    )
    tokens_per_minute: Int | None = Field(
        default=None, ge=1, description="The same in tokens, prompts and answers together."
    )


class KeysFile(Spec):
    """A whole keys file."""

    keys: tuple[Key, ...] = Field(
        description="At least one: an empty file would let nobody in, or everybody.", min_length=1
    )

    @model_validator(mode="after")
    def _told_apart(self) -> "KeysFile":
        names = [key.name for key in self.keys]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two keys have the name {twice}")
        if len({key.hash for key in self.keys}) < len(self.keys):
            raise ValueError("two keys have the same hash")
        return self


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request. ``name``: of the key; empty where no keys are configured. ``models``: None: all of them.
    ``metrics``: whether ``/metrics`` is for it, and every key's usage."""

    name: str = ""
    models: frozenset[str] | None = None
    priority: Priority = "normal"
    max_concurrent: int | None = None
    limits: Limits = UNLIMITED
    metrics: bool = False

    @property
    def rank(self) -> int:
        """Its priority as vLLM counts: lower goes first."""
        return _RANKS[self.priority]

    def may(self, asked: str, model: str | None = None) -> bool:
        """Use the id ``asked``, which stands for ``model``."""
        return self.models is None or asked in self.models or model in self.models

    def check(self, asked: str, model: str | None = None) -> None:
        """Raises ``Forbidden``, the same whether or not such a model exists."""
        if not self.may(asked, model):
            own = ", ".join(sorted(self.models or ())) or "none"
            raise errors.Forbidden(
                f"The key {self.name!r} may not use the model {asked[:256]!r}; it may use: {own}.", param="model"
            )


ANYBODY = Caller(metrics=True)


class KeyRing:
    """The keys that are in force."""

    def __init__(self, keys: Iterable[Key]) -> None:
        self._by_digest: dict[bytes, tuple[bytes, Caller]] = {}
        for key in keys:
            digest = bytes.fromhex(key.hash.removeprefix(HASH_PREFIX))
            models = None if key.models is None else frozenset(key.models)
            limits = Limits(key.requests_per_minute, key.tokens_per_minute)
            caller = Caller(key.name, models, key.priority, key.max_concurrent, limits, key.metrics)
            self._by_digest[digest] = (digest, caller)

    def caller(self, headers: Mapping[bytes, bytes]) -> Caller:
        """By ``Authorization: Bearer`` or ``x-api-key``, names in lower case; raises ``Unauthorized``."""
        given = _given(headers)
        if given is None:
            raise no_key()
        if len(given) <= MAX_KEY_BYTES:
            digest = hashlib.sha256(given).digest()
            # What the time of a look-up by digest may tell, nobody can steer: a key's digest cannot be chosen.
            found = self._by_digest.get(digest)
            if found is not None and hmac.compare_digest(found[0], digest):
                return found[1]
        raise errors.Unauthorized("This key is not known here.")


def no_key() -> errors.Unauthorized:
    return errors.Unauthorized("Send your key as the header Authorization: Bearer KEY, or x-api-key: KEY.")


def _given(headers: Mapping[bytes, bytes]) -> bytes | None:
    scheme, _, token = headers.get(b"authorization", b"").strip().partition(b" ")
    if scheme.lower() == b"bearer" and token.strip():
        return token.strip()
    return headers.get(b"x-api-key", b"").strip() or None


def parse(document: Any) -> KeyRing:
    """The keys of a file's parsed YAML. Raises ``ValueError`` with every fault and its path, and without any value: a
    key that was pasted where its hash belongs must not get into a log."""
    try:
        return KeyRing(KeysFile.model_validate(document).keys)
    except ValidationError as error:
        raise ValueError("; ".join(_told(fault) for fault in error.errors(include_input=False))) from None


def _told(fault: ErrorDetails) -> str:
    *above, last = fault["loc"] or ("the file",)
    if fault["type"] != "extra_forbidden":
        return f"{'.'.join(map(str, [*above, last]))}: {fault['msg']}"
    # The unknown word itself may be a key.
    known = Key.model_fields if above else KeysFile.model_fields
    return f"{'.'.join(map(str, above)) or 'the file'}: an unknown key; there are {', '.join(known)}"


def make(name: str) -> tuple[str, dict[str, str]]:
    """A new key, and its entry for the keys file. Raises ``ValueError``."""
    made = PREFIX + secrets.token_urlsafe(32)
    entry = {"name": name, "hash": hash_of(made)}
    parse({"keys": [entry]})
    return made, entry


def hash_of(key: str) -> str:
    return HASH_PREFIX + hashlib.sha256(key.encode()).hexdigest()
