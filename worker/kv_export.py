"""Copies K and V out of a step while the model goes on with the next layer."""

import asyncio
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.batch import ReadyChunk
from engine.request import SequenceId

# layer, token_start, token_end, and the rows of the layer's tensors, one tensor after the other, as bytes.
KVSink = Callable[[int, int, int, memoryview], None]


class KVExport:
    """The engine's listener: from the engine thread to whoever sends a sequence, on the loop.

    The bytes are a copy, so the sequence's blocks are not read again after `on_layer`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._sinks: dict[SequenceId, KVSink] = {}

    def attach(self, sequence_id: SequenceId, sink: KVSink) -> None:
        """For the loop: `sink` gets every piece of the sequence, there, in layer order of each chunk."""
        self._sinks[sequence_id] = sink

    def detach(self, sequence_id: SequenceId) -> None:
        """For the loop: what still comes of the sequence is dropped."""
        self._sinks.pop(sequence_id, None)

    def on_layer(self, layer: int, tensors: tuple[Tensor, ...], chunks: Sequence[ReadyChunk]) -> None:
        for chunk in chunks:
            rows = slice(chunk.first_row, chunk.first_row + chunk.token_end - chunk.token_start)
            data = packed_bytes([tensor[rows] for tensor in tensors])
            self._loop.call_soon_threadsafe(self._deliver, chunk, layer, data)

    def _deliver(self, chunk: ReadyChunk, layer: int, data: memoryview) -> None:
        sink = self._sinks.get(chunk.sequence_id)
        if sink is not None:
            sink(layer, chunk.token_start, chunk.token_end, data)


def packed_bytes(tensors: Sequence[Tensor]) -> memoryview:
    """The bytes of each tensor after those of the one before, in memory of their own."""
    packed = torch.empty(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8).numpy().data
    offset = 0
    for tensor in tensors:
        part = torch.frombuffer(packed, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
        part.view(tensor.shape).copy_(tensor)
        offset += tensor.nbytes
    return packed
