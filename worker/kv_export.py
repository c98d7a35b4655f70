"""Carries K and V out of a step while the model goes on with the next layer."""

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from engine.request import SequenceId
from kv_transfer.bulk import Memory
from kv_transfer.frame import Payload

# layer, token_start, token_end, and what was packed.
KVSink = Callable[[int, int, int, Payload], None]
Wait = Callable[[], None]


class _Piece(NamedTuple):
    sequence_id: SequenceId
    layer: int
    token_start: int
    token_end: int


class _Place(NamedTuple):
    """Where the pieces of a sequence go, and where they must lie there."""

    sink: KVSink
    memory: Memory


class Device(Protocol):
    """A device that computes while its host goes on. Neither method waits for it."""

    def to_host(self, packed: Tensor) -> tuple[Tensor, Wait]:
        """
        Returns:
            The bytes on the host, and what waits in another thread until they are there.
        """
        ...

    def computed(self, packed: Tensor) -> Wait:
        """
        Returns:
            What waits in another thread until the bytes are there.
        """
        ...


class CudaDevice:
    """It copies on a stream of its own, into pinned memory: the model's stream is not held up."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def to_host(self, packed: Tensor) -> tuple[Tensor, Wait]:
        host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(packed.device))
        with torch.cuda.stream(self._stream):
            host.copy_(packed, non_blocking=True)
            copied = torch.cuda.Event(blocking=True)
            copied.record(self._stream)
        packed.record_stream(self._stream)
        return host, copied.synchronize

    def computed(self, packed: Tensor) -> Wait:
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(packed.device))
        return event.synchronize


class _Staged:
    """K and V that wait on a device to be sent, as long as there is room."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._num_bytes = 0
        self._pieces: list[tuple[StorageWeakRef, int]] = []

    def takes(self, packed: Tensor) -> bool:
        """Counts it until its memory is free again. False: there is no room now."""
        if self._num_bytes + packed.nbytes > self._limit_bytes:
            self._pieces = [piece for piece in self._pieces if not piece[0].expired()]
            self._num_bytes = sum(num_bytes for _, num_bytes in self._pieces)
        if self._num_bytes + packed.nbytes > self._limit_bytes:
            return False
        self._pieces.append((StorageWeakRef(packed.untyped_storage()), packed.nbytes))
        self._num_bytes += packed.nbytes
        return True


class KVExport:
    """The engine's listener: from the engine thread to whoever sends a sequence, on the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # The loop writes it, the engine's thread reads it too.
        self._places: dict[SequenceId, _Place] = {}
        self._device: Device | None = None
        self._staged = _Staged(0)
        # For the thread that waits for the device, in the order of what it was given.
        self._waits: SimpleQueue[Callable[[], object] | None] = SimpleQueue()

    def wait_for(self, device: Device, staging_bytes: int) -> None:
        """K and V lie on a device that is no CPU. Before the first step.

        Args:
            staging_bytes: what may wait there to be sent; what is more waits in pinned memory of the host.
        """
        self._device = device
        self._staged = _Staged(staging_bytes)
        threading.Thread(target=self._wait_for_device, name="kv export", daemon=True).start()

    def attach(self, sequence_id: SequenceId, sink: KVSink, memory: Memory) -> None:
        """For the loop, before the sequence is submitted: `sink` gets every piece of it, there, in layer
        order of each chunk.
        """
        self._places[sequence_id] = _Place(sink, memory)

    def detach(self, sequence_id: SequenceId) -> None:
        """For the loop: what still comes of the sequence is dropped."""
        self._places.pop(sequence_id, None)

    def when_delivered(self, callback: Callable[[], object]) -> None:
        """For the loop: calls back there, after all pieces of the steps that ended before."""
        if self._device is None:
            callback()
        else:
            self._waits.put(partial(self._loop.call_soon_threadsafe, callback))

    def close(self) -> None:
        """Nothing comes any more."""
        self._waits.put(None)

    def on_layer(
        self, sequence_id: SequenceId, layer: int, token_start: int, token_end: int, packed: Tensor
    ) -> None:
        place = self._places.get(sequence_id)
        if place is None:
            return
        piece = _Piece(sequence_id, layer, token_start, token_end)
        if self._device is None:
            self._hand_over(piece, packed, place.memory)
            return
        if place.memory is Memory.DEVICE and self._staged.takes(packed):
            data, wait = packed, self._device.computed(packed)
        else:
            data, wait = self._device.to_host(packed)
        self._waits.put(wait)
        self._waits.put(partial(self._hand_over, piece, data, place.memory))

    def _wait_for_device(self) -> None:
        while (wait := self._waits.get()) is not None:
            wait()
            # While it waits for the next it holds nothing.
            del wait

    def _hand_over(self, piece: _Piece, packed: Tensor, memory: Memory) -> None:
        data = packed.numpy().data if memory is Memory.HOST else packed
        self._loop.call_soon_threadsafe(self._deliver, piece, data)

    def _deliver(self, piece: _Piece, data: Payload) -> None:
        place = self._places.get(piece.sequence_id)
        if place is not None:
            place.sink(piece.layer, piece.token_start, piece.token_end, data)
