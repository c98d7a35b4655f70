"""Cuts the K and V that a prefill yields into frames of a good size."""

from dataclasses import dataclass, field
from math import ceil

from engine.kv_layout import KVLayout
from kv_transfer.frame import HEADER_BYTES, Frame, Payload

# Layers are joined until a frame has them: it costs both ends some 0.3 ms, whatever its size.
JOINED_BYTES = 1 << 20
# The last layer leaves with as little as this before it: what it leaves behind is not hidden by computing.
LAST_JOINED_BYTES = 256 << 10


class FrameLimitTooSmall(ValueError):
    """The receiver's frame limit does not hold one block of one layer."""


@dataclass(frozen=True, slots=True)
class KVPiece:
    """One layer of tokens [token_start, token_end).

    Attributes:
        data: see engine/kv_wire.py. Must not change.
    """

    layer: int
    token_start: int
    token_end: int
    data: Payload = field(repr=False)

    @property
    def token_count(self) -> int:
        return self.token_end - self.token_start


class FramePacker:
    """Joins small layers of the same tokens, splits large ones evenly by blocks, and numbers the frames.

    A piece waits at most until the last layer of its tokens: nothing of a chunk waits for the next chunk.

    Raises:
        FrameLimitTooSmall: `max_frame_bytes` (header included) does not hold one block of one layer.
    """

    def __init__(self, layout: KVLayout, max_frame_bytes: int) -> None:
        self._layout = layout
        self._token_bytes = tuple(layout.layer_token_bytes(layer) for layer in range(len(layout.layers)))
        room = max_frame_bytes - HEADER_BYTES
        if room < layout.largest_block_bytes:
            raise FrameLimitTooSmall(
                f"a block of one layer needs {layout.largest_block_bytes + HEADER_BYTES} bytes, "
                f"frames are limited to {max_frame_bytes}"
            )
        self._payload_limit = room
        self._pending: list[KVPiece] = []
        self._pending_bytes = 0
        self._num_frames = 0

    @property
    def num_frames(self) -> int:
        """Frames made so far."""
        return self._num_frames

    def add(self, piece: KVPiece) -> list[Frame]:
        """Takes a piece; returns the frames that are ready to leave."""
        frames = [] if self._joins(piece) else self.flush()
        if piece.data.nbytes > self._payload_limit:
            return frames + self._split(piece)
        self._pending.append(piece)
        self._pending_bytes += piece.data.nbytes
        layers_left = len(self._token_bytes) - 1 - piece.layer
        enough = JOINED_BYTES if layers_left > 1 else LAST_JOINED_BYTES
        if self._pending_bytes >= enough or layers_left == 0:
            frames += self.flush()
        return frames

    def flush(self) -> list[Frame]:
        """Makes a frame of what waits to be joined."""
        if not self._pending:
            return []
        first = self._pending[0]
        parts = tuple(piece.data for piece in self._pending)
        frame = self._number(first.layer, len(parts), first.token_start, first.token_count, parts)
        self._pending.clear()
        self._pending_bytes = 0
        return [frame]

    def _joins(self, piece: KVPiece) -> bool:
        if not self._pending:
            return True
        last = self._pending[-1]
        return (
            (piece.token_start, piece.token_end) == (last.token_start, last.token_end)
            and piece.layer == last.layer + 1
            and self._pending_bytes + piece.data.nbytes <= self._payload_limit
        )

    def _split(self, piece: KVPiece) -> list[Frame]:
        size = self._layout.block_size
        most = self._payload_limit // (self._token_bytes[piece.layer] * size)
        first, last = piece.token_start // size, ceil(piece.token_end / size)
        step = ceil((last - first) / ceil((last - first) / most))
        return [
            self._cut(piece, max(piece.token_start, start), min(piece.token_end, start + step * size))
            for start in range(first * size, last * size, step * size)
        ]

    def _cut(self, piece: KVPiece, token_start: int, token_end: int) -> Frame:
        """Of a piece, cut where blocks end."""
        parts: list[Payload] = []
        start, end = token_start - piece.token_start, token_end - piece.token_start
        base = 0
        for form in self._layout.layers[piece.layer]:
            parts.append(piece.data[base + start * form.token_bytes : base + end * form.token_bytes])
            base += piece.token_count * form.token_bytes
        return self._number(piece.layer, 1, token_start, token_end - token_start, tuple(parts))

    def _number(self, layer: int, layers: int, token: int, tokens: int, parts: tuple[Payload, ...]) -> Frame:
        frame = Frame(self._num_frames, layer, layers, token, tokens, parts)
        self._num_frames += 1
        return frame
