"""One client's request, as every replica gets it that is asked for its answer."""

import itertools
import json
import re

from serve_app import resume
from serve_app.admission import Ticket
from serve_app.asgi import says_yes
from serve_app.gateway.answer import Answer
from serve_app.gateway.fields import SESSION_HEADER, TIMEOUT_HEADER, Fields, longest_wait_s, prefix_of
from serve_app.gateway.lease import Lease
from serve_app.gateway.record import Record
from serve_app.gateway.routes import Route
from serve_app.lease import (
    ADAPTER_HEADER,
    ADAPTER_PATH_HEADER,
    ASKED_MODEL_HEADER,
    COUNT_HEADER,
    EVERY_TOKEN_HEADER,
    GENERATION_HEADER,
    KEEP_HEADER,
    LEASE_HEADER,
    PRIORITY_HEADER,
    RESUME_HEADER,
    Counted,
)
from serve_app.one_id import REQUEST_ID_HEADER
from serve_app.prefixes import Prefix, of_adapter

# A client that asks for signs of life while it waits.
KEEP_ALIVE_HEADER = b"x-modelyard-keep-alive"
# A client that wants the model that its name means, or an error.
NO_FALLBACK_HEADER = b"x-modelyard-no-fallback"
# A client's: tell me at the end of my stream where the time went.
TELL_TIMING_HEADER = b"x-modelyard-timing"
# All that a client may ask of us by header.
ASKING_HEADERS = (
    TIMEOUT_HEADER,
    SESSION_HEADER,
    KEEP_ALIVE_HEADER,
    NO_FALLBACK_HEADER,
    EVERY_TOKEN_HEADER,
    TELL_TIMING_HEADER,
)
# Under these replicas count. Unique on a lease, which is all that they have to be.
_NUMBERS = itertools.count(1)
_COUNT = re.compile(rb"(\d{1,12}) (\d{1,12}) (\d{1,9}\.\d{4})")
# What of the client's headers the engine may see. Never authorization or cookies.
_FORWARDED = frozenset((b"content-type", b"accept", b"anthropic-version", EVERY_TOKEN_HEADER))


class Request:
    """Read once, here; the body passes as it is. ``record``: has its id, and is told what it costs."""

    def __init__(
        self,
        route: Route,
        headers: dict[bytes, bytes],
        fields: Fields,
        body: bytes,
        ticket: Ticket,
        record: Record,
    ) -> None:
        self.route = route
        self.asked = str(fields.model)
        self.body = body
        self.ticket = ticket
        self.tally = record.tally
        self.longest_wait_s = longest_wait_s(headers)
        self.streams = route.streams and fields.stream is True
        self.keep_alive = says_yes(headers, KEEP_ALIVE_HEADER)
        self.wants_timing = says_yes(headers, TELL_TIMING_HEADER)
        self.may_fall_back = not says_yes(headers, NO_FALLBACK_HEADER)
        self._headers = headers
        self._fields = fields
        self._adapter: tuple[str, str] | None = None
        self._prefix: Prefix | None = None
        self._lines = [ASKED_MODEL_HEADER + b": " + self.asked.encode(), REQUEST_ID_HEADER + b": " + record.id]
        self._lines += [name + b": " + value for name, value in headers.items() if name in _FORWARDED]
        if ticket.priority:
            self._lines.append(PRIORITY_HEADER + f": {ticket.priority}".encode())
        if route.path in resume.PATHS:
            self._lines.append(KEEP_HEADER + b": 1")

    def under(self, target: str, adapter: str | None) -> None:
        """It goes to ``target`` now; ``adapter``: the folder, if that is one."""
        self._adapter = (target, adapter) if adapter is not None else None
        self._prefix = None

    def prefix(self) -> Prefix:
        """How it begins; costs a hash of the prompt, once, so it is looked at where there is a choice."""
        if self._prefix is None:
            text = prefix_of(self.route, self._headers, self._fields)
            self._prefix = of_adapter(self._adapter[0], text) if self._adapter else text
        return self._prefix

    def count_on(self, lease: Lease) -> str:
        """Under which number the replica is to count the request's tokens."""
        number = str(next(_NUMBERS))
        self.tally.ask(number)
        lease.counting[number] = self.tally.count
        return number

    def count_no_more(self, lease: Lease, number: str) -> None:
        if lease.counting.pop(number, None) is not None:
            self.tally.ask("")

    def count_is_lost(self, lease: Lease, number: str) -> None:
        """Nobody waits for it any more, so the lease can go at once."""
        if lease.counting.pop(number, None) is not None:
            self.tally.give_up(number)

    def counted(self, lease: Lease, number: str, words: bytes) -> None:
        """The answer itself says what it cost (``COUNT_HEADER``); empty: it does not, so the lease will."""
        # A model's own code may write anything in its answers; what is no count is none.
        if (said := _COUNT.fullmatch(words)) and (tell := lease.counting.pop(number, None)) is not None:
            tell(Counted(number, int(said[1]), int(said[2]), float(said[3])))

    def head(self, lease: Lease, answer: Answer, records: int, number: str) -> bytes:
        """The HTTP/1.1 head for one replica. ``records``: length of the journal in front of the body, in bytes.
        ``number``: see ``count_on``."""
        grant = lease.grant
        lines = [
            f"POST {self.route.path} HTTP/1.1\r\nhost: {grant.host}:{grant.port}".encode("latin-1"),
            f"content-length: {records + len(self.body)}".encode(),
            LEASE_HEADER + b": " + grant.token.encode(),
            COUNT_HEADER + b": " + number.encode(),
            *self._lines,
            *(name + b": " + value for name, value in answer.record.trace.headers(self._headers)),
        ]
        if self._adapter:
            name, path = self._adapter
            lines += [ADAPTER_HEADER + b": " + name.encode(), ADAPTER_PATH_HEADER + b": " + path.encode()]
        if answer.started:
            lines.append(RESUME_HEADER + f": {records}".encode())
            lines.append(GENERATION_HEADER + b": " + answer.generation)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def why_not(self, answer: Answer) -> str | None:
        """Why another replica cannot go on with the answer; None: it can, as with every answer that has not begun.
        Reads the body only now."""
        if not answer.started:
            return None
        if not answer.generation:
            return "its replica kept no journal"
        try:
            return resume.why_not(self.route.path, json.loads(self.body))
        except (ValueError, RecursionError):  # its engine's parser is another one
            return "its request cannot be read here"


def clean_request_id(given: bytes) -> bytes:
    """A request id that is safe in headers and logs: printable, bounded."""
    return re.sub(rb"[^A-Za-z0-9._:-]", b"-", given[:128])
