"""A stream's head is committed once the engine has accepted the request, and not before.

vLLM answers 200 first and lets its engine look afterwards, so an illegal grammar or an unknown token id would end in
a stream of one error event, or in a broken one, where the same request without ``stream`` gets a 400.
"""

import asyncio
from collections.abc import Callable
from contextvars import ContextVar

from serve_app.asgi import ASGIApp, Message, Receive, Scope, Send, respond


class Admission:
    """What the engine said to the request under way: nothing yet, yes (``accepted``) or no (``refusal``)."""

    accepted = False
    refusal: Exception | None = None


ADMISSION: ContextVar[Admission | None] = ContextVar("admission", default=None)


class CommitLate:
    """ASGI wrapper around the engine's app. Whoever adds a request to the engine notes the outcome in ``ADMISSION``.

    ``refused``: status and JSON body for the exception of a refusal. Nothing is committed either when the engine
    ``is_dead``: the connection ends with the replica, unanswered, and the gateway asks another one.
    """

    def __init__(
        self, app: ASGIApp, is_dead: Callable[[], bool], refused: Callable[[Exception], tuple[int, bytes]]
    ) -> None:
        self._app = app
        self._is_dead = is_dead
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        admission = Admission()
        ADMISSION.set(admission)
        held: list[Message] = []
        lost = False

        async def late(message: Message) -> None:
            nonlocal lost
            if lost or (message["type"] == "http.response.start" and message["status"] >= 500 and self._is_dead()):
                lost = True
                return
            if not held and (admission.accepted or not _starts_a_stream(message)):
                await send(message)
                return
            held.append(message)
            ends = message["type"] == "http.response.body" and not message.get("more_body")
            if admission.refusal is None and (admission.accepted or ends):
                for waiting in held:
                    await send(waiting)
                held.clear()

        try:
            await self._app(scope, receive, late)
        except Exception:
            if not held or admission.refusal is None:
                raise
        if lost or (held and admission.refusal is not None and self._is_dead()):
            await asyncio.Event().wait()
        if held and admission.refusal is not None:
            status, body = self._refused(admission.refusal)
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            await respond(send, status, headers, body)


def _starts_a_stream(message: Message) -> bool:
    return message["type"] == "http.response.start" and any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in message.get("headers", ())
    )
