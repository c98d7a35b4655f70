"""shm: slots in memory that two processes of one machine share.

The sender makes an anonymous file (memfd) for each pair and epoch, which has no name that could be left
behind. The receiver opens it through /proc/<pid>/fd and knows it by a nonce: the same host name, pid or
address proves nothing between containers. It maps it for reading only.

It shares memory of the host; device_memory.py is the same between GPUs.
"""

import asyncio
import fcntl
import hmac
import logging
import mmap
import os
import secrets
from pathlib import Path

import numpy as np

from engine.kv_layout import KVLayout
from kv_transfer.bulk import Departure, Memory, SlotTerms, SlotWriter, TransportFailed
from kv_transfer.frame import Frame, Payload, checksum
from kv_transfer.promises import kept
from protos import kv_pb2

log = logging.getLogger(__name__)

_NAME = "baton-kv"
_LINK = f"/memfd:{_NAME}"
_NONCE_BYTES = 32
# What comes before the first slot.
_HEAD_BYTES = mmap.PAGESIZE
# Neither end can make the other's mapping end in a bus error.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _segment_bytes(terms: SlotTerms) -> int:
    return _HEAD_BYTES + terms.num_slots * terms.slot_bytes


class SharedMemoryTransport:
    """See BulkTransport. Memory is taken only for slots that were used once."""

    name = "shm"

    def __init__(self, terms: SlotTerms) -> None:
        self._terms = terms

    async def offer(self, layout: KVLayout) -> "SharedMemoryOffer | None":
        if self._terms.slot_bytes < layout.largest_block_bytes:
            return None
        try:
            return SharedMemoryOffer(self._terms)
        except OSError as error:
            log.warning("no shared memory: %s", error)
            return None

    async def refusal(self, offer: kv_pb2.TransportOffer) -> str | None:
        try:
            _map_offered(offer.memory).close()
        except (OSError, ValueError) as error:
            return f"the sender's memory cannot be mapped here: {error}"
        return None

    async def accept(self, opening: kv_pb2.BulkOpen) -> "SharedMemoryAcceptance":
        try:
            memory = _map_offered(opening.transport.memory)
        except (OSError, ValueError) as error:
            raise TransportFailed(f"the sender's memory cannot be mapped here: {error}") from error
        offered = opening.transport.memory
        return SharedMemoryAcceptance(memory, SlotTerms(offered.num_slots, offered.slot_bytes))


def _map_offered(offered: kv_pb2.SharedMemory) -> mmap.mmap:
    """
    Raises:
        OSError: there is no such file, or it may not be opened.
        ValueError: it is not the offered one.
    """
    path = f"/proc/{offered.pid}/fd/{offered.fd}"
    # Anybody else's file is not even opened: that could wait, or have effects.
    if not str(Path(path).readlink()).startswith(_LINK):
        raise ValueError(f"{path} is another file")
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = _segment_bytes(SlotTerms(offered.num_slots, offered.slot_bytes))
        if os.fstat(file).st_size != size or fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ValueError(f"{path} is not a sealed file of {size} bytes")
        memory = mmap.mmap(file, size, prot=mmap.PROT_READ)
    finally:
        os.close(file)
    if not offered.nonce or not hmac.compare_digest(memory[:_NONCE_BYTES], offered.nonce):
        memory.close()
        raise ValueError(f"{path} has another nonce")
    return memory


class SharedMemoryOffer:
    """A segment that nobody else has mapped yet (kv_transfer.bulk.BulkOffer)."""

    def __init__(self, terms: SlotTerms) -> None:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self._file: int | None = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._file, _segment_bytes(terms))
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _SEALS)
        self._memory = mmap.mmap(self._file, _segment_bytes(terms))
        self._memory[:_NONCE_BYTES] = nonce
        self._terms = terms
        self.proto = kv_pb2.TransportOffer(
            name=SharedMemoryTransport.name,
            memory=kv_pb2.SharedMemory(
                pid=os.getpid(),
                fd=self._file,
                nonce=nonce,
                num_slots=terms.num_slots,
                slot_bytes=terms.slot_bytes,
            ),
        )

    async def connect(self, ready: kv_pb2.BulkReady) -> SlotWriter:
        return SharedMemoryWriter(self._memory, self._terms)

    def discard(self) -> None:
        """The mapping ends with its last user."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class SharedMemoryAcceptance:
    """See BulkAcceptance."""

    def __init__(self, memory: mmap.mmap, terms: SlotTerms) -> None:
        self._memory = memory
        self._terms = terms
        self.ready = kv_pb2.BulkReady(num_slots=terms.num_slots, slot_bytes=terms.slot_bytes)

    async def connect(self) -> "SharedMemoryReader":
        return SharedMemoryReader(self._memory, self._terms)

    def discard(self) -> None:
        """The mapping ends with its last user."""


class _Slots:
    """The slots of a mapping, as numpy sees them; the mapping ends with the last view of it."""

    def __init__(self, memory: mmap.mmap, terms: SlotTerms) -> None:
        self._slots: np.ndarray | None = np.frombuffer(memory, np.uint8, offset=_HEAD_BYTES).reshape(
            terms.num_slots, terms.slot_bytes
        )

    def __getitem__(self, slot: int) -> np.ndarray:
        if self._slots is None:
            raise TransportFailed("the segment is discarded")
        return self._slots[slot]

    def close(self) -> None:
        self._slots = None


class SharedMemoryWriter:
    """See SlotWriter: one copy, straight into the slot."""

    memory = Memory.HOST

    def __init__(self, memory: mmap.mmap, terms: SlotTerms) -> None:
        self._slots = _Slots(memory, terms)

    def start(self, slot: int, frame: Frame) -> Departure:
        frame.copy_payload(self._slots[slot])
        return Departure(kept(checksum(frame)), kept(None))

    def close(self) -> None:
        self._slots.close()


class SharedMemoryReader:
    """See SlotReader: a frame is there when it is announced."""

    def __init__(self, memory: mmap.mmap, terms: SlotTerms) -> None:
        self._slots = _Slots(memory, terms)

    def start(self, slot: int, payload_bytes: int) -> asyncio.Future[Payload]:
        return kept(self._slots[slot][:payload_bytes].data)

    def close(self) -> None:
        self._slots.close()
