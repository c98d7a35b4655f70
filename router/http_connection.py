"""One client's HTTP connection, with shorter ways than ASGI's for the bodies of streams."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import ClassVar, cast
from weakref import WeakKeyDictionary

from starlette.types import Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

# Of the ASGI scope's "extensions".
BODY_WRITER = "baton.body_writer"
HANG_UP = "baton.hang_up"


class HttpConnection(HttpToolsProtocol):
    """uvicorn's, which offers the application a `BodyWriter` for each request, and its `HangUp`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._hang_up = HangUp()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._hang_up.happened()

    def on_headers_complete(self) -> None:
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is before:
            return
        extensions = self.scope.setdefault("extensions", {})
        extensions[BODY_WRITER] = {"writer": BodyWriter(self.cycle, _Writes.of(self.loop))}
        extensions[HANG_UP] = {"hang_up": self._hang_up}
        if self.scope["method"] == "POST":
            self.cycle.transport = _HeadWithBody(self.cycle)


class HangUp:
    """The end of a connection, told to who works for its client. `receive` wants a task that waits for it."""

    def __init__(self) -> None:
        self._has_happened = False
        self._listeners: set[Callable[[], None]] = set()

    def tell(self, listener: Callable[[], None]) -> Callable[[], None]:
        """At once, if it has happened. Returns what takes that back."""
        self._listeners.add(listener)
        if self._has_happened:
            listener()
        return partial(self._listeners.discard, listener)

    def happened(self) -> None:
        self._has_happened = True
        for listener in [*self._listeners]:
            listener()


class BodyWriter:
    """Writes parts of the body of one answer from anywhere in the loop.

    `send` does the same in a task that has to be woken for it. Who sends flushes before.

    Attributes:
        send: the server's. Every layer of middleware wraps it once more, to see the head of an answer;
            a body needs none of them.
    """

    __slots__ = ("_cycle", "_flow", "_transport", "_writes", "send")

    def __init__(self, cycle: RequestResponseCycle, writes: "_Writes") -> None:
        self.send = cast("Send", cycle.send)
        self._cycle = cycle
        self._flow = cycle.flow
        self._transport = cycle.transport
        self._writes = writes

    @property
    def is_open(self) -> bool:
        """The answer is under way, and the client is there and keeps up. Else `send` knows what to do."""
        cycle = self._cycle
        is_under_way = cycle.chunked_encoding is True and not cycle.response_complete
        return is_under_way and not cycle.disconnected and not self._flow.write_paused

    def write(self, part: bytes) -> None:
        """Only while it is open. Nothing, as the first part, lets the head go."""
        data = b"%x\r\n%b\r\n" % (len(part), part) if part else b""
        kept = self._cycle.transport
        if isinstance(kept, _HeadWithBody):
            # The first token is what its client waits for.
            kept.write(data)
        else:
            self._writes.add(self._transport, data)

    def take_back(self) -> None:
        """The head, which was sent and is kept: nothing has left, and another may follow."""
        kept = self._cycle.transport
        assert isinstance(kept, _HeadWithBody)
        kept.drop()
        self._cycle.response_started = False
        self._cycle.chunked_encoding = None

    def flush(self) -> None:
        """What was written leaves now, before what is sent next."""
        self._writes.flush()


class _Writes:
    """What this turn of the loop has for the clients, all written at its end.

    The tokens of one step come in one turn: first all are made into events, then the kernel has the
    processor's caches to itself.
    """

    _of_loop: ClassVar["WeakKeyDictionary[asyncio.AbstractEventLoop, _Writes]"] = WeakKeyDictionary()

    def __init__(self) -> None:
        self._waiting: list[tuple[asyncio.Transport, bytes]] = []

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> "_Writes":
        writes = cls._of_loop.get(loop)
        if writes is None:
            writes = cls._of_loop[loop] = cls()
        return writes

    def add(self, transport: asyncio.Transport, data: bytes) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self.flush)
        self._waiting.append((transport, data))

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for transport, data in waiting:
            if not transport.is_closing():
                transport.write(data)


class _HeadWithBody(asyncio.Transport):
    """Keeps the head of an answer until the first part of its body: one packet, as ASGI wants it."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        super().__init__()
        self._cycle = cycle
        self._transport = cycle.transport
        self._head: bytes | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._head is not None:
            self._transport.write(self.release() + data)
        elif self._cycle.response_started:
            self._head = bytes(data)
        else:
            # "100 Continue".
            self._transport.write(data)

    def release(self) -> bytes:
        """The head, which is kept no longer: the server writes past this from now on."""
        assert self._head is not None
        self._cycle.transport = self._transport
        return self._head

    def drop(self) -> None:
        self._head = None

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        if self._head is not None:
            self._transport.write(self._head)
        self._transport.close()
