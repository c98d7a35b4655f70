"""Futures of the loop that another thread keeps: for what cannot be awaited."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from kv_transfer.bulk import TransportFailed

T = TypeVar("T")
U = TypeVar("U")


def in_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Runs what waits for others in a thread that nothing waits for.

    Returns:
        Ends with what `work` returned, or with TransportFailed if it raised.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result = work()
        # Libraries have errors of their own, without a common base.
        except Exception as error:
            failed = TransportFailed(f"{name}: {str(error).partition(chr(10))[0]}")
            _tell(loop, lambda: None if done.done() else done.set_exception(failed))
        else:
            _tell(loop, lambda: None if done.done() else done.set_result(result))

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


def _tell(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    # A loop that is closed has nobody to be told.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)


def kept(result: T) -> asyncio.Future[T]:
    """For the loop: what is there already."""
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    future.set_result(result)
    return future


def then(first: asyncio.Future[T], begin: Callable[[T], asyncio.Future[U]]) -> asyncio.Future[U]:
    """For the loop: ends as what `begin`, which must not raise, makes of the first's result; or as the first
    fails.
    """
    second: asyncio.Future[U] = asyncio.get_running_loop().create_future()

    def pass_on(begun: asyncio.Future[U]) -> None:
        if (error := begun.exception()) is not None:
            second.set_exception(error)
        else:
            second.set_result(begun.result())

    def on_first(ended: asyncio.Future[T]) -> None:
        if (error := ended.exception()) is not None:
            second.set_exception(error)
        else:
            begin(ended.result()).add_done_callback(pass_on)

    first.add_done_callback(on_first)
    return second


class Promises(Generic[T]):
    """What one thread has promised to the loop. After the first failure all of it fails.

    Attributes:
        failure: None: all is well. For the loop.
    """

    def __init__(self) -> None:
        self.failure: str | None = None
        self._loop = asyncio.get_running_loop()
        self._open: set[asyncio.Future[T]] = set()

    def make(self) -> asyncio.Future[T]:
        """For the loop. Failed already, if anything has."""
        promise: asyncio.Future[T] = self._loop.create_future()
        if self.failure is None:
            self._open.add(promise)
        else:
            _fail(promise, self.failure)
        return promise

    def keep(self, promise: asyncio.Future[T], result: T) -> None:
        """For the thread."""
        _tell(self._loop, partial(self._keep, promise, result))

    def fail_from_thread(self, detail: str) -> None:
        _tell(self._loop, partial(self.fail, detail))

    def fail(self, detail: str) -> None:
        """For the loop."""
        if self.failure is None:
            self.failure = detail
        for promise in self._open:
            _fail(promise, detail)
        self._open.clear()

    def _keep(self, promise: asyncio.Future[T], result: T) -> None:
        self._open.discard(promise)
        if not promise.done():
            promise.set_result(result)


def _fail(promise: asyncio.Future[T], detail: str) -> None:
    if not promise.done():
        promise.set_exception(TransportFailed(detail))
        # Whoever awaited it may be gone.
        promise.exception()
