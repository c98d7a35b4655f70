"""Wakes one task when there is something for it."""

import asyncio


class WakeUp:
    """An asyncio.Event for one waiter, at a fraction of its cost: a stream waits once for every token."""

    def __init__(self) -> None:
        self._is_due = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_awaited(self) -> bool:
        """A task waits, and was not woken yet."""
        return self._waiter is not None and not self._is_due

    def due(self) -> None:
        """The next `wait`, or the one that is waiting, returns."""
        self._is_due = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Returns once it was due since the last time."""
        if not self._is_due:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._is_due = False
