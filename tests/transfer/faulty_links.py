"""Faults on real links: they sit at the sender's end, between the hand-off and its transport."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from engine.kv_layout import KVLayout
from kv_transfer.bulk import Departure, Memory, SlotWriter
from kv_transfer.bulk_sender import BulkSender
from kv_transfer.frame import Frame, Payload, checksum, encode
from kv_transfer.grpc_transport import FRAMES_METHOD, BulkFrameWriter, GrpcSenderLink, StreamFrameWriter
from kv_transfer.messages import DropCause, Open, ReceiverMessage, SenderMessage
from kv_transfer.peers import Peer, PeerAddress, PeerPool
from kv_transfer.promises import kept
from kv_transfer.transport import LinkBroken
from kv_transfer.transport_choice import Transports
from tests.device import DEVICE
from tests.transfer.fault_injection import (
    POINTS,
    Disturber,
    Effect,
    Fault,
    LinkCut,
    Point,
    damaged_bytes,
    damaged_message,
)
from tests.transfer.prompts import on_host

T = TypeVar("T")
Pause = Callable[[], Awaitable[None]]


async def brief_pause() -> None:
    """Long enough for much else to happen."""
    await asyncio.sleep(0.005)


class FaultySenderLink:
    """A SenderLink with faults, over the real one. `pause` is how long a delay is."""

    def __init__(self, link: GrpcSenderLink, faults: Iterable[Fault], pause: Pause = brief_pause) -> None:
        faults = tuple(faults)
        self._link = link
        self._pause = pause
        self._sent: Disturber[SenderMessage] = Disturber.of(faults)
        self._received: Disturber[ReceiverMessage] = Disturber.of(faults)
        # None: no frame comes any more.
        self._frames: Disturber[Frame | None] = Disturber.of(faults)
        self._arrived: deque[ReceiverMessage] = deque()

    async def send(self, message: SenderMessage) -> None:
        effect = await self._strike(self._sent, POINTS[type(message)])
        for passing in self._passing(self._sent, effect, message, damaged_message(message)):
            await self._link.send(passing)

    async def receive(self) -> ReceiverMessage:
        while not self._arrived:
            message = await self._link.receive()
            effect = await self._strike(self._received, POINTS[type(message)])
            self._arrived.extend(self._passing(self._received, effect, message, damaged_message(message)))
        return self._arrived.popleft()

    async def write_frame(self, frame: Frame) -> asyncio.Future[None]:
        effect = await self._strike(self._frames, Point.FRAME)
        passing = self._passing(self._frames, effect, frame, frame)
        if effect is Effect.DAMAGE:
            return await self._write_damaged(frame)
        return await self._pass_frames(passing)

    async def finish_frames(self) -> None:
        effect = await self._strike(self._frames, Point.FRAMES_END)
        await self._pass_frames(self._passing(self._frames, effect, None, None))

    def abort(self) -> None:
        self._link.abort()

    async def _strike(self, disturber: Disturber, point: Point) -> Effect | None:
        effect = disturber.strike(point)
        if effect is Effect.DELAY:
            await self._pause()
        return effect

    def _passing(self, disturber: Disturber[T], effect: Effect | None, item: T, damaged: T) -> list[T]:
        try:
            return disturber.after(effect, item, damaged)
        except LinkCut:
            self._link.abort()
            raise LinkBroken(DropCause.PUSH_BROKEN, "a fault cut the link") from None

    async def _pass_frames(self, passing: list[Frame | None]) -> asyncio.Future[None]:
        """Ends with the last of them; none: nothing is read."""
        left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        left.set_result(None)
        for frame in passing:
            if frame is None:
                await self._link.finish_frames()
            else:
                left = await self._link.write_frame(frame)
        return left

    async def _write_damaged(self, frame: Frame) -> asyncio.Future[None]:
        """Sealed as it is, and damaged after that."""
        frames = self._link._frames
        if isinstance(frames, BulkFrameWriter):
            return await self._link.write_frame(DamagingWriter.of(frames._bulk).marked(frame))
        assert isinstance(frames, StreamFrameWriter)
        if frames._call is None:
            frames._call = frames._bulk.stream_unary(FRAMES_METHOD)(metadata=frames._metadata)
        await frames._call.write(damaged_bytes(encode(frame)))
        return await self._pass_frames([])


class _Marked(Frame):
    """A frame to be damaged."""

    __slots__ = ()


class DamagingWriter:
    """Writes into the slots of a bulk what was not sealed, for frames that are marked."""

    def __init__(self, writer: SlotWriter) -> None:
        self._writer = writer

    @classmethod
    def of(cls, bulk: BulkSender) -> "DamagingWriter":
        """Put into the bulk once."""
        if not isinstance(bulk._writer, cls):
            bulk._writer = cls(bulk._writer)
        return bulk._writer

    def marked(self, frame: Frame) -> Frame:
        return _Marked(
            frame.number,
            frame.layer_start,
            frame.layer_count,
            frame.token_start,
            frame.token_count,
            frame.parts,
        )

    @property
    def memory(self) -> Memory:
        return self._writer.memory

    def start(self, slot: int, frame: Frame) -> Departure:
        if not isinstance(frame, _Marked):
            return self._writer.start(slot, frame)
        damaged = self._writer.start(slot, replace(frame, parts=(_damaged_payload(frame),)))
        return Departure(kept(checksum(frame)), damaged.left)

    def close(self) -> None:
        self._writer.close()


def _damaged_payload(frame: Frame) -> Payload:
    damaged = memoryview(damaged_bytes(b"".join(on_host(part) for part in frame.parts)))
    if not frame.is_on_device:
        return damaged
    return torch.frombuffer(bytearray(damaged), dtype=torch.uint8).to(DEVICE)


@dataclass(slots=True)
class FaultyPeer:
    """A peer whose links have faults."""

    peer: Peer
    plans: dict[int, tuple[Fault, ...]]

    @property
    def memory(self) -> Memory:
        return self.peer.memory

    @property
    def transport(self) -> str:
        return self.peer.transport

    def link(self, opening: Open) -> GrpcSenderLink | FaultySenderLink:
        faults = self.plans.pop(opening.transfer.number, ())
        link = self.peer.link(opening)
        return FaultySenderLink(link, faults) if faults else link


class FaultyPeers(PeerPool):
    """A pool whose hand-offs meet the faults that are planned for them.

    Attributes:
        plans: by the number of the transfer.
    """

    def __init__(self, layout: KVLayout, worker_id: str, epoch: int, transports: Transports) -> None:
        super().__init__(layout, worker_id, epoch, transports=transports)
        self.plans: dict[int, tuple[Fault, ...]] = {}

    async def acquire(self, address: PeerAddress) -> FaultyPeer:  # pyright: ignore[reportIncompatibleMethodOverride]
        return FaultyPeer(await super().acquire(address), self.plans)

    async def release(self, address: PeerAddress, peer: FaultyPeer) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        await super().release(address, peer.peer)

    async def discard(self, address: PeerAddress, peer: FaultyPeer) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        await super().discard(address, peer.peer)
