"""The machine's limits, measured: what no implementation can beat."""

import time
from collections.abc import Callable

import torch

# Far above any cache.
_READ_BYTES = 512 << 20
# A matrix that stays in a cache: the rate of arithmetic, not of memory.
_MATRIX = 1024


def fastest_s(run: Callable[[], object], *, seconds: float = 0.5) -> float:
    """The shortest of repeated runs, after one that does not count."""
    run()
    best = float("inf")
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def read_rate() -> float:
    """Bytes per second that torch's threads read from memory, the best of several ways."""
    floats = torch.ones(_READ_BYTES // 4)
    integers = floats.view(torch.int32)
    other = torch.ones(_READ_BYTES // 8)
    half = floats[: other.numel()]
    ways: list[Callable[[], object]] = [floats.sum, floats.max, integers.max, lambda: torch.dot(half, other)]
    return max(_READ_BYTES / fastest_s(way) for way in ways)


def matmul_rate(num_rows: int, dtype: torch.dtype) -> float:
    """FLOP per second of [num_rows, 1024] x [1024, 1024] with weights in cache."""
    rows = torch.randn(num_rows, _MATRIX).to(dtype)
    weight = torch.randn(_MATRIX, _MATRIX).to(dtype)
    with torch.inference_mode():
        seconds = fastest_s(lambda: torch.nn.functional.linear(rows, weight))
    return 2 * num_rows * _MATRIX * _MATRIX / seconds
