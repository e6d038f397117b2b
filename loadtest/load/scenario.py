"""What a scenario file may say. Frozen models; unknown keys are refused with their path and the nearest right key."""

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from serve_app.check_levels import near, nested_model
from serve_app.check_words import Fault, in_words, join, path_of
from serve_app.check_yaml import read_yaml
from serve_app.config import Float, Int, ModelId, Spec
from serve_app.endpoint import KEY_VARIABLE
from serve_app.keys import KeyName

FOLDER = Path(__file__).parent / "scenarios"
SUFFIX = ".yaml"


class ScenarioFault(ValueError):
    """A scenario that cannot be run; the message has every fault and its path."""


def _rising(points: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
    if any(later[0] < sooner[0] for sooner, later in pairwise(points)):
        raise ValueError("its seconds must not fall")
    if any(at < 0 or value < 0 for at, value in points):
        raise ValueError("must not be negative")
    return points


# (second, value), joined by straight lines; two with the same second are a step.
Points = Annotated[tuple[tuple[Float | Int, Float | Int], ...], Field(min_length=1), AfterValidator(_rising)]


class Target(Spec):
    """What is promised (the SLO). Of answers, failed ones included; shares are of 1."""

    ttft_ms: Float | Int = Field(gt=0, description="A good answer has its first token within this, in ms.")
    itl_ms: Float | Int = Field(gt=0, description="And its further tokens at this mean distance, in ms.")
    goodput: Float | Int = Field(ge=0, le=1, description="So many answers must be good.")
    errors: Float | Int = Field(ge=0, le=1, description="So many requests may fail.")
    ttft_p99_ms: Float | Int | None = Field(default=None, gt=0, description="The 99th percentile of first tokens.")
    itl_p99_ms: Float | Int | None = Field(default=None, gt=0, description="The same of answers' mean distances.")


class Traffic(Spec):
    """One kind of request. Either ``rate`` or ``users`` says how many come."""

    name: KeyName = Field(description="What tables and pictures call it.")
    model: ModelId = Field(description="The id that its requests name.")
    route: Literal["chat", "completions"] = Field(default="chat", description="Which of OpenAI's routes.")
    rate: Points | None = Field(
        default=None,
        description="Requests per second over time, at random moments, whether or not earlier ones are answered.",
    )
    users: Points | None = Field(
        default=None, description="People over time; each asks, reads the answer, pauses, and asks again."
    )
    pause_s: Float | Int = Field(default=1.0, ge=0, description="Mean pause of a user after an answer, s.")
    turns: Int = Field(default=1, ge=1, description="Of a user's conversation; each sends all that was said before.")
    shared_prefix: Int = Field(default=0, ge=0, description="Tokens with which all conversations of this begin.")
    lengths: Literal["chat", "code"] = Field(default="chat", description="Azure's service whose lengths it has.")
    scale: Float | Int = Field(default=1.0, gt=0, description="Of these lengths; smaller for small machines.")
    context: Int = Field(default=16384, ge=16, description="Prompt and answer fit into so many tokens.")
    key_variable: str = Field(default=KEY_VARIABLE, description="Environment variable with its API key, if any.")
    keep_alive: bool = Field(default=False, description="Ask for comments while the model wakes.")
    judged: bool = Field(default=True, description="Whether the scenario's target is for it, too.")
    fields: dict[str, Any] = Field(default_factory=dict, description="Further fields of each request's body.")

    @model_validator(mode="after")
    def _consistent(self) -> "Traffic":
        if (self.rate is None) == (self.users is None):
            raise ValueError("needs exactly one of rate and users")
        if self.turns > 1 and (self.users is None or self.route != "chat"):
            raise ValueError("only users of the chat route have conversations of several turns")
        if self.shared_prefix >= self.context // 2:
            raise ValueError("shared_prefix must be less than half of context")
        return self


class Scenario(Spec):
    """A whole file."""

    what: str = Field(min_length=1, description="In a line: what it shows.")
    seconds: Float | Int = Field(gt=0, description="Requests come for so long.")
    drain_s: Float | Int = Field(default=60.0, ge=0, description="How long the last ones may take afterwards.")
    timeout_s: Float | Int = Field(default=120.0, gt=0, description="A request without a byte for so long has failed.")
    target: Target
    traffic: tuple[Traffic, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _told_apart(self) -> "Scenario":
        names = [each.name for each in self.traffic]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two kinds of traffic have the name {twice}")
        if not any(each.judged for each in self.traffic):
            raise ValueError("none of its traffic is judged")
        return self


def shipped() -> dict[str, Path]:
    """The scenarios that come with the load tests, by name."""
    return {file.stem: file for file in sorted(FOLDER.glob(f"*{SUFFIX}"))}


def find(asked: str) -> Path:
    """The file that ``asked``, a shipped scenario's name or a path, means. Raises ``ScenarioFault``."""
    known = shipped()
    if asked in known:
        return known[asked]
    if (file := Path(asked)).is_file():
        return file
    hint = f"; did you mean {found}?" if (found := near(asked, known)) else f"; there are {', '.join(known)}"
    raise ScenarioFault(f"no scenario and no file {asked!r}{hint}")


def read(file: Path) -> Scenario:
    """Raises ``ScenarioFault`` with every fault of the file, ``OSError``."""
    document, faults = read_yaml(file.read_bytes())
    if document is None:
        faults = faults or [Fault("file", "is empty")]
    if faults:
        raise ScenarioFault(_told(file, faults))
    try:
        return Scenario.model_validate(document)
    except ValidationError as error:
        found = [_fault(each, document) for each in error.errors(include_url=False)]
        raise ScenarioFault(_told(file, found)) from None


def _told(file: Path, faults: list[Fault]) -> str:
    return "\n".join([f"{file}:", *(f"  {fault}" for fault in faults)])


def _fault(error: ErrorDetails, document: Any) -> Fault:
    loc, kind = error["loc"], error["type"]
    if kind != "extra_forbidden":
        path = path_of("", loc, document, missing=kind == "missing")
        return Fault(path or "file", in_words(error))
    level: type[BaseModel] = Scenario
    for part in loc[:-1]:
        if isinstance(part, str):
            level = nested_model(level.model_fields[part].annotation) or level
    key = str(loc[-1])
    path = join(path_of("", loc[:-1], document, missing=False), key)
    found = near(key, level.model_fields)
    return Fault(
        path, "unknown key", f"did you mean {found}?" if found else f"there are {', '.join(level.model_fields)}"
    )
