"""The short way to the server, for what a stream says with every token."""

from starlette.types import ASGIApp, Receive, Scope, Send

_KEY = "server_send"


class ServerSend:
    """Keeps the `send` of those outside for the application.

    Every layer of middleware wraps it once more, to see the head of an answer; a body needs none of them.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})[_KEY] = send
        await self._app(scope, receive, send)


def server_send_of(scope: Scope) -> Send:
    """For the body of an answer whose head went the long way."""
    return scope["state"][_KEY]
