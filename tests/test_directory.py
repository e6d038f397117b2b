"""directory: how the gateway calls what it knows."""

from contextvars import ContextVar
from typing import Any

import pytest

from serve_app.config import GatewaySettings
from serve_app.gateway.directory import Calls, Directory
from serve_app.quota import Amount, Limits


class _Called(Exception):
    pass


async def test_calls_belong_to_no_request() -> None:
    """Nothing of the context of the client's request that is under way reaches a handle, whose calls outlive it."""
    request: ContextVar[str] = ContextVar("request", default="")
    seen = []

    class Handle:
        def __getattr__(self, _name: str) -> "Handle":
            return self

        def remote(self, *_args: Any) -> None:
            seen.append(request.get())
            raise _Called

    directory = Directory(GatewaySettings)
    directory._calls["m"] = Calls.of(Handle(), Handle())
    request.set("a client's")
    pool = directory._new_pool("m")
    for call in (
        lambda: pool._lease_stream(""),
        lambda: pool._held._tell(1),
        lambda: pool._affinity._tell((), 0),
        lambda: directory.draw("m", "key", Limits(), Amount(), Amount()),
    ):
        with pytest.raises(_Called):
            await call()
    assert seen == [""] * 4
