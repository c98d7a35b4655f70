"""ipc: slots in memory of a GPU that two processes of one machine share: K and V do not pass the host.

As shm, by CUDA's IPC handles: the sender makes the memory for one pair and epoch, all of it at once; the
receiver maps it and knows it by a nonce. Unlike shm it could write it too, and who has the handle can map it.

Within one process no handle can be mapped: there the memory is found by its nonce. So tests can use memory of
a CPU.
"""

import asyncio
import hmac
import logging
import secrets
import struct
import weakref

import torch
from torch import Tensor

from engine.kv_layout import KVLayout
from kv_transfer.bulk import Departure, Memory, SlotTerms, TransportFailed
from kv_transfer.device_sealer import DeviceSealer, Sealed
from kv_transfer.device_stream import device_stream
from kv_transfer.frame import Frame, Payload
from kv_transfer.promises import in_thread, kept, then
from protos import kv_pb2

log = logging.getLogger(__name__)

_NONCE_BYTES = 32
# What comes before the first slot, which is aligned as allocations are: the nonce and the terms.
_HEAD_BYTES = 512
_TERMS = struct.Struct("<IQ")

# This process's own, by nonce.
_own: "weakref.WeakValueDictionary[bytes, Tensor]" = weakref.WeakValueDictionary()


class DeviceMemoryTransport:
    """See BulkTransport.

    Args:
        device: of the engine.
    """

    name = "ipc"

    def __init__(self, terms: SlotTerms, device: torch.device) -> None:
        self._terms = terms
        self._device = device

    async def offer(self, layout: KVLayout) -> "DeviceMemoryOffer | None":
        if self._terms.slot_bytes < layout.largest_block_bytes:
            return None
        try:
            return await in_thread(lambda: DeviceMemoryOffer(self._terms, self._device), "device memory")
        except TransportFailed as error:
            log.warning("nothing of %s to share: %s", self._device, error)
            return None

    async def refusal(self, offer: kv_pb2.TransportOffer) -> str | None:
        try:
            await self._map(offer.device_memory)
        except TransportFailed as error:
            return f"the sender's cannot be mapped here: {error}"
        return None

    async def accept(self, opening: kv_pb2.BulkOpen) -> "DeviceMemoryAcceptance":
        offered = opening.transport.device_memory
        memory = await self._map(offered)
        return DeviceMemoryAcceptance(memory, SlotTerms(offered.num_slots, offered.slot_bytes))

    async def _map(self, offered: kv_pb2.DeviceMemory) -> Tensor:
        """
        Raises:
            TransportFailed: it cannot be mapped, or is not the offered one.
        """
        return await in_thread(lambda: _map(offered, self._device), "device memory")


def _num_bytes(terms: SlotTerms) -> int:
    return _HEAD_BYTES + terms.num_slots * terms.slot_bytes


def _allocate(num_bytes: int, device: torch.device) -> tuple[Tensor, bytes]:
    """
    Raises:
        RuntimeError: see cuda_segment.allocate.
    """
    if device.type == "cpu":
        return torch.empty(num_bytes, dtype=torch.uint8), b""
    from kv_transfer import cuda_segment

    return cuda_segment.allocate(num_bytes, device)


def _map(offered: kv_pb2.DeviceMemory, device: torch.device) -> Tensor:
    """
    Raises:
        RuntimeError: see cuda_segment.map_shared.
        ValueError: it is not the offered one.
    """
    terms = SlotTerms(offered.num_slots, offered.slot_bytes)
    memory = _own.get(offered.nonce)
    if memory is None:
        if device.type == "cpu":
            raise ValueError("a CPU's memory is shared with other processes by shm")
        from kv_transfer import cuda_segment

        memory = cuda_segment.map_shared(offered.handle, _num_bytes(terms), device)
    head = _head(offered.nonce, terms)
    with device_stream(device):
        found = bytes(memory[: len(head)].tolist())
    if len(offered.nonce) != _NONCE_BYTES or not hmac.compare_digest(found, head):
        raise ValueError("it has another nonce or size")
    return memory


def _head(nonce: bytes, terms: SlotTerms) -> bytes:
    return nonce + _TERMS.pack(terms.num_slots, terms.slot_bytes)


class DeviceMemoryOffer:
    """A segment that nobody else has mapped yet (kv_transfer.bulk.BulkOffer).

    Raises:
        RuntimeError: there is no room, or it cannot be shared.
    """

    def __init__(self, terms: SlotTerms, device: torch.device) -> None:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        memory, handle = _allocate(_num_bytes(terms), device)
        head = torch.frombuffer(bytearray(_head(nonce, terms)), dtype=torch.uint8)
        with device_stream(device):
            memory[: len(head)] = head
        _own[nonce] = memory
        self._memory: Tensor | None = memory
        self._terms = terms
        self.proto = kv_pb2.TransportOffer(
            name=DeviceMemoryTransport.name,
            device_memory=kv_pb2.DeviceMemory(
                handle=handle, nonce=nonce, num_slots=terms.num_slots, slot_bytes=terms.slot_bytes
            ),
        )

    async def connect(self, ready: kv_pb2.BulkReady) -> "DeviceMemoryWriter":
        if self._memory is None:
            raise TransportFailed("the offer is discarded")
        if SlotTerms(ready.num_slots, ready.slot_bytes) != self._terms:
            raise TransportFailed("the receiver took up other slots than were offered")
        return DeviceMemoryWriter(self._memory, self._terms)

    def discard(self) -> None:
        """The memory ends with its last user."""
        self._memory = None


class DeviceMemoryAcceptance:
    """See BulkAcceptance."""

    def __init__(self, memory: Tensor, terms: SlotTerms) -> None:
        self._memory = memory
        self._terms = terms
        self.ready = kv_pb2.BulkReady(num_slots=terms.num_slots, slot_bytes=terms.slot_bytes)

    async def connect(self) -> "DeviceMemoryReader":
        return DeviceMemoryReader(self._memory, self._terms)

    def discard(self) -> None:
        """The mapping ends with its last user."""


def _slots(memory: Tensor, terms: SlotTerms) -> Tensor:
    return memory[_HEAD_BYTES:].view(terms.num_slots, terms.slot_bytes)


class DeviceMemoryWriter:
    """See SlotWriter: one copy on the device, straight into the slot."""

    memory = Memory.DEVICE

    def __init__(self, memory: Tensor, terms: SlotTerms) -> None:
        self._slots: Tensor | None = _slots(memory, terms)
        self._sealer = DeviceSealer(memory.device)

    def start(self, slot: int, frame: Frame) -> Departure:
        if self._slots is None:
            raise TransportFailed("the segment is discarded")
        sealing = self._sealer.seal(frame, self._slots[slot])
        return Departure(then(sealing, lambda sealed: kept(sealed.checksum)), then(sealing, _left))

    def close(self) -> None:
        self._slots = None
        self._sealer.close()


def _left(sealed: Sealed) -> asyncio.Future[None]:
    return kept(None)


class DeviceMemoryReader:
    """See SlotReader: a frame is there when it is announced."""

    def __init__(self, memory: Tensor, terms: SlotTerms) -> None:
        self._slots: Tensor | None = _slots(memory, terms)

    def start(self, slot: int, payload_bytes: int) -> asyncio.Future[Payload]:
        if self._slots is None:
            raise TransportFailed("the segment is discarded")
        return kept(self._slots[slot, :payload_bytes])

    def close(self) -> None:
        self._slots = None
