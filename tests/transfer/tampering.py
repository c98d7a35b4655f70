"""Changes frames on their way, whichever way they go."""

import mmap
import os
from collections.abc import Callable
from dataclasses import replace

from kv_transfer.frame import Frame, checksum, decode, encode
from protos import kv_pb2
from tests.transfer.proxy import Proxy

# The bytes of a frame's payload, changed in place.
Change = Callable[[memoryview], None]


def flip_last_bit(payload: memoryview) -> None:
    payload[-1] ^= 1


class Tampering:
    """Sits in a proxy of this process, from before the pair's first hand-off. At first it changes nothing.

    Attributes:
        seen: every frame that went by, as it was sent, without its payload.
    """

    def __init__(self, proxy: Proxy) -> None:
        proxy.alter["Frames"] = self._alter_sealed
        proxy.alter["Bulk"] = self._alter_announced
        self.seen: list[Frame] = []
        self._change: Change = lambda payload: None
        self._is_forged = False
        self._memory: mmap.mmap | None = None
        self._slot_bytes = 0

    def damage(self, change: Change = flip_last_bit) -> None:
        """From now on frames are changed, and their checksums are not."""
        self._change, self._is_forged = change, False

    def forge(self, change: Change = flip_last_bit) -> None:
        """From now on frames are changed, and their checksums fit what they are then."""
        self._change, self._is_forged = change, True

    def stop(self) -> None:
        self._change = lambda payload: None

    def _alter_sealed(self, sealed: bytes) -> bytes:
        frame = decode(sealed)
        self.seen.append(replace(frame, parts=()))
        payload = bytearray(sealed[len(sealed) - frame.payload_bytes :])
        self._change(memoryview(payload))
        if self._is_forged:
            return encode(replace(frame, parts=(memoryview(payload),)))
        return sealed[: len(sealed) - frame.payload_bytes] + payload

    def _alter_announced(self, sent: bytes) -> bytes:
        """Shared memory is changed where it lies, before its receiver hears of it."""
        message = kv_pb2.BulkMessage.FromString(sent)
        if message.open.transport.HasField("memory"):
            self._map(message.open.transport.memory)
        for announced in message.frames:
            payload = self._payload(announced)
            frame = Frame(
                announced.number,
                announced.layer_start,
                announced.layer_count,
                announced.token_start,
                announced.token_count,
                (payload,),
            )
            self.seen.append(replace(frame, parts=()))
            before = checksum(frame)
            self._change(payload)
            if self._memory is None or self._is_forged:
                # What goes another way is seen here only by its checksum.
                announced.checksum ^= before ^ checksum(frame)
        return message.SerializeToString()

    def _map(self, memory: kv_pb2.SharedMemory) -> None:
        file = os.open(f"/proc/{memory.pid}/fd/{memory.fd}", os.O_RDWR)
        self._memory = mmap.mmap(file, os.fstat(file).st_size)
        self._slot_bytes = memory.slot_bytes
        os.close(file)

    def _payload(self, announced: kv_pb2.FrameAnnounced) -> memoryview:
        if self._memory is None:
            return memoryview(bytearray(announced.payload_bytes))
        start = mmap.PAGESIZE + announced.slot * self._slot_bytes
        return memoryview(self._memory)[start : start + announced.payload_bytes]
