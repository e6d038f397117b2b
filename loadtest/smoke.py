"""Ask every model of a running endpoint once, whole and streaming, and say how it went.

    python -m loadtest.smoke http://127.0.0.1:8000

Exit status 1 when a model does not answer, or answers differently under each of its ids.
"""

import json
import time
from dataclasses import dataclass
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

PROMPT = "What is the capital of France?"


@dataclass(frozen=True)
class Result:
    """One model's answers. Times in seconds; ``tokens``: completion tokens of the stream."""

    ttft_s: float
    total_s: float
    tokens: int
    text: str


def ask(client: httpx.Client, model: str, max_tokens: int) -> Result:
    """One streaming chat completion. Raises ``httpx.HTTPError``, ``ValueError`` where the stream ends in an error."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = time.monotonic()
    first = None
    text, tokens = "", 0
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.is_error:
            answer.read()
            raise ValueError(f"{answer.status_code}: {answer.text[:200]}")
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise ValueError(event["error"]["message"])
            if event["choices"] and event["choices"][0]["delta"].get("content"):
                first = first or time.monotonic()
                text += event["choices"][0]["delta"]["content"]
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
    end = time.monotonic()
    return Result((first or end) - start, end - start, tokens, text)


def main(
    url: Annotated[str, typer.Argument(help="The endpoint, without /v1.")] = "http://127.0.0.1:8000",
    max_tokens: Annotated[int, typer.Option(help="Tokens per answer, at most.")] = 64,
) -> None:
    """Ask every model once, under its name and its further ids, and print a table."""
    console = Console(width=None if Console().is_terminal else 120)
    failed = False
    table = Table("model", "asked as", "TTFT s", "total s", "tokens", "text", title=url)
    with httpx.Client(base_url=url, timeout=300, trust_env=False) as client:
        models: dict[str, Any] = client.get("/ready").raise_for_status().json()["models"]
        for name, model in models.items():
            if "generate" not in model["tasks"]:
                table.add_row(name, "", "", "", "", f"not asked: {model['state']}, tasks {model['tasks']}")
                continue
            for asked in (name, *model["also_known_as"]):
                try:
                    with console.status(f"asking {asked}"):
                        got = ask(client, asked, max_tokens)
                except (httpx.HTTPError, ValueError) as error:
                    failed = True
                    table.add_row(name, asked, "", "", "", f"[red]{error!s}")
                    continue
                cells = (f"{got.ttft_s:.3f}", f"{got.total_s:.3f}", str(got.tokens), got.text.replace("\n", " ")[:60])
                table.add_row(name, asked, *cells)
    console.print(table)
    raise typer.Exit(failed)


if __name__ == "__main__":
    typer.run(main)
