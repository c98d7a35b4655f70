"""The HTTP door's lock."""

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from router.api_keys import ApiKey
from router.doorkeeper import Doorkeeper
from router.errors import RequestError
from router.openai_response import error_response
from router.request_id import header_of, request_id_of

# What says neither who asks nor what, for those who watch over the router.
OPEN_PATHS = frozenset({"/health", "/metrics"})

_KEY = "api_key"


class HttpKeys:
    """Answers 401 in place of the application, before anything of the body is read."""

    def __init__(self, app: ASGIApp, doorkeeper: Doorkeeper) -> None:
        self._app = app
        self._doorkeeper = doorkeeper

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                key = self._doorkeeper.admit(header_of(scope, "authorization"))
            except RequestError as error:
                request_id = request_id_of(Request(scope))
                refusal = error_response(error, request_id, {"www-authenticate": "Bearer"})
                await refusal(scope, receive, send)
                return
            scope.setdefault("state", {})[_KEY] = key
        await self._app(scope, receive, send)


def api_key_of(request: Request) -> ApiKey:
    """Of a request that was let in."""
    return request.scope["state"][_KEY]
