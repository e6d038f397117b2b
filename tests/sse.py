"""How tests read an OpenAI stream."""

import json
from typing import Any


def events(text: str) -> list[dict[str, Any]]:
    """The JSON of every event but the last, which must be ``[DONE]``: so such streams end."""
    parts = [part.removeprefix("data: ") for part in text.strip().split("\n\n")]
    assert parts[-1] == "[DONE]", text[-300:]
    return [json.loads(part) for part in parts[:-1]]


def joined(text: str) -> str:
    """The answer of a chat's stream."""
    return "".join(e["choices"][0]["delta"].get("content", "") for e in events(text) if e.get("choices"))
