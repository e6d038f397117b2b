"""What a model replica needs of an engine. ``engine.py`` (vLLM) and ``fake_engine.py`` have this shape."""

from contextvars import ContextVar
from typing import Any, Protocol

from serve_app.asgi import ASGIApp
from serve_app.lease import EngineFacts
from serve_app.scaling import EngineStats

# The id that the client asked for, for the length of one request: the answer's ``model`` repeats it, whichever of
# the model's names it was. The gateway has resolved it already, so the engine accepts whatever stands here.
ASKED_MODEL: ContextVar[str | None] = ContextVar("asked_model", default=None)

# The priority of the request's key, for engines whose scheduler goes by priorities: lower goes first.
PRIORITY: ContextVar[int] = ContextVar("priority", default=0)


class Engine(Protocol):
    async def start(self) -> EngineFacts:
        """Load the model. Returns when requests can be answered; raises with the cause otherwise."""

    @property
    def asgi(self) -> ASGIApp:
        """The engine's OpenAI-compatible app; valid after ``start``. It keeps the journal of ``JOURNAL``."""

    async def check_health(self) -> None:
        """Raise when the engine is dead."""

    async def ping(self) -> None:
        """Return once the engine itself has answered, however busy: between two of its steps. Raises where it is
        dead; waits for ever where it stands still."""

    def stats(self) -> EngineStats:
        """What runs and waits now."""

    def report(self) -> dict[str, Any]:
        """Counters for tests and status pages."""

    def shutdown(self) -> None:
        """End the engine and its processes; callable more than once, and after a failed start."""
