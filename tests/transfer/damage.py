"""Changes frames on their way, whichever way they go."""

import mmap
import os
from collections.abc import Callable

from kv_transfer.frame import Bytes, Frame, checksum, decode, reseal
from protos import kv_pb2
from tests.transfer.proxy import Proxy

# The bytes of a frame's payload, changed in place.
Change = Callable[[memoryview], None]


def flip_last_bit(payload: memoryview) -> None:
    payload[-1] ^= 1


def damage_frames(proxy: Proxy, change: Change = flip_last_bit) -> None:
    """Every frame is changed on its way, and its checksum is not."""
    proxy.alter["Frames"] = lambda sealed: _changed(sealed, change)
    proxy.alter["Bulk"] = SharedMemoryChange(change)


def forge_frames(proxy: Proxy, change: Change = flip_last_bit) -> None:
    """Every frame is changed on its way, and its checksum fits what it is then."""
    proxy.alter["Frames"] = lambda sealed: reseal(_changed(sealed, change))
    proxy.alter["Bulk"] = SharedMemoryChange(change, lambda frame, _: checksum(frame))


def _changed(sealed: bytes, change: Change) -> bytes:
    altered = bytearray(sealed)
    change(memoryview(altered)[-decode(sealed).payload_bytes :])
    return bytes(altered)


def _sent_checksum(_: Frame, sent: int) -> int:
    return sent


class SharedMemoryChange:
    """Changes slots of a segment that a Bulk stream announces through a proxy in the sender's process."""

    def __init__(self, change: Change, seal: Callable[[Frame, int], int] = _sent_checksum) -> None:
        self._change = change
        self._seal = seal
        self._memory: mmap.mmap | None = None
        self._slot_bytes = 0

    def __call__(self, sent: Bytes) -> bytes:
        message = kv_pb2.BulkMessage.FromString(bytes(sent))
        if message.HasField("open"):
            self._map(message.open.transport.memory)
        for announced in message.frames:
            payload = self._payload(announced)
            self._change(payload)
            frame = Frame(
                announced.number,
                announced.layer_start,
                announced.layer_count,
                announced.token_start,
                announced.token_count,
                (payload,),
            )
            announced.checksum = self._seal(frame, announced.checksum)
        return message.SerializeToString()

    def _map(self, memory: kv_pb2.SharedMemory) -> None:
        file = os.open(f"/proc/{memory.pid}/fd/{memory.fd}", os.O_RDWR)
        self._memory = mmap.mmap(file, os.fstat(file).st_size)
        self._slot_bytes = memory.slot_bytes
        os.close(file)

    def _payload(self, announced: kv_pb2.FrameAnnounced) -> memoryview:
        assert self._memory is not None
        start = mmap.PAGESIZE + announced.slot * self._slot_bytes
        return memoryview(self._memory)[start : start + announced.payload_bytes]
