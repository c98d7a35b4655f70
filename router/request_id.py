"""The name that runs through a request's log lines, answers and errors."""

import re
import secrets
from collections.abc import Iterable

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Of HTTP, both ways, and in gRPC's metadata, both ways.
HEADER = "x-request-id"

# Goes into logs and headers as it is: nothing that could end a line.
_SOUND = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_KEY = "request_id"


def request_id_from(*given: str) -> str:
    """The first sound one that the client gave, else a new one."""
    return next((each for each in given if _SOUND.fullmatch(each)), None) or secrets.token_hex(16)


def metadata_request_id(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Of a gRPC call. "": there is none."""
    for name, value in metadata or ():
        if name == HEADER and isinstance(value, str):
            return value
    return ""


def header_of(scope: Scope, name: str) -> str | None:
    """Of an HTTP request. `name` is in lower case, as all are in a scope."""
    wanted = name.encode()
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == wanted), None)


class HttpRequestIds:
    """Names every request, and writes the name into the head of its answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_from(header_of(scope, HEADER) or "")
        scope.setdefault("state", {})[_KEY] = request_id

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        await self._app(scope, receive, named)


def request_id_of(request: Request) -> str:
    """Of a request that `HttpRequestIds` has named."""
    return request.scope["state"][_KEY]
