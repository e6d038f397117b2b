"""What a model replica needs of an engine. ``engine.py`` (vLLM) and ``fake_engine.py`` have this shape."""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from serve_app.asgi import ASGIApp
from serve_app.lease import EngineFacts
from serve_app.scaling import EngineStats

# The id that the client asked for, for the length of one request: the answer's ``model`` repeats it, whichever of
# the model's names it was. The gateway has resolved it already, so the engine accepts whatever stands here.
ASKED_MODEL: ContextVar[str | None] = ContextVar("asked_model", default=None)

# The priority of the request's key, for engines whose scheduler goes by priorities: lower goes first.
PRIORITY: ContextVar[int] = ContextVar("priority", default=0)

# Whether each token of the request's stream has an event of its own, whatever the load.
EVERY_TOKEN: ContextVar[bool] = ContextVar("every_token", default=False)


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter. ``path``: its folder on this node. Files that change need another path: what was loaded stays."""

    name: str
    path: str


# The adapter that must answer the request; None: the base model, whatever adapters are loaded.
ADAPTER: ContextVar[Adapter | None] = ContextVar("adapter", default=None)


def nobody_hears(_progress: str) -> None:
    """For starts that nobody watches."""


class Engine(Protocol):
    async def start(self, tell: Callable[[str], object] = nobody_hears) -> EngineFacts:
        """Load the model. Returns when requests can be answered; raises with the cause otherwise. ``tell`` gets a line
        now and then on how far it is, from any thread."""

    @property
    def asgi(self) -> ASGIApp:
        """The engine's OpenAI-compatible app; valid after ``start``. It keeps the journal of ``JOURNAL`` and
        answers by ``ADAPTER``, or with 400 where that cannot be used."""

    async def check_health(self) -> None:
        """Raise when the engine is dead."""

    async def ping(self) -> None:
        """Return once the engine itself has answered, however busy: between two of its steps. Raises where it is
        dead; waits for ever where it stands still."""

    def share_events(self, chunk_s: float) -> None:
        """Under load tokens of a stream may wait so long for others to share their event with; see ``chunks``."""

    def stats(self) -> EngineStats:
        """What runs and waits now."""

    def report(self) -> dict[str, Any]:
        """Counters for tests and status pages; ``adapters``: the names of those that are loaded."""

    def shutdown(self) -> None:
        """End the engine and its processes; callable more than once, and after a failed start."""
