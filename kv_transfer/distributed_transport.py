"""gloo and nccl: payloads that torch.distributed moves, in the order in which they are announced.

One group of two ranks for each pair and epoch: the receiver is rank 0 and hosts where they meet. There are no
tags, so what was announced is always sent and always received; what was cancelled meanwhile goes to scrap.
Only a failure aborts a group; the pair then gets another one under its next epoch.

gloo moves memory of the host, nccl that of GPUs. Neither encrypts, and both trust the network.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, Literal, TypeVar

import numpy as np
import torch
import torch.distributed

from engine.kv_layout import KVLayout
from kv_transfer.bulk import Departure, Memory, SlotTerms
from kv_transfer.device_sealer import DeviceSealer, Sealed
from kv_transfer.frame import Frame, Payload, checksum
from kv_transfer.process_group import GlooKind, Kind, Meeting, NcclKind, ProcessGroup, Wait
from kv_transfer.promises import Promises, in_thread, kept, then
from protos import kv_pb2

T = TypeVar("T")


def is_available(name: Literal["gloo", "nccl"], device: torch.device) -> bool:
    """Whether this process can have such a group for K and V of `device`."""
    if name == "gloo":
        return torch.distributed.is_gloo_available()
    return device.type == "cuda" and torch.distributed.is_nccl_available()


class DistributedTransport:
    """See BulkTransport.

    Args:
        host: what this worker is reached at.
        device: of the engine.
    """

    def __init__(
        self, name: Literal["gloo", "nccl"], terms: SlotTerms, host: str, device: torch.device
    ) -> None:
        self.name = name
        self._kind: Kind = GlooKind(host) if name == "gloo" else NcclKind(host, device)
        self._terms = terms

    async def offer(self, layout: KVLayout) -> "GroupOffer":
        return GroupOffer(self.name, self._kind)

    async def refusal(self, offer: kv_pb2.TransportOffer) -> str | None:
        return None

    async def accept(self, opening: kv_pb2.BulkOpen) -> "GroupAcceptance":
        meeting = await in_thread(self._kind.meet, "listen")
        return GroupAcceptance(meeting, self._terms)


class GroupOffer:
    """See BulkOffer."""

    def __init__(self, name: str, kind: Kind) -> None:
        self.proto = kv_pb2.TransportOffer(name=name)
        self._kind = kind

    async def connect(self, ready: kv_pb2.BulkReady) -> "GroupWriter | DeviceGroupWriter":
        at = (ready.group_store.host, ready.group_store.port)
        group = await in_thread(lambda: self._kind.join(at, ready.token), "join a pair")
        return GroupWriter(group) if group.device.type == "cpu" else DeviceGroupWriter(group)

    def discard(self) -> None:
        """Nothing is kept."""


class GroupAcceptance:
    """See BulkAcceptance."""

    def __init__(self, meeting: Meeting, terms: SlotTerms) -> None:
        self.ready = kv_pb2.BulkReady(
            num_slots=terms.num_slots,
            slot_bytes=terms.slot_bytes,
            group_store=kv_pb2.GroupStore(host=meeting.host, port=meeting.port),
        )
        self._meeting = meeting
        self._terms = terms

    async def connect(self) -> "GroupReader":
        group, slots = await in_thread(self._form, "form a pair")
        return GroupReader(group, slots)

    def _form(self) -> tuple[ProcessGroup, torch.Tensor]:
        """
        Returns:
            The group, and [num_slots, slot_bytes] uint8 on its device. Of the host only what was used once
            is taken.
        """
        shape = (self._terms.num_slots, self._terms.slot_bytes)
        # What the engine's stream may still be at there it has left when the group is formed.
        slots = torch.empty(shape, dtype=torch.uint8, device=self._meeting.device)
        return self._meeting.form(self.ready.token), slots

    def discard(self) -> None:
        self._meeting.close()


class GroupWriter:
    """See SlotWriter. It sends from the frame's own memory, and holds that as long.

    After `close` that can be a moment longer: what is sent then reaches no hand-off.
    """

    memory = Memory.HOST

    def __init__(self, group: ProcessGroup) -> None:
        self._mover: _Mover[None] = _Mover(group, "kv send")

    def start(self, slot: int, frame: Frame) -> Departure:
        left = self._mover.move(lambda group: group.send(_payload(frame)), None)
        return Departure(kept(checksum(frame)), left)

    def close(self) -> None:
        self._mover.close()


def _payload(frame: Frame) -> torch.Tensor:
    """[num_bytes] uint8; a copy if the frame has several parts."""
    parts = frame.host_parts
    if len(parts) == 1:
        return torch.frombuffer(parts[0], dtype=torch.uint8)
    return torch.from_numpy(np.concatenate([np.frombuffer(part, np.uint8) for part in parts]))


class DeviceGroupWriter:
    """See SlotWriter: of memory of a device, sealed there before it is sent."""

    memory = Memory.DEVICE

    def __init__(self, group: ProcessGroup) -> None:
        self._sealer = DeviceSealer(group.device)
        self._mover: _Mover[None] = _Mover(group, "kv send")

    def start(self, slot: int, frame: Frame) -> Departure:
        sealing = self._sealer.seal(frame)
        return Departure(then(sealing, lambda sealed: kept(sealed.checksum)), then(sealing, self._send))

    def _send(self, sealed: Sealed) -> asyncio.Future[None]:
        return self._mover.move(lambda group: group.send(sealed.payload), None)

    def close(self) -> None:
        self._sealer.close()
        self._mover.close()


class GroupReader:
    """See SlotReader."""

    def __init__(self, group: ProcessGroup, slots: torch.Tensor) -> None:
        self._slots = slots
        self._mover: _Mover[Payload] = _Mover(group, "kv receive")

    def start(self, slot: int, payload_bytes: int) -> asyncio.Future[Payload]:
        target = self._slots[slot, :payload_bytes]
        arrived = target.numpy().data if target.device.type == "cpu" else target
        return self._mover.move(lambda group: group.receive(target), arrived)

    def close(self) -> None:
        self._mover.close()


@dataclass(frozen=True, slots=True)
class _Move(Generic[T]):
    """One payload.

    Attributes:
        begin: posts it to the group; for the thread.
        moved: for the loop, which gives it `result`.
    """

    begin: Callable[[ProcessGroup], Wait]
    moved: asyncio.Future[T]
    result: T


class _Mover(Generic[T]):
    """The thread that moves one rank's payloads, in order; as many are under way as are asked for."""

    def __init__(self, group: ProcessGroup, name: str) -> None:
        self._group = group
        self._asked: SimpleQueue[_Move[T] | None] = SimpleQueue()
        self._moving: Promises[T] = Promises()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def move(self, begin: Callable[[ProcessGroup], Wait], result: T) -> asyncio.Future[T]:
        """For the loop.

        Returns:
            Ends with `result` when the payload has moved, or with TransportFailed.
        """
        moved = self._moving.make()
        if not moved.done():
            self._asked.put(_Move(begin, moved, result))
        return moved

    def close(self) -> None:
        """For the loop. What is under way fails, at the other rank too; the thread ends soon."""
        if self._moving.failure is None:
            threading.Thread(target=self._abort, daemon=True).start()
            self._moving.fail("the group is closed")

    def _abort(self) -> None:
        try:
            self._group.abort()
        finally:
            self._asked.put(None)

    def _run(self) -> None:
        posted: deque[tuple[_Move[T], Wait]] = deque()
        try:
            while self._post(posted):
                move, wait = posted.popleft()
                wait()
                self._moving.keep(move.moved, move.result)
                # While it waits it holds nothing.
                del move, wait
        except Exception as error:
            self._moving.fail_from_thread(str(error).partition("\n")[0])
            self._group.abort()

    def _post(self, posted: deque[tuple[_Move[T], Wait]]) -> bool:
        """Posts all that is asked for, and waits for something if nothing is posted. False: closed."""
        while not posted or not self._asked.empty():
            move = self._asked.get()
            if move is None:
                return False
            posted.append((move, move.begin(self._group)))
        return True
