"""Carries K and V out of a step while the model goes on with the next layer."""

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.request import SequenceId

# layer, token_start, token_end, and the packed bytes.
KVSink = Callable[[int, int, int, memoryview], None]


class _Piece(NamedTuple):
    sequence_id: SequenceId
    layer: int
    token_start: int
    token_end: int


class HostCopy(Protocol):
    """Brings packed K and V from the device to the host."""

    def begin(self, packed: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Does not wait for the device.

        Returns:
            The bytes on the host, and what waits in another thread until they are there.
        """
        ...


class CudaCopy:
    """On a stream of its own, into pinned memory: the model's stream is not held up."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def begin(self, packed: Tensor) -> tuple[Tensor, Callable[[], None]]:
        host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(packed.device))
        with torch.cuda.stream(self._stream):
            host.copy_(packed, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        packed.record_stream(self._stream)
        return host, copied.synchronize


class KVExport:
    """The engine's listener: from the engine thread to whoever sends a sequence, on the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._sinks: dict[SequenceId, KVSink] = {}
        self._host_copy: HostCopy | None = None
        # For the thread that waits for copies, in the order in which they were begun.
        self._waits: SimpleQueue[Callable[[], object] | None] = SimpleQueue()

    def copy_with(self, host_copy: HostCopy) -> None:
        """K and V lie on a device. Before the first step."""
        self._host_copy = host_copy
        threading.Thread(target=self._wait_for_copies, name="kv export", daemon=True).start()

    def attach(self, sequence_id: SequenceId, sink: KVSink) -> None:
        """For the loop: `sink` gets every piece of the sequence, there, in layer order of each chunk."""
        self._sinks[sequence_id] = sink

    def detach(self, sequence_id: SequenceId) -> None:
        """For the loop: what still comes of the sequence is dropped."""
        self._sinks.pop(sequence_id, None)

    def when_delivered(self, callback: Callable[[], object]) -> None:
        """For the loop: calls back there, after all pieces of the steps that ended before."""
        if self._host_copy is None:
            callback()
        else:
            self._waits.put(partial(self._loop.call_soon_threadsafe, callback))

    def close(self) -> None:
        """Nothing comes any more."""
        self._waits.put(None)

    def on_layer(
        self, sequence_id: SequenceId, layer: int, token_start: int, token_end: int, packed: Tensor
    ) -> None:
        piece = _Piece(sequence_id, layer, token_start, token_end)
        if self._host_copy is None:
            self._hand_over(piece, packed)
            return
        host, wait = self._host_copy.begin(packed)
        self._waits.put(wait)
        self._waits.put(partial(self._hand_over, piece, host))

    def _wait_for_copies(self) -> None:
        while (wait := self._waits.get()) is not None:
            wait()

    def _hand_over(self, piece: _Piece, packed: Tensor) -> None:
        self._loop.call_soon_threadsafe(self._deliver, piece, packed.numpy().data)

    def _deliver(self, piece: _Piece, data: memoryview) -> None:
        sink = self._sinks.get(piece.sequence_id)
        if sink is not None:
            sink(piece.layer, piece.token_start, piece.token_end, data)
