"""What a gateway holds of one slot of one replica."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from serve_app.gateway.upstream import Connection
from serve_app.lease import Counted, Grant


@dataclass(slots=True, eq=False)
class Lease:
    """``on_leaving`` is set by the request that uses it: called once its replica's grace is over."""

    grant: Grant
    connection: Connection
    stream: Any  # Serve's response generator: closing it ends the lease
    ended: bool = False
    idle_since: float = 0.0
    since: float = 0.0  # when its present request began
    on_leaving: Callable[[], None] | None = None
    # Whom to tell what the replica counts, by the request's number.
    counting: dict[str, Callable[[Counted], None]] = field(default_factory=dict)
