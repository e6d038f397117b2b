"""Requests that are wrong, and requests that try to break an engine: each is answered, and the next one works."""

import asyncio
import re
from typing import Any

import httpx
import pytest

from tests.engine.ask import (
    CAPITAL,
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    GENERATING,
    MESSAGES,
    RESPONSES,
    assert_answers,
    body,
    capital,
)
from tests.serve.cluster import Cluster

pytestmark = pytest.mark.engine
CONTEXT = 2048

# What no client may see: parsers' and Python's words, files, addresses.
INTERNALS = re.compile(
    r"\bloc\b|\bctx\b|type=|input_value|validation error|Traceback|pydantic|object is not|NoneType"
    r"|\b[A-Z][a-z]+[A-Z]\w*(Param|Request)\b|\.py\b|/(?:usr|home|root|tmp|opt|var|lib)/|0x[0-9a-f]{6}"
    r"|\b\d{1,3}(?:\.\d{1,3}){3}\b",
)


def refusal(answer: httpx.Response, path: str) -> str:
    """The message of a 400 in its route's own envelope, checked for what must not be in it."""
    assert answer.status_code == 400, answer.text[:500]
    assert answer.headers["content-type"] == "application/json"
    found = answer.json()
    error = found["error"]
    assert error["type"] == "invalid_request_error"
    if path == MESSAGES:
        assert (found["type"], set(error)) == ("error", {"type", "message"})
    else:
        assert (set(found), set(error)) == ({"error"}, {"message", "type", "param", "code"})
    assert not INTERNALS.search(str(error)), error
    message: str = error["message"]
    return message


def both_ways(cluster: Cluster, path: str, request: dict[str, Any]) -> str:
    """The message of the refusal, which is the same with ``stream`` true and false."""
    said = {refusal(cluster.client.post(path, json=request | {"stream": s}), path) for s in (False, True)}
    assert len(said) == 1, said
    return said.pop()


@pytest.mark.parametrize("path", GENERATING)
def test_a_prompt_over_the_context(engines: Cluster, path: str) -> None:
    """400 with the limit."""
    assert str(CONTEXT) in both_ways(engines, path, body(path, "word " * 4000, 10))


@pytest.mark.parametrize("path", GENERATING)
def test_prompt_and_answer_over_the_context(engines: Cluster, path: str) -> None:
    """400 with the limit and with what was asked for: an answer is never shortened silently."""
    for words, asked in ((1900, 200), (5, CONTEXT), (5, CONTEXT + 1)):
        said = both_ways(engines, path, body(path, "word " * words, asked))
        assert str(CONTEXT) in said
        assert str(asked) in said


def test_an_answer_that_just_fits(engines: Cluster) -> None:
    """The whole context can be used."""
    prompt = [100] * (CONTEXT - 2)
    request = {"model": "chat", "prompt": prompt, "max_tokens": 2, "ignore_eos": True}
    usage = engines.client.post(COMPLETIONS, json=request).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (CONTEXT - 2, 2)


@pytest.mark.parametrize("path", GENERATING)
def test_a_negative_temperature(engines: Cluster, path: str) -> None:
    """400 that says what temperature may be."""
    assert "temperature must be non-negative" in both_ways(engines, path, body(path, "x", 5, temperature=-1))


