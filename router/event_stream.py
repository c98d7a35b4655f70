"""The body of an answer that is a stream of server-sent events."""

from collections.abc import Sequence

from starlette.types import Scope, Send

from router.http_connection import BODY_WRITER, BodyWriter

HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class EventStream:
    """Sends events as they come; each is the JSON of one, or "[DONE]".

    Attributes:
        writer: None: the server has none. With one the head is kept until something follows it.
        has_left: the head, and something after it, be it nothing: the status can be no other.
    """

    __slots__ = ("_send", "_send_head", "has_left", "writer")

    def __init__(self, scope: Scope, send: Send) -> None:
        self.has_left = False
        self._send_head = send
        self.writer: BodyWriter | None = scope.get("extensions", {}).get(BODY_WRITER, {}).get("writer")
        self._send = send if self.writer is None else self.writer.send

    async def begin(self) -> None:
        await self._send_head({"type": "http.response.start", "status": 200, "headers": HEADERS})

    def take_back(self) -> None:
        """The head, if it is kept: as if it had not begun."""
        if self.writer is not None:
            self.writer.take_back()

    def write(self, events: Sequence[str]) -> None:
        """Only while the writer is open."""
        if events or not self.has_left:
            assert self.writer is not None
            self.has_left = True
            self.writer.write(event_bytes(events))

    async def send(self, events: Sequence[str]) -> None:
        """Waits for a client that lags."""
        if events or not self.has_left:
            self.has_left = True
            self._flush()
            await self._send({"type": "http.response.body", "body": event_bytes(events), "more_body": True})

    async def end(self, events: Sequence[str]) -> None:
        """The last events."""
        self.has_left = True
        self._flush()
        await self._send({"type": "http.response.body", "body": event_bytes(events), "more_body": False})

    def _flush(self) -> None:
        if self.writer is not None:
            self.writer.flush()


def event_bytes(events: Sequence[str]) -> bytes:
    if len(events) == 1:
        return f"data: {events[0]}\n\n".encode()
    return "".join([f"data: {event}\n\n" for event in events]).encode()
