"""Which endpoints exist. The gateway forwards these and nothing else.

An engine's other routes run inference unguarded or change the engine (``/invocations``, ``/scale_elastic_ep``, …), so
a path that is not listed here does not exist.
"""

from dataclasses import dataclass
from typing import Literal

from serve_app.errors import Protocol


@dataclass(frozen=True, slots=True)
class Route:
    """A relayed endpoint: ``POST path`` with a body that names its model.

    ``example``: a body that works, for the docs. ``summary``: one line for the docs. ``streams``: the body's
    ``stream`` asks for SSE events.
    """

    path: str
    summary: str
    example: dict[str, object]
    protocol: Protocol = "openai"
    body: Literal["json", "multipart"] = "json"
    streams: bool = False


_CHAT = {"model": "chat", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}
_COMPLETION = {"model": "chat", "prompt": "Once upon a time", "max_tokens": 64}
_RESPONSE = {"model": "chat", "input": "Hello", "store": False}

RELAYED = (
    Route("/v1/chat/completions", "Chat completion, streaming or not", _CHAT, streams=True),
    Route("/v1/completions", "Text completion", _COMPLETION, streams=True),
    Route("/v1/responses", "Responses API, stateless", _RESPONSE, streams=True),
    Route("/v1/embeddings", "Embeddings", {"model": "embed", "input": "Hello"}),
    Route("/v1/rerank", "Order documents by relevance", {"model": "rank", "query": "sea", "documents": ["a", "b"]}),
    Route("/v1/score", "Score pairs of texts", {"model": "rank", "text_1": "sea", "text_2": "ocean"}),
    Route("/v1/audio/transcriptions", "Transcribe audio", {"model": "whisper", "file": "…"}, body="multipart"),
    Route("/v1/messages", "Anthropic's Messages API", _CHAT, protocol="anthropic", streams=True),
    Route("/v1/messages/count_tokens", "Count a message's tokens", _CHAT, protocol="anthropic"),
    Route("/tokenize", "Text to token ids", {"model": "chat", "prompt": "Hello"}),
    Route("/detokenize", "Token ids to text", {"model": "chat", "tokens": [1, 2, 3]}),
)

BY_PATH = {route.path: route for route in RELAYED}


def protocol_of(path: str) -> Protocol:
    """Whose error envelope a path answers in, known or not."""
    return "anthropic" if path.startswith("/v1/messages") else "openai"
