"""One request of the fuzz run, to the byte, and what came back. Plain data."""

import re
from dataclasses import dataclass, field
from urllib.parse import unquote

# Of multipart bodies.
BOUNDARY = b"frontier"

# https://www.rfc-editor.org/rfc/rfc9110#section-5.1
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")

Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True)
class Case:
    """``valid``: nothing is wrong with it, so the answer must be 200. ``sends``: the client leaves after so many bytes
    of its own, ``reads``: after so many of the answer's; None: it stays. ``pieces``: in how many the bytes go out."""

    origin: str
    method: bytes
    target: bytes
    headers: Headers = ()
    body: bytes = b""
    valid: bool = False
    framed: bool = True  # with a right content-length, unless the headers have one
    sends: int | None = None
    reads: int | None = None
    pieces: int = 1

    @property
    def path(self) -> str | None:
        """As a server reads it; None where the target is no plain path."""
        if not self.target.startswith(b"/"):
            return None
        return unquote(self.target.partition(b"?")[0].partition(b"#")[0].decode("latin-1"))

    @property
    def is_http(self) -> bool:
        """Whether its headers are: else a server refuses it as it reads them, and closes."""
        return all(_NAME.fullmatch(name) and not {*value} & {*b"\r\n\0"} for name, value in self.headers)

    @property
    def raw(self) -> bytes:
        names = {name.lower() for name, _ in self.headers}
        lines = [self.method + b" " + self.target + b" HTTP/1.1"]
        lines += [name + b": " + value for name, value in self.headers]
        if b"host" not in names:
            lines.append(b"host: gateway")
        if self.framed and not names & {b"content-length", b"transfer-encoding"}:
            lines.append(b"content-length: " + str(len(self.body)).encode())
        return b"\r\n".join(lines) + b"\r\n\r\n" + self.body


@dataclass
class Reply:
    """``left``: the client left as it meant to. ``broken``: why this is no whole HTTP answer; ``reset``: the server
    closed the connection while the client still sent, so what it had said before may be lost."""

    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""
    seconds: float = 0.0
    left: bool = False
    broken: str = ""
    reset: bool = False
