"""What a deployment file may say. Frozen models; unknown keys are refused.

A Modelyard deployment file is a Ray Serve config: one application per model and one for the gateway. This module
describes the parts that are ours:

* ``ModelArgs``: ``args:`` of a model application. A change here needs a new engine, so Serve restarts the replicas.
* ``CardSettings``: ``user_config:`` of a model's ``Card`` deployment. A change here applies live.
* ``GatewaySettings``: ``user_config:`` of the gateway's ``Gateway`` deployment. A change here applies live.

``check.py`` reads whole files and turns every fault into a line with its path. Nothing here starts anything.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    Strict,
    StringConstraints,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

# Deployment names inside the applications: Serve configs override options and user_config by these names.
MODEL_DEPLOYMENT = "Model"
CARD_DEPLOYMENT = "Card"
GATEWAY_DEPLOYMENT = "Gateway"
MODEL_IMPORT_PATH = "serve_app.model:app"
GATEWAY_IMPORT_PATH = "serve_app.gateway:app"
# The autoscaling policy of ``Model`` deployments.
QUEUE_DEPTH = "serve_app.policy:queue_depth"

APP_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def _absolute(path: str) -> str:
    if not path.startswith("/") or not path.isprintable():
        raise ValueError(f"must be an absolute path, is {path!r}")
    return path


AbsolutePath = Annotated[str, AfterValidator(_absolute)]
ModelId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,254}$")]

# Ray's rules, which are those of Kubernetes' labels.
_LABEL = r"[A-Za-z0-9](?:[\w.-]{0,61}[A-Za-z0-9])?"
LABEL_KEY = re.compile(rf"(?:[A-Za-z0-9][A-Za-z0-9.-]*/)?{_LABEL}", re.ASCII)
LABEL_SELECTOR = re.compile(rf"!?(?:{_LABEL}|in\({_LABEL}(?:, ?{_LABEL})*\))", re.ASCII)

# vLLM's own default differs by device (256, or 1,024 on large GPUs). Slots must be known before the engine exists,
# so we always set it.
DEFAULT_MAX_NUM_SEQS = 256

# How much of its share of a GPU an engine fills. vLLM counts neither CUDA's own memory per process nor the libraries',
# and leaves about as much of a whole GPU by default.
FILLED_OF_SHARE = 0.9

# Numbers must be written as numbers: pydantic would otherwise take `true` for 1.
Int = Annotated[int, Strict()]
Float = Annotated[float, Strict()]


class Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class FakeScript(Spec):
    """What the scripted fake engine does (tests and load tests only). Times in seconds."""

    start_s: Float = Field(default=0.0, ge=0, description="How long the engine takes to start.")
    fail_start: str | None = Field(default=None, description="Fail to start, with this message.")
    first_token_s: Float = Field(default=0.0, ge=0, description="Delay before the first token.")
    token_interval_s: Float = Field(default=0.0, ge=0, description="Delay between tokens.")
    tokens: Int = Field(default=16, ge=1, description="Tokens per answer where the request gives no max_tokens.")
    process: bool = Field(default=False, description="Run the token clock in a process of its own, as vLLM does.")
    tasks: tuple[Literal["generate", "embed", "score", "transcription"], ...] = Field(
        default=("generate",), description="What the engine says it can do."
    )


class Source(Spec):
    """Where a model's weights come from: exactly one of ``hub``, ``path``, ``shape``, ``demo`` or ``fake``."""

    hub: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$",
        description="Hugging Face id, for example org/name. A revision goes to engine.revision.",
    )
    path: str | None = Field(
        default=None,
        min_length=1,
        description="Folder with config.json, weights and tokenizer: an absolute path, there on every node that may "
        "run the model. Relative paths are refused: a replica does not run in the folder of the command.",
    )
    shape: str | None = Field(
        default=None,
        min_length=1,
        description="A config.json: the engine runs this shape with dummy weights (speed only). An absolute path, or "
        "shapes/NAME.json for one of those in deployments/shapes.",
    )
    demo: Literal["smollm2-135m-instruct"] | None = Field(
        default=None, description="The small real model that `modelyard prepare` makes from a registry package."
    )
    fake: FakeScript | None = Field(default=None, description="The scripted fake engine: tests and load tests only.")
    tokenizer: str | None = Field(
        default=None,
        min_length=1,
        description="Hub id or folder (absolute path) of the tokenizer. `shape` uses the demo model's unless told "
        "otherwise.",
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> "Source":
        given = [k for k in ("hub", "path", "shape", "demo", "fake") if getattr(self, k) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of hub, path, shape, demo; found {', '.join(given) or 'none'}")
        return self


class Resources(Spec):
    """What each replica asks of the cluster."""

    num_cpus: Float = Field(default=1.0, ge=0, description="CPUs per replica.")
    num_gpus: Float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="GPUs per worker (a replica has tensor x pipeline workers). 0: the CPU engine. "
        "A fraction shares a GPU between models and needs tensor x pipeline = 1; the engine then fills nine tenths of "
        "it, or what engine.gpu_memory_utilization says, which may not be more than the fraction.",
    )
    accelerator_type: str | None = Field(default=None, description="Ray's accelerator type, for example H100.")
    custom: dict[str, Float] = Field(default_factory=dict, description="Custom Ray resources per replica.")
    labels: dict[str, str] = Field(
        default_factory=dict,
        description="Only nodes with these labels: value, !value, in(a, b) or !in(a, b), Ray's label selectors.",
    )

    @property
    def shares_a_gpu(self) -> bool:
        return 0 < self.num_gpus < 1

    @field_validator("custom")
    @classmethod
    def _custom_only(cls, custom: dict[str, float]) -> dict[str, float]:
        for name, amount in custom.items():
            if name in ("CPU", "GPU", "memory", "object_store_memory"):
                raise ValueError(f"{name} is not a custom resource: use num_cpus and num_gpus")
            if amount <= 0:
                raise ValueError(f"{name} must be greater than 0, is {amount:g}")
        return custom

    @field_validator("labels")
    @classmethod
    def _selectors(cls, labels: dict[str, str]) -> dict[str, str]:
        for key, value in labels.items():
            if not LABEL_KEY.fullmatch(key):
                raise ValueError(
                    f"{key!r} is no label's name: letters, digits, dash, underscore and dot, with a prefix/"
                )
            if not LABEL_SELECTOR.fullmatch(value):
                raise ValueError(f"{key}: {value!r} is no label selector: write value, !value, in(a, b) or !in(a, b)")
        return labels


def share_problem(num_gpus: object, utilization: object) -> str:
    """What is wrong with an engine's ``gpu_memory_utilization`` beside its share of a GPU; empty: nothing."""
    if not isinstance(num_gpus, int | float) or not isinstance(utilization, int | float) or not 0 < num_gpus < 1:
        return ""
    if utilization <= num_gpus:
        return ""
    return (
        f"must be at most {num_gpus:g}, which is resources.num_gpus, is {utilization:g}: the rest is for other models"
    )


class ModelArgs(Spec):
    """``args:`` of one model application: what needs a new engine when it changes."""

    source: Source = Field(description="Where the weights come from.")
    engine: dict[str, Any] = Field(
        default_factory=dict, description="vLLM's own engine arguments (AsyncEngineArgs), checked by `modelyard check`."
    )
    frontend: dict[str, Any] = Field(
        default_factory=dict,
        description="vLLM's own API-server arguments that shape answers: chat_template, tool_call_parser, …",
    )
    tensor_parallel_size: Int = Field(default=1, ge=1, description="GPUs (workers) over which each layer is split.")
    pipeline_parallel_size: Int = Field(
        default=1, ge=1, description="Groups of workers over which the layers are split."
    )
    resources: Resources = Field(default=Resources(), description="What each replica asks of the cluster.")
    overcommit: Int = Field(
        default=8,
        ge=0,
        description="Requests that a replica accepts beyond the engine's max_num_seqs, so the engine never starves.",
    )
    env: dict[str, str] = Field(default_factory=dict, description="Environment variables of the engine's processes.")

    @field_validator("engine")
    @classmethod
    def _slots_are_known(cls, engine: dict[str, Any]) -> dict[str, Any]:
        seqs = engine.get("max_num_seqs", DEFAULT_MAX_NUM_SEQS)
        if type(seqs) is not int or seqs < 1:
            raise ValueError(f"max_num_seqs must be a whole number of at least 1, is {seqs!r}")
        return engine

    @model_validator(mode="after")
    def _fractions_only_alone(self) -> "ModelArgs":
        gpus = self.resources.num_gpus
        if self.workers > 1 and gpus not in (0, 1):
            raise ValueError(
                f"resources.num_gpus is {gpus:g}: with tensor x pipeline = {self.workers} each worker needs 1 GPU or 0"
            )
        return self

    @model_validator(mode="after")
    def _stages_on_cpus_are_compiled(self) -> "ModelArgs":
        if self.pipeline_parallel_size > 1 and self.resources.num_gpus == 0 and self.engine.get("enforce_eager"):
            raise ValueError(
                "engine.enforce_eager is set: pipeline stages on CPUs would start and never answer: vLLM prepares "
                "them only where it compiles. Leave it out, or say engine.compilation_config: {mode: 1, backend: eager}"
            )
        return self

    @model_validator(mode="after")
    def _within_its_share(self) -> "ModelArgs":
        if problem := share_problem(self.resources.num_gpus, self.engine.get("gpu_memory_utilization")):
            raise ValueError(f"engine.gpu_memory_utilization {problem}")
        return self

    @property
    def gpu_memory_utilization(self) -> float | None:
        """How much of each GPU's whole memory the engine fills, weights and KV cache together; None: vLLM's default."""
        if (given := self.engine.get("gpu_memory_utilization")) is not None:
            return float(given)
        share = self.resources.num_gpus
        return round(share * FILLED_OF_SHARE, 4) if self.resources.shares_a_gpu else None

    @property
    def workers(self) -> int:
        """Engine workers per replica: tensor x pipeline."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def max_num_seqs(self) -> int:
        return int(self.engine.get("max_num_seqs", DEFAULT_MAX_NUM_SEQS))

    @property
    def slots(self) -> int:
        """Requests that one replica holds at once: Serve's ``max_ongoing_requests``."""
        return self.max_num_seqs + self.overcommit


class RequestLimits(Spec):
    """Bounds on one model's requests, enforced by each gateway replica."""

    max_waiting: Int = Field(default=512, ge=0, description="Requests that may wait for a replica; beyond it: 429.")
    wait_s: Float = Field(default=60.0, gt=0, description="Longest wait for a replica; beyond it: 503.")
    hold_requests: Int = Field(
        default=512,
        ge=0,
        description="Requests that may wait while no replica runs (asleep, starting); beyond it: 503.",
    )
    hold_s: Float = Field(
        default=300.0, gt=0, description="Longest wait while no replica runs. Longer than a start; beyond it: 503."
    )
    keep_alive: bool = Field(
        default=False,
        description="Streaming requests that wait get SSE comments with the progress meanwhile, as those do that ask "
        "for it with the header x-modelyard-keep-alive: 1. Their later errors are events in the stream.",
    )
    attempts: Int = Field(
        default=4,
        ge=1,
        description="Replicas that one request may lose. Beyond it: 503, or an error event in a stream that had begun.",
    )
    grace_s: Float = Field(
        default=10.0,
        ge=0,
        description="How long requests may stay on a replica that is leaving (scaled down, updated) before they move "
        "to another one. Keep it below the Model deployment's graceful_shutdown_timeout_s.",
    )
    silence_s: Float = Field(
        default=30.0,
        gt=0,
        description="Longest time that a replica or its engine may show no sign of life; then its requests move and "
        "it is replaced. One step of the engine must be shorter.",
    )
    token_gap_s: Float = Field(
        default=120.0,
        gt=0,
        description="Longest pause inside one stream while its replica lives; then the stream moves.",
    )
    chunk_s: Float = Field(
        default=0.02,
        ge=0,
        le=1,
        description="Under load, the longest time that a token of a stream waits for others to share its event with. "
        "0: each token has its own event, as in requests with the header x-modelyard-every-token: 1.",
    )


class Scaling(Spec):
    """How the number of replicas follows the queue, within the bounds of ``Model``'s ``autoscaling_config``."""

    target_queue: Float = Field(
        default=2.0,
        ge=0,
        description="Requests per replica that may wait, in the engines and at the gateways; beyond it replicas are "
        "added.",
    )
    down_after_s: Float = Field(
        default=600.0,
        ge=0,
        description="Replicas are taken away once fewer would have done for so long. Longer than a start is wise.",
    )
    idle_s: Float = Field(
        default=300.0, ge=0, description="A model whose min_replicas is 0 sleeps after so long without a request."
    )
    wait_for_nodes: bool = Field(
        default=False,
        description="Ask for replicas that have no room in the cluster, for a cluster autoscaler to add nodes.",
    )


class CardSettings(Spec):
    """``user_config:`` of the ``Card`` deployment: applies live, restarts nothing."""

    also_known_as: tuple[ModelId, ...] = Field(default=(), description="Further ids of this model; slashes allowed.")
    adapters: dict[ModelId, AbsolutePath] = Field(
        default_factory=dict,
        description="LoRA adapters, ids of their own: id → folder, there on every node that may run the model. Needs "
        "engine: {enable_lora: true}.",
    )
    limits: RequestLimits = Field(default=RequestLimits(), description="Bounds on this model's requests.")
    routing: Literal["prefix", "least_loaded", "round_robin"] = Field(
        default="prefix",
        description="Which replica gets a request. prefix: one that has seen how it begins (or its session) while it "
        "has room, else one that carries little; least_loaded: one that carries little; round_robin: each in turn.",
    )
    scaling: Scaling = Field(default=Scaling(), description="How the number of replicas follows the queue.")

    @field_validator("adapters")
    @classmethod
    def _told_apart(cls, adapters: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        for twice in adapters.keys() & set(info.data.get("also_known_as", ())):
            raise ValueError(f"{twice} is a further id of the model already")
        return adapters


class GatewayArgs(Spec):
    """``args:`` of the gateway application. Nothing yet needs a restart."""


Weight = Annotated[float, Strict(), Field(gt=0)]
# The tags hold a character that no id has: `check` leaves what is no key of the file out of its paths.
Target = Annotated[
    Annotated[ModelId, Tag("one model")]
    | Annotated[dict[ModelId, Weight], Field(min_length=1), Tag("weighted models")],
    Discriminator(lambda to: "weighted models" if isinstance(to, dict) else "one model"),
]
# One bound on the length of an answer, as the protocols call it.
LENGTH_FIELDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
# What only the request itself says: which model it names, and what is kept of it.
REQUESTS_OWN_FIELDS = ("model", "store", "background", "previous_response_id")


class Name(Spec):
    """What one name means: the models behind it, and what is changed in requests that ask for it."""

    to: Target = Field(
        description="A model's id, or {id: weight, …}: each request goes to one of them, by weight, and a user's "
        "requests always to the same one."
    )
    fallback: tuple[ModelId, ...] = Field(
        default=(), description="Models to ask in this order where the first cannot serve, before the answer began."
    )
    defaults: dict[str, JsonValue] = Field(
        default_factory=dict, description="Body fields that are set where a request does not give them (JSON routes)."
    )
    max_tokens: Int | None = Field(
        default=None,
        ge=1,
        description="Most tokens of an answer: a larger bound is lowered to it, an absent one is set to it.",
    )

    @field_validator("defaults")
    @classmethod
    def _leave_the_request_alone(cls, defaults: dict[str, Any]) -> dict[str, Any]:
        for key in REQUESTS_OWN_FIELDS:
            if key in defaults:
                raise ValueError(f"{key} is for the request alone to say")
        lengths = [key for key in LENGTH_FIELDS if key in defaults]
        if len(lengths) > 1:
            raise ValueError(f"{' and '.join(lengths)} are one bound: give it once")
        if lengths and (type(defaults[lengths[0]]) is not int or defaults[lengths[0]] < 1):
            raise ValueError(f"{lengths[0]} must be a whole number of at least 1, is {defaults[lengths[0]]!r}")
        return defaults

    @property
    def weights(self) -> dict[str, float]:
        """``to`` as a mapping."""
        return self.to if isinstance(self.to, dict) else {self.to: 1.0}

    @property
    def targets(self) -> tuple[str, ...]:
        """Every id that it leads to, the heaviest first, then the fallbacks."""
        heaviest = sorted(self.weights, key=lambda target: -self.weights[target])
        return tuple(dict.fromkeys((*heaviest, *self.fallback)))


class GatewaySettings(Spec):
    """``user_config:`` of the ``Gateway`` deployment: applies live."""

    max_body_mb: Float = Field(default=32.0, gt=0, description="Largest request body; beyond it: 413.")
    refresh_s: Float = Field(
        default=1.0, gt=0, le=5.0, description="How often the gateway asks Serve which models exist."
    )
    keys_file: AbsolutePath | None = Field(
        default=None,
        description="Who may use this endpoint: an absolute path, there on every node that runs a gateway. Read again "
        "when it changes. Without it: the keys in the gateway's variable MODELYARD_KEYS; without both, everybody.",
    )
    usage_dir: AbsolutePath | None = Field(
        default=None,
        description="Where gateways keep what each key used of each model: the absolute path of a folder that exists "
        "and is the same one for all of them. Without it no usage is kept.",
    )
    cors_origins: tuple[str, ...] = Field(
        default=(),
        description='Origins whose web pages may call this endpoint from a browser, or "*"; none by default.',
    )
    names: dict[ModelId, Name] = Field(
        default_factory=dict, description="Names of the gateway's own, and what they mean: see docs/names.md."
    )

    @field_validator("names")
    @classmethod
    def _names_mean_models(cls, names: dict[str, Name]) -> dict[str, Name]:
        for asked, name in names.items():
            if chained := [target for target in name.targets if target in names]:
                raise ValueError(f"{asked} leads to {chained[0]}, which is itself a name: a name leads to models only")
        return names
