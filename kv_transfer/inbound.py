"""A hand-off as the decode worker's side drives it: one HandoffReceiver between a link and a sink."""

import asyncio
import logging
from collections.abc import Awaitable, Coroutine
from typing import TypeVar

from engine.kv_layout import KVLayout
from kv_transfer.frame import DamagedFrame, cut
from kv_transfer.messages import (
    Accepted,
    Close,
    Commit,
    Credit,
    Drop,
    DropCause,
    Grant,
    Open,
    ReceiverMessage,
)
from kv_transfer.receiver import (
    AdmitDone,
    AdmitFailed,
    AdmitSequence,
    BlocksReserved,
    Dropped,
    EndLink,
    FrameArrived,
    FrameDamaged,
    FramesFinished,
    FreeBlocks,
    HandoffReceiver,
    LinkEnded,
    ReceiverAction,
    ReceiverEvent,
    RequestBlocks,
    ReserveFailed,
    ScatterDone,
    ScatterFailed,
    ScatterFrame,
    SendAccepted,
    SendCredit,
    SendGrant,
)
from kv_transfer.sink import HandoffDropped, HandoffSink
from kv_transfer.transport import Arrival, LinkBroken, ReceiverLink

log = logging.getLogger(__name__)

T = TypeVar("T")


class HandoffInbound:
    """One hand-off that the door let in. `run` is its whole life; all on the event loop.

    The sink's `release` or `admit` has happened when `run` returns, also when the task that awaits it is
    cancelled: `run` then waits for scatters under way.
    """

    def __init__(
        self, link: ReceiverLink, sink: HandoffSink, layout: KVLayout, num_tokens: int, terms: Grant
    ) -> None:
        self._link = link
        self._sink = sink
        self._layout = layout
        self._receiver = HandoffReceiver(layout, num_tokens, terms)
        self._outbox: asyncio.Queue[ReceiverMessage] = asyncio.Queue()
        # By number: what the receiver has taken, until its scatter begins.
        self._arrivals: dict[int, Arrival] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        self._sink.dropped.add_done_callback(self._on_dropped)
        self._link.broken.add_done_callback(self._on_broken)
        self._act(self._receiver.start())
        self._spawn(self._read_control())
        self._spawn(self._read_frames())
        self._spawn(self._write_control())
        try:
            await asyncio.shield(self._over)
        except asyncio.CancelledError:
            self._feed(LinkEnded("the receiver stops"))
            await asyncio.shield(self._over)
            raise
        finally:
            await self._stop()

    async def _stop(self) -> None:
        self._sink.dropped.remove_done_callback(self._on_dropped)
        self._link.broken.remove_done_callback(self._on_broken)
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _feed(self, event: ReceiverEvent) -> None:
        self._act(self._receiver.handle(event))

    def _act(self, actions: tuple[ReceiverAction, ...]) -> None:
        for action in actions:
            match action:
                case RequestBlocks():
                    self._spawn(self._reserve())
                case SendGrant(grant):
                    self._outbox.put_nowait(grant)
                case SendCredit(frames):
                    self._outbox.put_nowait(Credit(frames))
                case ScatterFrame(frame):
                    self._spawn(self._scatter(self._arrivals.pop(frame.number)))
                case AdmitSequence(first_tokens, kv_bytes):
                    self._spawn(self._admit(first_tokens, kv_bytes))
                case SendAccepted(kv_bytes):
                    self._outbox.put_nowait(Accepted(kv_bytes))
                case EndLink(drop):
                    self._link.end(drop)
                case FreeBlocks(drop):
                    self._sink.release(drop)
                    self._over.set_result(None)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """However a task fails, the hand-off does not wait for it."""
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("a hand-off failed at its receiver", exc_info=error)
        self._feed(Dropped(Drop(DropCause.INTERNAL, repr(error))))

    def _on_dropped(self, dropped: asyncio.Future[Drop]) -> None:
        if not dropped.cancelled():
            self._feed(Dropped(dropped.result()))

    def _on_broken(self, broken: asyncio.Future[str]) -> None:
        if not broken.cancelled():
            self._feed(LinkEnded(broken.result()))

    async def _reserve(self) -> None:
        if self._over.done():
            return  # asked now, the engine would hold for good what was released before
        outcome = await self._attempt(self._sink.reserve())
        self._feed(ReserveFailed(outcome) if isinstance(outcome, Drop) else BlocksReserved(outcome))

    async def _scatter(self, arrival: Arrival) -> None:
        number = arrival.frame.number
        try:
            outcome = await self._attempt(self._scatter_and_check(arrival))
        finally:
            arrival.release()
        self._feed(ScatterFailed(number, outcome) if isinstance(outcome, Drop) else ScatterDone(number))

    async def _scatter_and_check(self, arrival: Arrival) -> None:
        await self._sink.scatter(cut(arrival.frame, self._layout))
        try:
            await arrival.check()
        except DamagedFrame as error:
            raise HandoffDropped(Drop(DropCause.DAMAGED, str(error))) from error
        except LinkBroken as broken:
            raise HandoffDropped(Drop(broken.cause, broken.detail)) from broken

    async def _admit(self, first_tokens: tuple[int, ...], kv_bytes: int) -> None:
        outcome = await self._attempt(self._sink.admit(first_tokens, kv_bytes))
        self._feed(AdmitFailed(outcome) if isinstance(outcome, Drop) else AdmitDone())

    async def _attempt(self, call: Awaitable[T]) -> T | Drop:
        """What the sink's call returned, or failed with. Whatever it raises must end the grant."""
        try:
            return await call
        except HandoffDropped as dropped:
            return dropped.drop
        except asyncio.CancelledError:
            if self._over.done():
                raise
            return Drop(DropCause.INTERNAL, "the engine gave the hand-off up")
        except Exception as error:
            log.exception("a hand-off failed at its receiver")
            return Drop(DropCause.INTERNAL, repr(error))

    async def _read_control(self) -> None:
        try:
            while True:
                message = await self._link.receive()
                match message:
                    case Commit() | Close():
                        self._feed(message)
                    case Open():
                        self._feed(LinkEnded("the sender opened twice"))
        except LinkBroken as broken:
            self._feed(LinkEnded(broken.detail))

    async def _read_frames(self) -> None:
        try:
            while (arrival := await self._link.read_frame()) is not None:
                self._take(arrival)
            self._feed(FramesFinished())
        except DamagedFrame as error:
            self._feed(FrameDamaged(str(error)))
        except LinkBroken as broken:
            self._feed(LinkEnded(broken.detail))

    def _take(self, arrival: Arrival) -> None:
        """What the receiver takes is scattered, then released; what it refuses or ignores is released now."""
        actions = self._receiver.handle(FrameArrived(arrival.frame))
        if any(isinstance(action, ScatterFrame) for action in actions):
            self._arrivals[arrival.frame.number] = arrival
        else:
            arrival.release()
        self._act(actions)

    async def _write_control(self) -> None:
        """The sequence runs whether or not its Accepted arrives."""
        while True:
            message = await self._outbox.get()
            try:
                await self._link.send(message)
            except LinkBroken as broken:
                self._feed(LinkEnded(broken.detail))
            if isinstance(message, Accepted):
                self._link.end(None)
                self._over.set_result(None)
