"""Brings the payload of a frame together in one piece of a device's memory, and seals the frame."""

import asyncio
import threading
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from kv_transfer.device_stream import device_stream
from kv_transfer.frame import Frame, checksum
from kv_transfer.promises import Promises


class Sealed(NamedTuple):
    """
    Attributes:
        payload: [payload_bytes] uint8, complete.
        checksum: of the frame.
    """

    payload: Tensor
    checksum: int


@dataclass(frozen=True, slots=True)
class _Order:
    frame: Frame
    into: Tensor | None
    sealed: asyncio.Future[Sealed]


class DeviceSealer:
    """The thread that waits for the device, in the order of the frames."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._orders: SimpleQueue[_Order | None] = SimpleQueue()
        self._promises: Promises[Sealed] = Promises()
        threading.Thread(target=self._run, name="kv seal", daemon=True).start()

    def seal(self, frame: Frame, into: Tensor | None = None) -> asyncio.Future[Sealed]:
        """For the loop.

        Args:
            frame: whose parts are complete, on the device or in pinned memory of the host.
            into: [at least payload_bytes] uint8 to copy them into. None: memory of its own, or the frame's.

        Returns:
            Ends with TransportFailed if the device fails, or after `close`.
        """
        sealed = self._promises.make()
        if not sealed.done():
            self._orders.put(_Order(frame, into, sealed))
        return sealed

    def close(self) -> None:
        """For the loop. What is under way fails; the thread ends soon."""
        if self._promises.failure is None:
            self._promises.fail("the pair is closed")
            self._orders.put(None)

    def _run(self) -> None:
        try:
            while (order := self._orders.get()) is not None:
                # What is not wanted any more is not written any more.
                if not order.sealed.done():
                    self._promises.keep(order.sealed, self._seal(order.frame, order.into))
                # While it waits it holds nothing.
                del order
        except Exception as error:
            self._promises.fail_from_thread(str(error).partition("\n")[0])

    def _seal(self, frame: Frame, into: Tensor | None) -> Sealed:
        with device_stream(self._device):
            payload = _joined(frame, into, self._device)
        return Sealed(payload, checksum(replace(frame, parts=(payload,))))


def _joined(frame: Frame, into: Tensor | None, device: torch.device) -> Tensor:
    parts = frame.device_parts
    if into is None:
        if len(parts) == 1 and parts[0].device.type == device.type:
            return parts[0]
        into = torch.empty(frame.payload_bytes, dtype=torch.uint8, device=device)
    end = 0
    for part in parts:
        start, end = end, end + part.nbytes
        into[start:end].copy_(part, non_blocking=True)
    return into[:end]
