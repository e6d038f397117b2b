"""What a model says: how well it foretells a text, and its greedy answers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from loadtest.powers.texts import KINDS, TEXT
from serve_app.local_cluster import HOST

ANSWER_TOKENS = 32
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Said:
    """``perplexity`` of ``texts.TEXT``, over ``tokens`` tokens. ``answers``: the tokens of each."""

    perplexity: float
    tokens: int
    answers: Sequence[Sequence[str]]


def ask(port: int, model: str) -> Said:
    """One request after the other, so that what shares a step does not change them. httpx.HTTPError: one failed."""
    with httpx.Client(base_url=f"http://{HOST}:{port}", timeout=PATIENCE_S, trust_env=False) as client:

        def completed(prompt: str, tokens: int, **more: object) -> dict[str, object]:
            body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, **more}
            answer = client.post("/v1/completions", json=body).raise_for_status().json()
            return dict(answer["choices"][0])

        foretold = _logprobs(completed(TEXT, 1, prompt_logprobs=0)["prompt_logprobs"])
        prompts = [prompt for kind in KINDS.values() for prompt in kind]
        answers = [completed(prompt, ANSWER_TOKENS, logprobs=0, ignore_eos=True)["logprobs"] for prompt in prompts]
    perplexity = math.exp(-sum(foretold) / len(foretold))
    return Said(perplexity, len(foretold), [each["tokens"] for each in answers])  # type: ignore[index]


def _logprobs(prompt: object) -> list[float]:
    """Of each token of a prompt after the first, which nothing foretells."""
    assert isinstance(prompt, list)
    return [next(iter(each.values()))["logprob"] for each in prompt if each]


def same_answers(mine: Said, other: Said) -> int:
    """How many are the same to the last token."""
    return sum(list(a) == list(b) for a, b in zip(mine.answers, other.answers, strict=True))


def same_tokens(mine: Said, other: Said) -> float:
    """Mean share of an answer's tokens before the first that differs."""
    shares = [_before_difference(a, b) / len(b) for a, b in zip(mine.answers, other.answers, strict=True)]
    return sum(shares) / len(shares)


def _before_difference(a: Sequence[str], b: Sequence[str]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