def schema(content: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": content}}


POISON: dict[str, tuple[str, dict[str, Any]]] = {
    "illegal schema": (CHAT, capital(response_format=schema({"type": "nonsense"}))),
    "dangling reference": (CHAT, capital(response_format=schema({"$ref": "#/nowhere"}))),
    "schema that is a number": (CHAT, capital(response_format=schema(5))),
    "no schema": (CHAT, capital(response_format={"type": "json_schema"})),
    "broken regex": (CHAT, capital(structured_outputs={"regex": "[a-"})),
    "unsupported regex": (CHAT, capital(structured_outputs={"regex": "(?<=x)y"})),
    "broken grammar": (CHAT, capital(structured_outputs={"grammar": "root ::= ("})),
    "no choice": (CHAT, capital(structured_outputs={"choice": []})),
    "illegal schema, responses": (
        RESPONSES,
        body(RESPONSES, "x", 5, text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "nonsense"}}}),
    ),
    "illegal schema, messages": (
        MESSAGES,
        body(MESSAGES, "x", 5, output_config={"format": {"type": "json_schema", "schema": {"type": "nonsense"}}}),
    ),
    "broken regex, completions": (COMPLETIONS, body(COMPLETIONS, "x", 5, structured_outputs={"regex": "[a-"})),
    "empty prompt": (COMPLETIONS, body(COMPLETIONS, "", 5)),
    "no prompts": (COMPLETIONS, body(COMPLETIONS, "", 5) | {"prompt": []}),
    "unknown token": (COMPLETIONS, body(COMPLETIONS, "", 5) | {"prompt": [99_999_999]}),
    "one good prompt, one bad": (COMPLETIONS, body(COMPLETIONS, "", 5) | {"prompt": [[100], [99_999_999]]}),
    "negative token": (COMPLETIONS, body(COMPLETIONS, "", 5) | {"prompt": [-1]}),
    "no messages": (CHAT, capital(messages=[])),
    "messages: null": (CHAT, capital(messages=None)),
    "messages: text": (CHAT, capital(messages="hello")),
    "messages: numbers": (CHAT, capital(messages=[1])),
    "message without a role": (CHAT, capital(messages=[{"content": "x"}])),
    "content: number": (CHAT, capital(messages=[{"role": "user", "content": 5}])),
    "tool calls: number": (CHAT, capital(messages=[*CAPITAL, {"role": "assistant", "tool_calls": 5}])),
    "messages: text, messages": (MESSAGES, body(MESSAGES, "", 5) | {"messages": "hello"}),
    "prompt: number": (COMPLETIONS, body(COMPLETIONS, "", 5) | {"prompt": 5}),
    "prompt: object": (COMPLETIONS, body(COMPLETIONS, "", 5) | {"prompt": {"a": 1}}),
    "prompt: null": (COMPLETIONS, body(COMPLETIONS, "", 5) | {"prompt": None}),
    "prompt: mixed": (COMPLETIONS, body(COMPLETIONS, "", 5) | {"prompt": ["a", 1]}),
    "input: number": (RESPONSES, body(RESPONSES, "", 5) | {"input": 5}),
    "max_tokens: text": (CHAT, capital(max_tokens="many")),
    "max_tokens: fraction": (CHAT, capital(max_tokens=1.5)),
    "max_tokens: zero": (CHAT, capital(max_tokens=0)),
    "top_logprobs: many": (CHAT, capital(logprobs=True, top_logprobs=999)),
    "logit_bias: unknown token": (CHAT, capital(logit_bias={"99999999": 1})),
    "stop_token_ids: huge": (CHAT, capital(stop_token_ids=[2**70])),
    "allowed_token_ids: none": (CHAT, capital(allowed_token_ids=[])),
    "seed: huge": (CHAT, capital(seed=2**70)),
    "n: huge": (CHAT, capital(n=10**6)),
    "template": (CHAT, capital(chat_template="{{ 1 / 0 }}")),
    "template arguments": (CHAT, capital(chat_template_kwargs={"messages": 1})),
    "a file as image": (
        CHAT,
        capital(
            messages=[
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]},
            ]
        ),
    ),
}


@pytest.mark.parametrize("name", POISON)
def test_poison_is_refused_and_does_no_harm(engines: Cluster, name: str) -> None:
    """400 in our envelope, the same with ``stream`` true and false; the next request works."""
    path, request = POISON[name]
    both_ways(engines, path, request)
    assert_answers(engines.client)


