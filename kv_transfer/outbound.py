"""A hand-off as the prefill worker drives it: one HandoffSender over one link. All on the event loop."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from kv_transfer.bulk import Memory
from kv_transfer.frame import Frame, Payload
from kv_transfer.messages import Accepted, Close, CloseReason, Commit, Drop, DropCause, Open, TransferId
from kv_transfer.packer import KVPiece
from kv_transfer.peers import PeerAddress, PeerPool
from kv_transfer.sender import (
    Closed,
    CloseRequested,
    CommitRequested,
    FinishFrames,
    FrameLeft,
    HandoffSender,
    LinkFailed,
    LinkGone,
    ReleaseBlocks,
    ReportGranted,
    ReportOutcome,
    SendClose,
    SendCommit,
    SenderAction,
    SenderEvent,
    SendFrame,
    SendOpen,
)
from kv_transfer.transport import LinkBroken, PeerLost, SenderLink

log = logging.getLogger(__name__)

# How long the receiver may take to end the streams of a hand-off that is over.
_CLOSE_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffTicket:
    """What a prefill worker is told of a hand-off that it makes."""

    receiver: PeerAddress
    transfer: TransferId
    secret: bytes = field(repr=False)
    num_tokens: int


class HandoffEnded(Exception):
    """The hand-off ended before its grant came."""

    def __init__(self, outcome: Accepted | Drop | Closed) -> None:
        super().__init__(str(outcome))
        self.outcome = outcome


class HandoffOutbound:
    """One hand-off, from `open` to its outcome. No method but `open` waits for anything.

    Attributes:
        outcome: Accepted, Drop (it failed; a hint, the receiver decides) or Closed (`close` or `cancel`).
        memory: where the offered bytes must lie; known when `open` has returned.
        transport: the name of the way that its frames go; known then too.
        released: resolves when nothing of the hand-off reads the offered bytes any more: before the outcome
            when it goes well. Both resolve always, once, with a value: await them through `asyncio.shield`,
            so that a waiter that is cancelled does not cancel them.
    """

    def __init__(self, peers: PeerPool, ticket: HandoffTicket) -> None:
        loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[Accepted | Drop | Closed] = loop.create_future()
        self.released: asyncio.Future[None] = loop.create_future()
        self.memory = Memory.HOST
        self.transport = ""
        self._granted: asyncio.Future[int] = loop.create_future()
        self._peers = peers
        self._ticket = ticket
        self._sender = HandoffSender(peers.layout, ticket.num_tokens)
        self._control: asyncio.Queue[Open | Commit | Close] = asyncio.Queue()
        self._frames: asyncio.Queue[Frame | None] = asyncio.Queue()
        self._peer_lost = False

    async def open(self) -> int:
        """Connects, asks for blocks, and waits for the receiver's grant. Cancelling it cancels all.

        Returns:
            How many first tokens the receiver has the KV of: only what follows is to be offered.

        Raises:
            HandoffEnded: with the outcome that came instead.
        """
        self._peers.spawn(self._run(), f"hand-off {self._ticket.transfer}")
        try:
            await asyncio.wait({self._granted, self.outcome}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self.outcome.done():
            raise HandoffEnded(self.outcome.result())
        return self._granted.result()

    def offer(self, layer: int, token_start: int, token_end: int, payload: Payload) -> None:
        """Sends the K and V of tokens [token_start, token_end) of a layer. Ignored after the outcome.

        Args:
            payload: what engine/kv_wire.py packs, in `memory`; it stays as it is until `released`.

        Raises:
            ValueError: before the grant, twice, out of range, or of the wrong length.
        """
        self._feed(KVPiece(layer, token_start, token_end, payload))

    def commit(self, first_tokens: tuple[int, ...]) -> None:
        """Every layer of every token was offered. Ignored after the outcome.

        Raises:
            ValueError: something was not.
        """
        self._feed(CommitRequested(first_tokens))

    def close(self, reason: CloseReason, detail: str = "") -> None:
        """Ends the hand-off; after `commit` that may be too late. Ignored after the outcome."""
        self._feed(CloseRequested(reason, detail))

    def cancel(self) -> None:
        self.close(CloseReason.CANCELLED)

    def _feed(self, event: SenderEvent) -> None:
        self._act(self._sender.handle(event))

    def _act(self, actions: tuple[SenderAction, ...]) -> None:
        for action in actions:
            match action:
                case SendFrame(frame):
                    self._frames.put_nowait(frame)
                case FinishFrames():
                    self._frames.put_nowait(None)
                case SendOpen():
                    self._control.put_nowait(self._opening())
                case SendCommit(num_frames, first_tokens):
                    self._control.put_nowait(Commit(num_frames, first_tokens))
                case SendClose(reason, detail):
                    self._control.put_nowait(Close(reason, detail))
                case ReportGranted(cached_tokens):
                    self._granted.set_result(cached_tokens)
                case ReportOutcome(outcome):
                    self.outcome.set_result(outcome)
                case ReleaseBlocks():
                    self.released.set_result(None)

    def _opening(self) -> Open:
        return Open(
            transfer=self._ticket.transfer,
            secret=self._ticket.secret,
            receiver_epoch=self._ticket.receiver.epoch,
            sender_id=self._peers.worker_id,
            sender_epoch=self._peers.epoch,
            num_tokens=self._ticket.num_tokens,
        )

    async def _run(self) -> None:
        receiver = self._ticket.receiver
        try:
            peer = await self._peers.acquire(receiver)
            try:
                self.memory, self.transport = peer.memory, peer.transport
                if not self.outcome.done():
                    await self._drive(peer.link(self._opening()))
            finally:
                if self._peer_lost:
                    await self._peers.discard(receiver, peer)
                else:
                    await self._peers.release(receiver, peer)
        except LinkBroken as broken:
            self._feed(LinkFailed(broken.cause, broken.detail))
        finally:
            self._feed(LinkGone())

    async def _drive(self, link: SenderLink) -> None:
        self._act(self._sender.start())
        reader = asyncio.create_task(self._guard(partial(self._read, link)))
        tasks = (
            reader,
            asyncio.create_task(self._guard(partial(self._write_control, link))),
            asyncio.create_task(self._guard(partial(self._write_frames, link))),
        )
        try:
            await asyncio.wait({self.outcome})
            if not isinstance(self.outcome.result(), Drop):
                # The receiver ends the streams: were they aborted here, that could overtake a Close.
                await asyncio.wait({reader}, timeout=_CLOSE_LIMIT_S)
        finally:
            link.abort()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _guard(self, work: Callable[[], Awaitable[None]]) -> None:
        """However `work` ends before the outcome, it ends the hand-off."""
        try:
            await work()
        except LinkBroken as broken:
            # What damaged a frame may damage the next: it is built again too.
            lost = isinstance(broken, PeerLost) or broken.cause is DropCause.DAMAGED
            self._peer_lost = self._peer_lost or lost
            self._feed(LinkFailed(broken.cause, broken.detail))
        except asyncio.CancelledError:
            self._feed(LinkFailed(DropCause.PUSH_BROKEN, "the call was cancelled"))
            raise
        except Exception as error:
            log.exception("hand-off %s failed", self._ticket.transfer)
            self._feed(LinkFailed(DropCause.INTERNAL, repr(error)))

    async def _read(self, link: SenderLink) -> None:
        while True:
            self._feed(await link.receive())

    async def _write_control(self, link: SenderLink) -> None:
        while True:
            await link.send(await self._control.get())

    async def _write_frames(self, link: SenderLink) -> None:
        try:
            async with asyncio.TaskGroup() as leaving:
                await self._begin_frames(link, leaving)
        except ExceptionGroup as group:
            # This task's own error: the others are guarded.
            raise group.exceptions[0] from None
        await link.finish_frames()

    async def _begin_frames(self, link: SenderLink, leaving: asyncio.TaskGroup) -> None:
        while (frame := await self._frames.get()) is not None:
            if self._sender.outcome is not None:
                self._feed(FrameLeft(frame.number))
                continue
            left = await link.write_frame(frame)
            if left.done():
                await self._see_off(frame, left)
            else:
                leaving.create_task(self._guard(partial(self._see_off, frame, left)))

    async def _see_off(self, frame: Frame, left: asyncio.Future[None]) -> None:
        await left
        self._feed(FrameLeft(frame.number))
