"""Layouts, and prompts whose K and V are random bytes."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from engine.kv_layout import KVLayout, TensorLayout
from engine.kv_quantization import quantized_layers
from kv_transfer.frame import KVSlice
from kv_transfer.packer import KVPiece


def make_layout(
    *, num_layers: int = 3, num_heads: int = 2, head_dim: int = 4, dtype: str = "float32"
) -> KVLayout:
    tensors = tuple(TensorLayout(name, num_heads, head_dim, dtype) for name in ("k", "v"))
    return KVLayout("f00d", dtype, 16, (tensors,) * num_layers)


def quantized(layout: KVLayout, kv_dtype: str) -> KVLayout:
    return replace(layout, dtype=kv_dtype, layers=quantized_layers(layout.layers, kv_dtype))


def empty_kv(layout: KVLayout, num_tokens: int) -> list[list[np.ndarray]]:
    """By layer and tensor, [num_tokens, bytes of a row] uint8."""
    return [[np.zeros((num_tokens, t.token_bytes), np.uint8) for t in tensors] for tensors in layout.layers]


def write_slice(kv: list[list[np.ndarray]], piece: KVSlice) -> None:
    rows = kv[piece.layer][piece.tensor][piece.token_start : piece.token_start + piece.token_count]
    rows[:] = np.frombuffer(piece.data, np.uint8).reshape(rows.shape)


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
                data = b"".join(rows[start:end].tobytes() for rows in tensors)
                yield KVPiece(layer, start, end, memoryview(data))

    def equals(self, kv: list[list[np.ndarray]]) -> bool:
        return all(
            np.array_equal(ours, theirs)
            for our_layer, their_layer in zip(self.kv, kv, strict=True)
            for ours, theirs in zip(our_layer, their_layer, strict=True)
        )
