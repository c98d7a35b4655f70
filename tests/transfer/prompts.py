"""Layouts, and prompts whose K and V are random bytes."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from engine.kv_layout import KVLayout, TensorLayout
from engine.kv_quantization import quantized_layers
from kv_transfer.frame import Frame, KVSlice, Payload
from kv_transfer.packer import KVPiece


def make_layout(
    *, num_layers: int = 3, num_heads: int = 2, head_dim: int = 4, dtype: str = "float32", block_size: int = 4
) -> KVLayout:
    tensors = tuple(TensorLayout(name, num_heads, head_dim, dtype) for name in ("k", "v"))
    return KVLayout("f00d", dtype, block_size, (tensors,) * num_layers)


def quantized(layout: KVLayout, kv_dtype: str) -> KVLayout:
    return replace(layout, dtype=kv_dtype, layers=quantized_layers(layout.layers, kv_dtype))


def empty_kv(layout: KVLayout, num_tokens: int) -> list[list[np.ndarray]]:
    """By layer and tensor, [num_tokens, bytes of a row] uint8."""
    return [[np.zeros((num_tokens, t.token_bytes), np.uint8) for t in tensors] for tensors in layout.layers]


def blocks_of(token_start: int, token_end: int, block_size: int) -> Iterator[tuple[int, int]]:
    """The tokens of each block, from start to end."""
    while token_start < token_end:
        end = min(token_end, (token_start // block_size + 1) * block_size)
        yield token_start, end
        token_start = end


def pack(rows: np.ndarray, form: TensorLayout, token_start: int, token_end: int, block_size: int) -> bytes:
    """Tokens of one tensor in the order that engine/kv_wire.py describes."""
    return b"".join(
        rows[start:end].reshape(end - start, form.num_heads, -1).transpose(1, 0, 2).tobytes()
        for start, end in blocks_of(token_start, token_end, block_size)
    )


def write_slice(kv: list[list[np.ndarray]], piece: KVSlice, layout: KVLayout) -> None:
    data = np.frombuffer(on_host(piece.data), np.uint8)
    at = 0
    for rows, form in zip(kv[piece.layer], layout.layers[piece.layer], strict=True):
        for start, end in blocks_of(piece.token_start, piece.token_end, layout.block_size):
            part = data[at : at + (end - start) * form.token_bytes]
            at += len(part)
            rows[start:end] = (
                part.reshape(form.num_heads, end - start, -1).transpose(1, 0, 2).reshape(end - start, -1)
            )


def on_host(payload: Payload) -> memoryview:
    return payload.cpu().numpy().data if isinstance(payload, Tensor) else payload


def frame_of(payload: bytes, num_parts: int = 1) -> Frame:
    """Any frame with that payload, in so many parts."""
    size = len(payload) // num_parts
    parts = tuple(memoryview(payload[start : start + size]) for start in range(0, len(payload), size))
    return Frame(0, 0, 1, 0, 1, parts)


@dataclass(frozen=True, slots=True)
class Prompt:
    """The K and V of a prompt.

    Attributes:
        kv: by layer and tensor, [num_tokens, bytes of a row] uint8.
    """

    layout: KVLayout
    num_tokens: int
    kv: list[list[np.ndarray]]

    @classmethod
    def random(cls, layout: KVLayout, num_tokens: int) -> "Prompt":
        kv = empty_kv(layout, num_tokens)
        source = np.random.default_rng(num_tokens)
        for tensors in kv:
            for rows in tensors:
                rows[:] = source.integers(0, 256, rows.shape, np.uint8)
        return cls(layout, num_tokens, kv)

    @property
    def kv_bytes(self) -> int:
        return self.num_tokens * self.layout.token_bytes

    def pieces(self, chunk_tokens: int) -> Iterator[KVPiece]:
        """As a prefill makes them: chunk after chunk, in each layer after layer."""
        for start in range(0, self.num_tokens, chunk_tokens):
            end = min(start + chunk_tokens, self.num_tokens)
            for layer, tensors in enumerate(self.kv):
                data = b"".join(
                    pack(rows, form, start, end, self.layout.block_size)
                    for rows, form in zip(tensors, self.layout.layers[layer], strict=True)
                )
                yield KVPiece(layer, start, end, memoryview(data))

    def equals(self, kv: list[list[np.ndarray]]) -> bool:
        return all(
            np.array_equal(ours, theirs)
            for our_layer, their_layer in zip(self.kv, kv, strict=True)
            for ours, theirs in zip(our_layer, their_layer, strict=True)
        )
