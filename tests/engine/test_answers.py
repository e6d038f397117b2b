"""What a real engine answers through the whole path."""

import json
import math
from typing import Any

import pytest

from tests.engine.ask import CAPITAL, CHAT, COMPLETIONS, EMBEDDINGS, capital, events, text_of
from tests.serve.cluster import Cluster

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("asked", ["chat", "smollm2-135m-instruct"])
def test_the_answer_is_right_and_streams_alike(engines: Cluster, asked: str) -> None:
    """The right text; the stream's text is the same; every ``model`` is the id that was asked for, alias or not."""
    whole = engines.client.post(CHAT, json=capital(model=asked)).json()
    text = whole["choices"][0]["message"]["content"]
    assert "Paris" in text
    stream = events(engines.client.post(CHAT, json=capital(model=asked, stream=True)))
    assert text_of(stream) == text
    assert {whole["model"], *(event["model"] for event in stream)} == {asked}
    assert len({event["id"] for event in stream}) == 1


@pytest.mark.parametrize(
    ("path", "request_"),
    [(CHAT, capital()), (COMPLETIONS, {"model": "chat", "prompt": "The sea", "max_tokens": 6, "temperature": 0})],
)
def test_usage_only_where_asked_for(engines: Cluster, path: str, request_: dict[str, Any]) -> None:
    """A stream says its usage in one last chunk without choices, equal to the whole answer's, and only on demand."""
    usage = engines.client.post(path, json=request_).json()["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    plain = events(engines.client.post(path, json=request_ | {"stream": True}))
    assert [event["usage"] for event in plain if event.get("usage")] == []
    asked = request_ | {"stream": True, "stream_options": {"include_usage": True}}
    *others, last = events(engines.client.post(path, json=asked))
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert (last["choices"], {k: last["usage"][k] for k in counts}) == ([], {k: usage[k] for k in counts})
    assert [event["usage"] for event in others if event.get("usage")] == []


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_follows_a_schema(engines: Cluster, stream: bool) -> None:
    """``response_format`` holds the model to a JSON schema, streaming or not."""
    city, country = {"type": "string", "maxLength": 12}, {"enum": ["France", "Italy"]}
    schema = {"type": "object", "properties": {"city": city, "country": country}, "required": ["city", "country"]}
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema | {"additionalProperties": False}}}
    answer = engines.client.post(CHAT, json=capital(response_format=form, max_tokens=80, stream=stream))
    assert answer.status_code == 200, answer.text
    text = text_of(events(answer)) if stream else answer.json()["choices"][0]["message"]["content"]
    place = json.loads(text)
    assert set(place) == {"city", "country"}
    assert place["country"] in ("France", "Italy")


def test_embeddings(engines: Cluster) -> None:
    """Vectors of the model's width, one per input, finite; the same text gives the same vector."""
    answer = engines.client.post(EMBEDDINGS, json={"model": "embed", "input": ["the sea", "a desk", "the sea"]}).json()
    assert answer["model"] == "embed"
    first, other, again = (entry["embedding"] for entry in answer["data"])
    assert [len(v) for v in (first, other, again)] == [576] * 3
    assert all(math.isfinite(x) for v in (first, other) for x in v)
    assert math.dist(first, again) < 0.1 * math.dist(first, other)


def test_what_a_model_cannot_do(engines: Cluster) -> None:
    """Chat with an embedding model, embeddings of a chat model: 400 with what the model can do."""
    chat = engines.client.post(CHAT, json={"model": "embed", "messages": CAPITAL})
    vectors = engines.client.post(EMBEDDINGS, json={"model": "chat", "input": "x"})
    for answer, task in ((chat, "embed"), (vectors, "generate")):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "unsupported_task")
        assert f"tasks are {task}" in error["message"]


def test_tokens_and_text(engines: Cluster) -> None:
    """/tokenize and /detokenize are each other's inverse; /generate answers without a protocol."""
    tokens = engines.client.post("/tokenize", json={"model": "chat", "prompt": "The sea is wide."}).json()["tokens"]
    text = engines.client.post("/detokenize", json={"model": "chat", "tokens": tokens}).json()["prompt"]
    assert text == "The sea is wide."
    generated = engines.client.post("/generate", json={"model_name": "chat", "prompt": "The sea", "max_tokens": 4})
    assert generated.json()["text"]
