"""The one thread that owns an engine, and its two queues to the asyncio loop."""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeVar

from engine.block_pool import CacheChanges
from engine.engine import Engine
from engine.step_result import EngineLoad, GrantedSequence, StepResult

T = TypeVar("T")

# Runs in the engine thread, between two steps.
Operation = Callable[[Engine], object]


class EngineFailed(RuntimeError):
    """The engine thread is over: its worker must be replaced. The cause is the exception's cause."""


class EngineStuck(EngineFailed):
    """The engine has work and does not come to the end of a step."""


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What happened in the engine between two reports.

    Attributes:
        granted: sequences that now hold the blocks which a hand-off fills.
        step: None when there was nothing to compute.
    """

    granted: tuple[GrantedSequence, ...]
    step: StepResult | None
    load: EngineLoad
    cache_changes: CacheChanges


class EngineThread:
    """Runs an engine's steps for as long as there is work, and operations between them.

    All methods are for the loop's thread. Reports arrive there too, in the order of the steps.
    """

    def __init__(self, build: Callable[[], Engine], on_report: Callable[[EngineReport], None]) -> None:
        self._build = build
        self._on_report = on_report
        self._loop = asyncio.get_running_loop()
        self._operations: SimpleQueue[Operation | None] = SimpleQueue()
        self._ready: asyncio.Future[Engine] = self._loop.create_future()
        self._calls: set[asyncio.Future] = set()
        # When the step or operation began that runs, `time.monotonic()` seconds; None: there is no work.
        self._began: float | None = None
        # Ends with the thread: None after `stop`, else the error that ended it.
        self.ended: asyncio.Future[Exception | None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    async def start(self) -> Engine:
        """Builds the engine in its thread.

        Returns:
            The engine, whose constant fields (layout, limits) may be read from anywhere.

        Raises:
            Exception: what `build` raised.
        """
        self._thread.start()
        return await self._ready

    async def stop(self) -> None:
        """Ends the thread after the step that runs, and waits for it."""
        self._operations.put(None)
        await asyncio.wait([self.ended])

    def give_up_after(self, limit_s: float) -> None:
        """Ends with `EngineStuck` if what runs has run for longer. The thread itself cannot be ended."""
        began = self._began
        if began is not None and time.monotonic() - began > limit_s:
            self._end(EngineStuck(f"no step has ended for more than {limit_s:g} s"))

    def post(self, operation: Operation) -> None:
        """Runs `operation` before the next step. It must not raise: that would end the engine."""
        self._operations.put(operation)

    async def call(self, operation: Callable[[Engine], T], on_result: Callable[[T], None] | None = None) -> T:
        """Runs `operation` before the next step.

        Args:
            on_result: called on the loop with the result, before the report of any later step comes;
                whoever awaits this call may wake up after it.

        Returns:
            What it returned.

        Raises:
            EngineFailed: the engine ended before it ran.
            Exception: what it raised; the engine goes on.
        """
        future: asyncio.Future[T] = self._loop.create_future()
        if self.ended.done():
            raise EngineFailed("the engine has ended")

        def run(engine: Engine) -> None:
            try:
                result = operation(engine)
            except Exception as error:
                self._loop.call_soon_threadsafe(_fail, future, error)
            else:
                self._loop.call_soon_threadsafe(_resolve, future, result, on_result)

        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        self._operations.put(run)
        return await future

    def _run(self) -> None:
        error: Exception | None = None
        try:
            engine = self._build()
            self._loop.call_soon_threadsafe(_resolve, self._ready, engine)
            is_idle = True
            while self._run_operations(engine, is_idle):
                is_idle = not self._step(engine)
        except Exception as caught:
            error = caught
        self._loop.call_soon_threadsafe(self._end, error)

    def _run_operations(self, engine: Engine, is_idle: bool) -> bool:
        """Runs what is queued; an idle engine waits for something. False: it is time to stop."""
        may_wait = is_idle
        while may_wait or not self._operations.empty():
            self._began = None
            operation = self._operations.get()
            self._began = time.monotonic()
            if operation is None:
                return False
            operation(engine)
            may_wait = False
        return True

    def _step(self, engine: Engine) -> bool:
        """False: there was nothing to compute, and will not be before an operation changes that."""
        self._began = time.monotonic()
        granted = engine.admit()
        launched = engine.launch()
        result = engine.collect(launched) if launched is not None else None
        report = EngineReport(tuple(granted), result, engine.load(), engine.take_cache_changes())
        self._loop.call_soon_threadsafe(self._on_report, report)
        return result is not None

    def _end(self, error: Exception | None) -> None:
        if not self._ready.done():
            self._ready.set_exception(error or EngineFailed("stopped before it was ready"))
        for future in list(self._calls):
            _fail(future, EngineFailed(f"the engine ended: {error}"))
        if not self.ended.done():
            self.ended.set_result(error)


def _resolve(future: asyncio.Future[T], result: T, on_result: Callable[[T], None] | None = None) -> None:
    if future.done():
        return
    future.set_result(result)
    if on_result is not None:
        on_result(result)


def _fail(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
