"""The body of an answer that is a stream of server-sent events."""

from collections.abc import Sequence

from starlette.types import Scope, Send

from router.http_connection import BODY_WRITER, BodyWriter
from router.server_send import server_send_of

HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class EventStream:
    """Sends events as they come; each is the JSON of one, or "[DONE]"."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._send_head = send
        self._send = server_send_of(scope)
        # The head, and something after it.
        self._has_begun = False
        self.writer: BodyWriter | None = scope.get("extensions", {}).get(BODY_WRITER, {}).get("writer")

    async def begin(self) -> None:
        """The head, which leaves with what is sent next, be it nothing."""
        await self._send_head({"type": "http.response.start", "status": 200, "headers": HEADERS})

    async def send(self, events: Sequence[str]) -> None:
        """Waits for a client that lags."""
        if events or not self._has_begun:
            self._has_begun = True
            self._flush()
            await self._send({"type": "http.response.body", "body": event_bytes(events), "more_body": True})

    async def end(self, events: Sequence[str]) -> None:
        """The last events."""
        self._flush()
        await self._send({"type": "http.response.body", "body": event_bytes(events), "more_body": False})

    def _flush(self) -> None:
        if self.writer is not None:
            self.writer.flush()


def event_bytes(events: Sequence[str]) -> bytes:
    if len(events) == 1:
        return f"data: {events[0]}\n\n".encode()
    return "".join([f"data: {event}\n\n" for event in events]).encode()
