"""ipc: slots in memory of a GPU that two processes of one machine share. K and V never leave the device.

The same as shm, by CUDA's IPC handles: the sender makes the memory for one pair and epoch; the receiver maps
it and knows it by a nonce. Within one process, where no handle can be mapped, it is found by that nonce; so
is memory of a CPU, which has no handles at all.
"""

import asyncio
import hmac
import logging
import secrets
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
# What comes before the first slot: slots are aligned as allocations are.
_HEAD_BYTES = 512

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

    def offer(self, layout: KVLayout) -> "DeviceMemoryOffer | None":
        if self._terms.slot_bytes < layout.largest_block_bytes:
            return None
        try:
            return DeviceMemoryOffer(self._terms, self._device)
        except RuntimeError as error:
            log.warning("no memory of %s to share: %s", self._device, error)
            return None

    def refusal(self, offer: kv_pb2.TransportOffer) -> str | None:
        try:
            _map(offer.device_memory, self._device)
        except (RuntimeError, ValueError) as error:
            return f"the sender's device memory cannot be mapped here: {error}"
        return None

    async def accept(self, opening: kv_pb2.BulkOpen) -> "DeviceMemoryAcceptance":
        offered = opening.transport.device_memory
        memory = await in_thread(lambda: _map(offered, self._device), "map device memory")
        return DeviceMemoryAcceptance(memory, SlotTerms(offered.num_slots, offered.slot_bytes))


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
    num_bytes = _num_bytes(SlotTerms(offered.num_slots, offered.slot_bytes))
    memory = _own.get(offered.nonce)
    if memory is None:
        if device.type == "cpu":
            raise ValueError("memory of a CPU is shared by shm")
        from kv_transfer import cuda_segment

        memory = cuda_segment.map_shared(offered.handle, num_bytes, device)
    with device_stream(device):
        found = bytes(memory[:_NONCE_BYTES].tolist())
    if len(memory) != num_bytes or not offered.nonce or not hmac.compare_digest(found, offered.nonce):
        raise ValueError("it has another nonce or size")
    return memory


class DeviceMemoryOffer:
    """A segment that nobody else has mapped yet (kv_transfer.bulk.BulkOffer).

    Raises:
        RuntimeError: there is no room, or it cannot be shared.
    """

    def __init__(self, terms: SlotTerms, device: torch.device) -> None:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        memory, handle = _allocate(_num_bytes(terms), device)
        with device_stream(device):
            memory[:_NONCE_BYTES] = torch.frombuffer(bytearray(nonce), dtype=torch.uint8)
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
