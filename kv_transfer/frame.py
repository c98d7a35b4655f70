"""The frame: the K and V of some tokens in some layers, as it goes over the wire.

Header (48 bytes, little-endian): magic, version, number, layer_start, layer_count, token_start,
token_count, zero, payload bytes, checksum. The checksum is xxh3_64 over every other byte of the frame; over
the payload's digest where that lies on a device (kv_transfer/device_digest.py).
Payload: each layer of the tokens as engine/kv_wire.py packs them.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import xxhash
from torch import Tensor

from engine.kv_layout import KVLayout
from kv_transfer.device_digest import device_digest

Bytes = bytes | bytearray | memoryview
# K and V as bytes: of the host, or [num_bytes] uint8 for a device. Both can be cut without a copy.
Payload = memoryview | Tensor

MAGIC = b"BKVF"
VERSION = 1
_FIELDS = struct.Struct("<4s7IQ")
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size


class DamagedFrame(Exception):
    """The bytes are not those of a frame that somebody sealed."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Tokens [token_start, token_start + token_count) of layers [layer_start, layer_start + layer_count).

    Attributes:
        number: its place among the frames of its hand-off, from 0.
        parts: the payload, in pieces that follow each other: all bytes of the host, or all tensors.
    """

    number: int
    layer_start: int
    layer_count: int
    token_start: int
    token_count: int
    parts: tuple[Payload, ...] = field(repr=False)

    @property
    def is_on_device(self) -> bool:
        return isinstance(self.parts[0], Tensor)

    @property
    def payload_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def host_parts(self) -> tuple[memoryview, ...]:
        return tuple(part for part in self.parts if isinstance(part, memoryview))

    @property
    def device_parts(self) -> tuple[Tensor, ...]:
        return tuple(part for part in self.parts if isinstance(part, Tensor))

    def copy_payload(self, slot: np.ndarray) -> None:
        """From the host. `slot`: [at least payload_bytes] uint8."""
        end = 0
        for part in self.host_parts:
            start, end = end, end + part.nbytes
            # numpy lets other threads run meanwhile; a memoryview's copy does not.
            np.copyto(slot[start:end], np.frombuffer(part, np.uint8))


class KVSlice(NamedTuple):
    """Tokens [token_start, token_end) of one layer.

    Attributes:
        data: see engine/kv_wire.py.
    """

    layer: int
    token_start: int
    token_end: int
    data: Payload


def encode(frame: Frame) -> bytes:
    """Seals a frame of the host. Copies the payload once."""
    fields = _packed_fields(frame)
    return b"".join((fields, _CHECKSUM.pack(_digest(fields, frame.host_parts)), *frame.host_parts))


def checksum(frame: Frame) -> int:
    """64 bits over its fields and its payload. Not for the loop where that lies on a device: it waits."""
    return _digest(_packed_fields(frame), (_to_digest(part) for part in frame.parts))


def decode(data: Bytes) -> Frame:
    """Opens a frame without a copy: its one part is a view of `data`.

    Raises:
        DamagedFrame: too short, the wrong length, another version, or a checksum that does not match.
    """
    view = memoryview(data).cast("B")
    if view.nbytes < HEADER_BYTES:
        raise DamagedFrame(f"{view.nbytes} bytes are no frame")
    fields, payload = view[: _FIELDS.size], view[HEADER_BYTES:]
    if _CHECKSUM.pack(_digest(fields, (payload,))) != view[_FIELDS.size : HEADER_BYTES]:
        raise DamagedFrame("the checksum does not match the bytes")
    magic, version, number, layer_start, layer_count, token_start, token_count, _, payload_bytes = (
        _FIELDS.unpack(fields)
    )
    if magic != MAGIC or version != VERSION:
        raise DamagedFrame(f"magic {magic!r} version {version}, expected {MAGIC!r} {VERSION}")
    if payload_bytes != payload.nbytes:
        raise DamagedFrame(f"{payload.nbytes} bytes of payload, the header says {payload_bytes}")
    return Frame(number, layer_start, layer_count, token_start, token_count, (payload,))


def reseal(data: Bytes) -> bytes:
    """The same bytes with the checksum that matches them: for tests that alter a frame."""
    view = memoryview(data).cast("B")
    fields, payload = view[: _FIELDS.size], view[HEADER_BYTES:]
    return b"".join((fields, _CHECKSUM.pack(_digest(fields, (payload,))), payload))


def cut(frame: Frame, layout: KVLayout) -> tuple[KVSlice, ...]:
    """The slices of a decoded frame (one part), in wire order, without a copy.

    Raises:
        ValueError: the payload is not of the length that the layout gives it.
    """
    (payload,) = frame.parts
    slices: list[KVSlice] = []
    offset = 0
    for layer in range(frame.layer_start, frame.layer_start + frame.layer_count):
        num_bytes = frame.token_count * layout.layer_token_bytes(layer)
        data = payload[offset : offset + num_bytes]
        slices.append(KVSlice(layer, frame.token_start, frame.token_start + frame.token_count, data))
        offset += num_bytes
    if offset != payload.nbytes:
        raise ValueError(f"{payload.nbytes} bytes of payload, the layout says {offset}")
    return tuple(slices)


def _packed_fields(frame: Frame) -> bytes:
    return _FIELDS.pack(
        MAGIC,
        VERSION,
        frame.number,
        frame.layer_start,
        frame.layer_count,
        frame.token_start,
        frame.token_count,
        0,
        frame.payload_bytes,
    )


def _to_digest(part: Payload) -> Bytes:
    return device_digest(part).to_bytes(8, "little", signed=True) if isinstance(part, Tensor) else part


def _digest(fields: Bytes, parts: Iterable[Bytes]) -> int:
    digest = xxhash.xxh3_64(fields)
    for part in parts:
        digest.update(part)
    return digest.intdigest()
