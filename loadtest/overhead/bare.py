"""An engine without Modelyard: vLLM's own API server, or the fake engine's app on its HTTP server.

    python -m loadtest.overhead.bare PORT NAME STREAM_INTERVAL < args.json

``args.json``: the ``args:`` of a model entry. ``STREAM_INTERVAL``: vLLM's ``--stream-interval``, 0 for its default.
This process becomes vLLM's API server, with the engine arguments that a replica of this model would use.
"""

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import uvloop

from serve_app.asgi import Receive, Scope, Send, respond
from serve_app.config import ModelArgs
from serve_app.local_cluster import HOST

# The same in every release that we support, also where the `vllm` command cannot be started.
API_SERVER = "vllm.entrypoints.openai.api_server"


def flags(arguments: Mapping[str, Any]) -> Iterator[str]:
    """vLLM's command line for ``AsyncEngineArgs``' keywords; what is None is left to vLLM."""
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        match value:
            case None:
                pass
            case bool():
                yield f"--{flag}" if value else f"--no-{flag}"
            case list() | tuple():
                yield f"--{flag}"
                yield from (json.dumps(each) if isinstance(each, dict) else str(each) for each in value)
            case dict():
                yield f"--{flag}={json.dumps(value)}"
            case _:
                # One word: a value may begin with a dash (-1).
                yield f"--{flag}={value}"


def become_vllm(args: ModelArgs, name: str, port: int, stream_interval: int) -> None:
    from serve_app.model.engine import engine_arguments

    arguments = engine_arguments(args, name) | args.frontend
    if stream_interval:
        arguments["stream_interval"] = stream_interval
    command = [sys.executable, "-m", API_SERVER, f"--host={HOST}", f"--port={port}", *flags(arguments)]
    print(*command, flush=True)
    os.execv(sys.executable, command)


async def serve_fake(args: ModelArgs, name: str, port: int) -> None:
    """Until this process ends."""
    from serve_app.model.fake_engine import FakeEngine
    from serve_app.model.http_server import HttpServer

    assert args.source.fake is not None
    engine = FakeEngine(args.source.fake, name, args.max_num_seqs)
    await engine.start()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] == "POST":
            await engine.asgi(scope, receive, send)
            return
        # Routers ask an engine whether it lives and what it has.
        models = {"object": "list", "data": [{"id": name, "object": "model"}]}
        status = 200 if scope["path"] in ("/health", "/v1/models") else 404
        await respond(send, status, [(b"content-type", b"application/json")], json.dumps(models).encode())

    await HttpServer(app, HOST, port).start()
    await asyncio.Event().wait()


def main() -> None:
    port, name, stream_interval = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    args = ModelArgs.model_validate_json(sys.stdin.read())
    if args.source.fake is not None:
        uvloop.run(serve_fake(args, name, port))
    else:
        become_vllm(args, name, port, stream_interval)


if __name__ == "__main__":
    main()