def test_poison_for_embeddings(engines: Cluster) -> None:
    """The same on an embedding model."""
    for wrong in ([], "", 5, [99_999_999], "word " * 4000):
        refusal(engines.client.post(EMBEDDINGS, json={"model": "embed", "input": wrong}), EMBEDDINGS)
    good = engines.client.post(EMBEDDINGS, json={"model": "embed", "input": "x"})
    assert good.status_code == 200


def test_what_is_wrong_is_named(engines: Cluster) -> None:
    """Where a body has the wrong shape, ``param`` is the field as the client wrote it."""
    for request, param in (
        (capital(messages="hello"), "messages"),
        (capital(messages=[{"role": "user", "content": 5}]), "messages.0.content"),
        (capital(max_tokens="many"), "max_tokens"),
        (capital(messages=[{"content": "x"}]), "messages.0.role"),
        (capital(response_format={"type": "nope"}), "response_format.type"),
    ):
        assert engines.client.post(CHAT, json=request).json()["error"]["param"] == param


def test_overlapping_requests_with_one_id(engines: Cluster) -> None:
    """Two requests at once may carry the same X-Request-Id: all succeed."""

    async def ask() -> list[int]:
        async with httpx.AsyncClient(base_url=engines.url, timeout=60, trust_env=False) as client:
            headers = {"x-request-id": "same"}
            asks = [client.post(CHAT, json=capital(stream=s), headers=headers) for s in (False, True, False, True)]
            return [answer.status_code for answer in await asyncio.gather(*asks)]

    assert asyncio.run(ask()) == [200] * 4
    assert_answers(engines.client)


CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
BROKEN_CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{not JSON"}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
HISTORIES: dict[str, list[dict[str, Any]]] = {
    "parts": [{"role": "assistant", "content": [{"type": "text", "text": "Paris."}]}, *CAPITAL],
    "refusal part": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, *CAPITAL],
    "no content": [{"role": "assistant", "content": None}, *CAPITAL],
    "tool call": [{"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT],
    "tool call without content": [{"role": "assistant", "tool_calls": [CALL]}, RESULT],
    "tool call, parts as result": [
        {"role": "assistant", "tool_calls": [CALL]},
        RESULT | {"content": [{"type": "text", "text": "sunny"}]},
    ],
    "tool call that is no JSON": [{"role": "assistant", "content": "", "tool_calls": [BROKEN_CALL]}, RESULT],
    "no tool calls": [{"role": "assistant", "content": "Paris.", "tool_calls": []}, *CAPITAL],
}


@pytest.mark.parametrize("name", HISTORIES)
def test_assistant_turns_in_the_history(engines: Cluster, name: str) -> None:
    """What an assistant may have said — parts, a refusal, tool calls — is accepted as history."""
    answer = engines.client.post(CHAT, json=capital(messages=[*CAPITAL, *HISTORIES[name]], max_tokens=3))
    assert answer.status_code == 200, answer.text


def test_own_answers_as_history(engines: Cluster) -> None:
    """The engine's own answer, sent back field by field as it came, is accepted on each conversation route."""
    post = engines.client.post
    said = post(CHAT, json=capital()).json()["choices"][0]["message"]
    again = post(CHAT, json=capital(messages=[*CAPITAL, said, {"role": "user", "content": "And of Italy?"}]))
    assert "Rome" in again.json()["choices"][0]["message"]["content"]
    content = post(MESSAGES, json=body(MESSAGES, "hello", 3)).json()["content"]
    messages = [*CAPITAL, {"role": "assistant", "content": content}, *CAPITAL]
    assert post(MESSAGES, json=body(MESSAGES, "", 3) | {"messages": messages}).status_code == 200
    output = post(RESPONSES, json=body(RESPONSES, "hello", 3)).json()["output"]
    assert post(RESPONSES, json=body(RESPONSES, "", 3) | {"input": [*CAPITAL, *output, *CAPITAL]}).status_code == 200
