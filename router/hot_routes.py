"""The short way to the endpoints that are asked most."""

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

Endpoint = Callable[[Request], Awaitable[Response]]
ErrorAnswer = Callable[[Request, Exception], Response]


class HotRoutes:
    """Answers POSTs to some paths itself, before any framework, and leaves the rest to the application.

    Args:
        endpoints: by path.
        on_error: answers what an endpoint raises. It is not raised further unless the answer has begun.
    """

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, Endpoint], on_error: ErrorAnswer) -> None:
        self._app = app
        self._endpoints = endpoints
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        endpoint = self._endpoints.get(scope["path"]) if is_post else None
        if endpoint is None:
            await self._app(scope, receive, send)
        else:
            await self._answer(endpoint, scope, receive, send)

    async def _answer(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def noting(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        request = Request(scope, receive)
        try:
            response = await endpoint(request)
            await response(scope, receive, noting)
        except Exception as error:  # whatever it is, the client gets an answer
            if has_begun:
                raise
            await self._on_error(request, error)(scope, receive, send)
