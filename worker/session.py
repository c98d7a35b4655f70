"""A router's session with this worker: what it has submitted, and what waits to be told to it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from protos import worker_pb2

# Events and load reports that may wait for a router that reads slowly. An overflow ends the session.
OUTBOX_MESSAGES = 4096


class SessionEnded(Exception):
    """The session with the router is over."""


class OutboxFull(Exception):
    """The router reads too slowly."""


class RouterSession:
    """One `Worker.Connect` stream.

    Invariant: numbers only grow, so one that is at most `highest_number` and not live is over.
    """

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self.highest_number = -1
        self._live: set[int] = set()
        self._arrivals: dict[int, asyncio.Future[None]] = {}
        self._outbox: asyncio.Queue[worker_pb2.WorkerMessage] = asyncio.Queue(OUTBOX_MESSAGES)
        self._event: worker_pb2.StepEvent | None = None
        self._num_events = 0
        self._num_cache_events = 0
        self._loop = asyncio.get_running_loop()
        # Done when the session must end, with the reason.
        self.failed: asyncio.Future[Exception] = self._loop.create_future()

    def begin(self, number: int) -> None:
        """Books a Submit.

        Raises:
            ValueError: the number is not larger than the ones before.
        """
        if number <= self.highest_number:
            raise ValueError(f"submission {number} after {self.highest_number}: numbers must grow")
        self.highest_number = number
        self._live.add(number)
        for waited in [n for n in self._arrivals if n <= number]:
            arrival = self._arrivals.pop(waited)
            if not arrival.done():
                arrival.set_result(None)

    def forget(self, number: int) -> None:
        self._live.discard(number)

    def is_live(self, number: int) -> bool:
        return number in self._live

    async def wait_for(self, number: int) -> None:
        """Returns once `number` or a larger one has been submitted.

        Raises:
            SessionEnded: the session ended first.
        """
        if number > self.highest_number:
            arrival = self._arrivals.setdefault(number, self._loop.create_future())
            await asyncio.shield(arrival)

    def end(self) -> list[int]:
        """Ends every wait on the session. Returns the numbers that were live."""
        for arrival in self._arrivals.values():
            if not arrival.done():
                arrival.set_exception(SessionEnded(self.session_id))
                # Whoever waited may be gone.
                arrival.exception()
        self._arrivals.clear()
        return list(self._live)

    def tell_cache(self, names: Sequence[bytes]) -> None:
        """All that the prefix cache answers for."""
        self._tell_cache(worker_pb2.CacheEvent(is_snapshot=True, stored=names))

    def tell_cache_changes(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """What changed since the last event."""
        self._tell_cache(worker_pb2.CacheEvent(stored=stored, removed=removed))

    def _tell_cache(self, event: worker_pb2.CacheEvent) -> None:
        event.number = self._num_cache_events
        self._num_cache_events += 1
        self.tell(worker_pb2.WorkerMessage(cache=event))

    @property
    def follows_cache(self) -> bool:
        """The snapshot is told: changes may follow."""
        return self._num_cache_events > 0

    def event(self) -> worker_pb2.StepEvent:
        """The event to add to; it leaves when the callback that runs now has returned.

        The report of one engine step is dispatched in one callback: hence one event per step.
        """
        if self._event is None:
            self._event = worker_pb2.StepEvent(step=self._num_events)
            self._num_events += 1
            self._loop.call_soon(self._flush)
        return self._event

    def _flush(self) -> None:
        event, self._event = self._event, None
        self.tell(worker_pb2.WorkerMessage(step=event))

    def tell(self, message: worker_pb2.WorkerMessage) -> None:
        """Queues a message; never blocks. A full outbox ends the session."""
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            if not self.failed.done():
                self.failed.set_result(OutboxFull(f"{OUTBOX_MESSAGES} messages wait for the router"))

    async def write_all(self, write: Callable[[worker_pb2.WorkerMessage], Awaitable[None]]) -> None:
        """Writes what is told, in order, until it is cancelled."""
        while True:
            await write(await self._outbox.get())
