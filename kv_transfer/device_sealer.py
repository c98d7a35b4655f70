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
            frame: whose parts are complete on the device.
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
                self._promises.keep(order.sealed, self._seal(order.frame, order.into))
        except Exception as error:
            self._promises.fail_from_thread(str(error).partition("\n")[0])

    def _seal(self, frame: Frame, into: Tensor | None) -> Sealed:
        with device_stream(self._device):
            payload = _joined(frame, into)
        return Sealed(payload, checksum(replace(frame, parts=(payload,))))


def _joined(frame: Frame, into: Tensor | None) -> Tensor:
    parts = [part for part in frame.parts if isinstance(part, Tensor)]
    if into is not None:
        return torch.cat(parts, out=into[: frame.payload_bytes])
    return parts[0] if len(parts) == 1 else torch.cat(parts)
