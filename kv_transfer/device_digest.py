"""A digest of bytes that lie on a device, taken there: they need not come to the host to be checked."""

import threading
from functools import cache

import numpy as np
import torch
from torch import Tensor

from kv_transfer.device_stream import device_stream

_WORD_BYTES = 4


class DeviceDigest:
    """sum(weight[i] * word[i]) mod 2^64 over signed 32-bit words: a multilinear hash.

    For words that differ anywhere the sums differ but for one set of weights in 2^32 (Lemire and Kaser,
    "Strongly universal string hashing is fast", 2013). The weights are no secret: it finds damage, no malice.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._weights = torch.empty(0, dtype=torch.int64, device=device)
        self._lock = threading.Lock()

    def of(self, data: Tensor) -> int:
        """Waits for the device: not for the loop. For any thread.

        Args:
            data: [num_bytes] uint8 on this device, complete: no stream is at it.
        """
        with device_stream(self._device):
            words = _words(data)
            return int((self._first_weights(len(words)) * words).sum())

    def _first_weights(self, count: int) -> Tensor:
        with self._lock:
            if len(self._weights) < count:
                self._weights = torch.from_numpy(_weights(1 << (count - 1).bit_length())).to(self._device)
            return self._weights[:count]


def _words(data: Tensor) -> Tensor:
    """[ceil(num_bytes / 4)] int32; a view where the bytes allow it."""
    padding = -data.nbytes % _WORD_BYTES
    if padding or data.storage_offset() % _WORD_BYTES:
        data = torch.nn.functional.pad(data, (0, padding))
    return data.view(torch.int32)


def _weights(count: int) -> np.ndarray:
    """[count] int64: the first outputs of splitmix64 (Steele, Lea and Flood, 2014), the same everywhere."""
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))).view(np.int64)


@cache
def _digest_on(device: torch.device) -> DeviceDigest:
    return DeviceDigest(device)


def device_digest(data: Tensor) -> int:
    """See DeviceDigest.of."""
    return _digest_on(data.device).of(data)
