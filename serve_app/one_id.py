"""One ``x-request-id`` per answer: Serve calls ``middlewares`` where ``ray_env`` named it before Ray started."""

from collections.abc import Awaitable

from starlette.middleware import Middleware

from serve_app.asgi import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID_HEADER = b"x-request-id"


class FirstId:
    """ASGI middleware around Serve's own, which adds the id that the client sent, as it is, to answers that have theirs
    already: the first one stays."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        def once(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                ids = [header for header in message["headers"] if header[0] == REQUEST_ID_HEADER]
                others = [header for header in message["headers"] if header[0] != REQUEST_ID_HEADER]
                message["headers"] = others + ids[:1]
            return send(message)

        await self._app(scope, receive, once)


def middlewares() -> list[Middleware]:
    return [Middleware(FirstId)]
