"""The page at ``/status``: plain files that show what ``/ready`` answers, and a playground.

The files hold no data, so they need no key; what fills them does.
"""

from collections.abc import Awaitable, Callable
from importlib import resources

from fastapi import FastAPI, Response

# Nothing but our own files, no script or style within a page, no text that becomes HTML, no form that is sent by itself
# (a key would be in its address), no frame around it.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
# Path → file beside this one, media type. Each names the others relative to itself, so any route prefix is fine.
FILES = {
    "/status": ("page.html", "text/html"),
    "/status/page.css": ("page.css", "text/css"),
    "/status/page.js": ("page.js", "text/javascript"),
    "/status/endpoint.js": ("endpoint.js", "text/javascript"),
    "/status/tables.js": ("tables.js", "text/javascript"),
    "/status/playground.js": ("playground.js", "text/javascript"),
}


def serve(api: FastAPI) -> None:
    """Add the page and its files to ``api``."""
    for path, (file, media_type) in FILES.items():
        api.add_api_route(path, _answering(_read(file), media_type), include_in_schema=False)


def _read(file: str) -> bytes:
    return (resources.files(__name__) / file).read_bytes()


def _answering(content: bytes, media_type: str) -> Callable[[], Awaitable[Response]]:
    async def answer() -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)

    return answer
