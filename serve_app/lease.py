"""The messages that gateways and model replicas exchange through Serve.

Tokens never travel here: a gateway takes a *lease* on a replica with one Serve call, then talks plain HTTP to it.
The call stays open as long as the lease is held, so Serve counts it as one ongoing request (see docs/architecture.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from serve_app.config import RequestLimits
from serve_app.scaling import EngineStats

# Private headers between a gateway and the replicas' own HTTP port. Never forwarded from or to clients.
LEASE_HEADER = b"x-modelyard-lease"
ASKED_MODEL_HEADER = b"x-modelyard-model"
# On a refusal by the replica itself, so that a gateway can tell it from the engine's own answers.
REFUSED_HEADER = b"x-modelyard-refused"
UNKNOWN_LEASE = b"unknown"
# A gateway asks whether the replica's event loop turns: GET with a live lease's token, answered 204.
ALIVE_PATH = "/modelyard/alive"
# Count what this request costs, under this number: see ``Counted``. The count of a whole answer is in its head, "PROMPT
# GENERATED ENGINE_S"; that of a journal's stream comes in the same words after its last group; any other one on the
# lease.
COUNT_HEADER = b"x-modelyard-count"
COUNTED_HEADER = b"x-modelyard-counted"
# What its key's priority is, as vLLM counts: a whole number, lower goes first.
PRIORITY_HEADER = b"x-modelyard-priority"
# A client's: each token of my stream shall have its own event, whatever the load. Passed on as it is.
EVERY_TOKEN_HEADER = b"x-modelyard-every-token"
# The LoRA adapter that must answer: its name, and its folder on the replica's node, both in UTF-8. Without them the
# base model answers.
ADAPTER_HEADER = b"x-modelyard-adapter"
ADAPTER_PATH_HEADER = b"x-modelyard-adapter-path"
# Continuing a broken stream (see serve_app/model/journal.py). Request: keep a journal for me; so many bytes of the
# body are the journal so far; of this generation. Response: the stream has a journal, of this generation.
KEEP_HEADER = b"x-modelyard-keep"
RESUME_HEADER = b"x-modelyard-resume"
GENERATION_HEADER = b"x-modelyard-generation"
KEPT_HEADER = b"x-modelyard-kept"
RECORD, GROUP_END = b"\x1f", b"\x1e"


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a started engine says of itself.

    ``tasks``: vLLM's names of what the model can do. ``paths``: the HTTP paths that its app answers.
    ``max_model_len``: context length in tokens, where the engine has one.
    """

    tasks: tuple[str, ...]
    paths: frozenset[str]
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True)
class Grant:
    """First message of a lease: where to send requests, the token that opens that port, and whose streams the replica
    can continue (see ``resume.generation``)."""

    replica: str
    host: str
    port: int
    token: str
    generation: str


@dataclass(frozen=True, slots=True)
class Counted:
    """Later message of a lease: what the request that asked for it under ``number`` cost this replica's engine, where
    the answer itself did not say so (``COUNT_HEADER``), as when its client left.

    ``prompt`` and ``generated`` are tokens; ``generated`` with those that came from another replica's journal, so that
    of a stream that moved the last count is the whole. ``engine_s``: how long this replica alone had it, in seconds.
    """

    number: str
    prompt: int
    generated: int
    engine_s: float

    @property
    def in_words(self) -> bytes:
        return b"%d %d %.4f" % (self.prompt, self.generated, self.engine_s)


@dataclass(frozen=True, slots=True)
class StartReport:
    """What a replica tells its card of its start: done (``facts`` and ``seconds``) or failed (``error``: one line).

    ``at``: when the start began, Unix time in seconds by the clock of the replica's node. It tells an older start from
    a newer one, which is as right as the nodes' clocks agree.
    """

    replica: str
    at: float
    facts: EngineFacts | None = None
    seconds: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CardView:
    """What gateways know of one model beyond Serve's own status.

    ``adapters``: id → folder; each is an id of its own, and no other name of the model.
    ``start_s``: the usual time of a replica's start in seconds, measured on this model's own replicas; None before the
    first. ``wake_s``: the usual time from the first request to a sleeping model until it answers; None before the first
    of those. ``waking_for_s``: how long it has been waking now; None where it is not. ``held``: requests that wait at
    gateways. ``load``: what its engines do, all together, with the mean of their ``kv_usage``; None: none has told
    lately. ``facts`` survive the last replica, so that a sleeping model is still described. ``error``: why the newest
    start failed, one line; None where it succeeded or is not over. ``loading``: how far a start is that is under way,
    one line. ``alive``: replicas that were heard of lately.
    ``created``: when the card was made, Unix time in seconds; 0: it has not been heard yet.
    """

    also_known_as: tuple[str, ...] = ()
    adapters: Mapping[str, str] = field(default_factory=dict)
    limits: RequestLimits = field(default_factory=lambda: RequestLimits())
    routing: str = "prefix"
    facts: EngineFacts | None = None
    start_s: float | None = None
    wake_s: float | None = None
    waking_for_s: float | None = None
    error: str | None = None
    loading: str = ""
    alive: int = 0
    held: int = 0
    load: EngineStats | None = None
    created: int = 0

    @property
    def ready_in_s(self) -> float | None:
        """Time in seconds until a model that sleeps or starts will probably answer; None where nothing was measured.
        What takes longer than usual is expected to take a tenth more, over and over."""
        usual = self.wake_s or self.start_s
        if usual is None:
            return None
        return max(usual - (self.waking_for_s or 0.0), usual / 10)
