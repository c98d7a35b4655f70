"""Bounds the memory that requests take, however many come at once."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.errors import ErrorCode, RequestError

# Of all bodies of requests that are not over, in bytes. What is made of a body is a small multiple of it.
MAX_BYTES = 256 << 20


class BodyBudget:
    """The bytes of all bodies that are read or held, at both doors together."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._left = max_bytes

    def take(self, num_bytes: int) -> None:
        """
        Raises:
            RequestError: RESOURCE_EXHAUSTED, there is no room for so many; nothing was taken.
        """
        if num_bytes > self._left:
            raise RequestError(
                ErrorCode.RESOURCE_EXHAUSTED, "too many large requests at once", retry_after_s=1.0
            )
        self._left -= num_bytes

    def give(self, num_bytes: int) -> None:
        self._left += num_bytes


class HttpBodies:
    """Counts what the application reads of each request, until the request is over."""

    def __init__(self, app: ASGIApp, budget: BodyBudget) -> None:
        self._app = app
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        held = 0

        async def counted() -> Message:
            nonlocal held
            message = await receive()
            num_bytes = len(message.get("body", b""))
            self._budget.take(num_bytes)
            held += num_bytes
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._budget.give(held)
