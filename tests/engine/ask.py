"""What the tests of real engines ask, and how they read the answers."""

from typing import Any

import httpx

from tests import sse

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES, EMBEDDINGS = "/v1/responses", "/v1/messages", "/v1/embeddings"
GENERATING = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


def body(path: str, text: str, max_tokens: int, /, **more: Any) -> dict[str, Any]:
    """A request to any of the generating routes."""
    filled: dict[str, Any] = {"model": "chat"}
    if path == COMPLETIONS:
        filled |= {"prompt": text, "max_tokens": max_tokens}
    elif path == RESPONSES:
        filled |= {"input": text, "max_output_tokens": max_tokens}
    else:
        filled |= {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens}
    return filled | more


def capital(**more: Any) -> dict[str, Any]:
    return {"model": "chat", "messages": CAPITAL, "temperature": 0, "max_tokens": 12, **more}


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The JSON events of an OpenAI stream, which must end as such streams do."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    return sse.events(answer.text)


def text_of(stream: list[dict[str, Any]]) -> str:
    return "".join(c["delta"].get("content") or "" for event in stream for c in event["choices"])


def assert_answers(client: httpx.Client) -> None:
    """The model is well."""
    answer = client.post(CHAT, json=capital())
    assert answer.status_code == 200, answer.text
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]
