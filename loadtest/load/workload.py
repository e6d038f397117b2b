"""What is asked, and when: arrivals at random or of a trace, and texts of a given length. Pure and seeded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from loadtest.load.lengths import Lengths
from loadtest.load.scenario import Scenario, ScenarioFault, Traffic
from loadtest.scaling import traces
from loadtest.scaling.traces import between

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# Usual vocabularies have one token for each of these with a space before it. How many tokens a prompt really had is
# what the answer's usage says.
_COMMON = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they "
    "which one you were her all she there would their we him been has when who will more no if out so said what "
    "up its about into than them can only other new some could time these two may then do first any my now such "
    "like our over man me even most made after also did many before must through back years where much your way "
    "well down should because each just "
)
WORDS = _COMMON.split()
# A chat's template adds some.
TEMPLATE_TOKENS = 48
# A user who was refused comes again no sooner, whatever its pause.
LEAST_PAUSE_AFTER_FAILURE_S = 0.5


@dataclass(frozen=True)
class Due:
    """A request of ``traffic`` that comes ``at`` that second, with so many tokens of ``prompt`` and ``output``."""

    at: float
    prompt: int
    output: int


def fit(traffic: Traffic, prompt: int, output: int) -> tuple[int, int]:
    """Both lengths scaled and cut to the context. The answer is kept before the prompt, to half of the context."""
    room = traffic.context - (TEMPLATE_TOKENS if traffic.route == "chat" else 0)
    output = max(1, min(round(output * traffic.scale), room // 2))
    return max(1, min(round(prompt * traffic.scale), room - output - traffic.shared_prefix)), output


def schedule(traffic: Traffic, seconds: float, lengths: Lengths, seed: int) -> list[Due]:
    """The requests of a traffic with a ``rate``, at random; the same for the same ``seed``."""
    points = traffic.rate or ((0, 0),)
    random = Random(f"{seed}/{traffic.name}")
    highest = max(rate for _, rate in points)
    when = list(traces.arrivals(lambda at: between(points, at), highest, seconds, random)) if highest else []
    return [Due(at, *fit(traffic, *lengths.draw(random))) for at in when]


def schedules(
    scenario: Scenario, lengths: Mapping[str, Lengths], seed: int, trace: Path | None = None, speed: float = 1.0
) -> dict[str, list[Due]]:
    """By traffic, all that have a ``rate``. ``trace``: the folder of Azure's traces, whose arrivals and lengths they
    have instead, ``speed`` times as fast. Raises ``ScenarioFault``."""
    of = [traffic for traffic in scenario.traffic if traffic.rate is not None]
    if trace is None:
        return {each.name: schedule(each, scenario.seconds, lengths[each.lengths], seed) for each in of}
    if speed <= 0:
        raise ScenarioFault(f"speed must be greater than 0, is {speed:g}")
    if not of:
        raise ScenarioFault("a trace says when requests come, and none of this scenario's traffic has a rate")
    try:
        found = traces.azure(trace, speed, scenario.seconds)
    except (OSError, KeyError, ValueError) as error:
        raise ScenarioFault(f"{trace} has none of Azure's traces that can be read: {error}") from error
    return {
        each.name: [Due(request.at_s, *fit(each, request.prompt, request.output)) for request in found[each.lengths]]
        for each in of
    }


def text(random: Random, tokens: int) -> str:
    """So many words, about as many tokens."""
    return " ".join(random.choices(WORDS, k=tokens))


@dataclass
class Talk:
    """A user's conversation, turn after turn. ``number``: which one of this traffic; what is said and how long its user
    pauses depends on it and the seed alone."""

    traffic: Traffic
    lengths: Lengths
    seed: int
    number: int
    said: list[dict[str, str]] = field(default_factory=list)
    turn: int = 0
    _random: Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = Random(f"{self.seed}/{self.traffic.name}/{self.number}")
        if self.traffic.shared_prefix:
            self.said.append({"role": "system", "content": prefix(self.traffic, self.seed)})

    @property
    def over(self) -> bool:
        return self.turn >= self.traffic.turns

    def ask(self) -> dict[str, Any]:
        """The next turn's body. All turns together fit into the context."""
        prompt, output = fit(self.traffic, *self.lengths.draw(self._random))
        share = self.traffic.turns
        prompt, output = max(1, prompt // share), max(1, output // share)
        asked = text(self._random, prompt)
        if self.traffic.route == "completions":
            before = " ".join(each["content"] for each in self.said)
            return body(self.traffic, f"{before} {asked}".strip(), output)
        self.said.append({"role": "user", "content": asked})
        return body(self.traffic, self.said, output)

    def hear(self, answer: str) -> None:
        self.said.append({"role": "assistant", "content": answer})
        self.turn += 1

    def pause_s(self, failed: bool) -> float:
        """How long its user waits before it asks again."""
        mean = self.traffic.pause_s
        drawn = self._random.expovariate(1 / mean) if mean else 0.0
        return max(drawn, LEAST_PAUSE_AFTER_FAILURE_S) if failed else drawn


def prefix(traffic: Traffic, seed: int) -> str:
    """What all of a traffic's conversations begin with."""
    return text(Random(f"{seed}/{traffic.name}/prefix"), traffic.shared_prefix)


def of_due(traffic: Traffic, due: Due, seed: int, number: int) -> dict[str, Any]:
    """The body of a request of a schedule. Its text is its own, but for the shared prefix."""
    asked = text(Random(f"{seed}/{traffic.name}/{number}"), due.prompt)
    before = prefix(traffic, seed) if traffic.shared_prefix else ""
    if traffic.route == "completions":
        return body(traffic, f"{before} {asked}".strip(), due.output)
    said = [{"role": "system", "content": before}] if before else []
    return body(traffic, [*said, {"role": "user", "content": asked}], due.output)


def body(traffic: Traffic, prompt: str | Sequence[Mapping[str, str]], tokens: int) -> dict[str, Any]:
    """Streams ``tokens`` tokens and says at the end how many they were."""
    return {
        "model": traffic.model,
        **({"prompt": prompt} if isinstance(prompt, str) else {"messages": prompt}),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **traffic.fields,
    }
