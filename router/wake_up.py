"""Wakes one task when there is something for it."""

import asyncio


class WakeUp:
    """An asyncio.Event for one waiter, at a fraction of its cost: a stream waits once for every token.

    Attributes:
        is_awaited: a task waits, and was not woken yet.
    """

    __slots__ = ("_is_due", "_waiter", "is_awaited")

    def __init__(self) -> None:
        self.is_awaited = False
        self._is_due = False
        self._waiter: asyncio.Future[None] | None = None

    def due(self) -> None:
        """The next `wait`, or the one that is waiting, returns."""
        self._is_due, self.is_awaited = True, False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Returns once it was due since the last time."""
        if not self._is_due:
            self._waiter, self.is_awaited = asyncio.get_running_loop().create_future(), True
            try:
                await self._waiter
            finally:
                self._waiter, self.is_awaited = None, False
        self._is_due = False
