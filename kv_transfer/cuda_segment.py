"""Memory of a GPU that another process of the machine can map: CUDA's IPC handles.

A mapping stays readable when its owner frees the memory or dies. CUDA leaves that open; so it was on an H200
with driver 580.
"""

import ctypes
import threading
import weakref
from collections.abc import Callable
from functools import cache, partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

# CUDA_IPC_HANDLE_SIZE
_HANDLE_BYTES = 64
# A handle opens all of what CUDA allocates at once: nothing else may lie in it.
_GRANULE_BYTES = 2 << 20


class CudaFailed(RuntimeError):
    """What CUDA says."""


def allocate(num_bytes: int, device: torch.device) -> tuple[Tensor, bytes]:
    """
    Returns:
        [num_bytes] uint8, not filled, until its last view ends; and the handle by which another process maps
        it.

    Raises:
        CudaFailed: there is no room, or the machine has no such handles.
    """
    runtime = _runtime()
    with torch.cuda.device(device):
        whole = -(-num_bytes // _GRANULE_BYTES) * _GRANULE_BYTES
        (address,) = _checked(runtime.cudaMalloc(whole))
        memory = _tensor(address, num_bytes, device, runtime.cudaFree)
        (handle,) = _checked(runtime.cudaIpcGetMemHandle(address))
    return memory, ctypes.string_at(handle.getPtr(), _HANDLE_BYTES)


def map_shared(handle: bytes, num_bytes: int, device: torch.device) -> Tensor:
    """
    Args:
        device: that reads it.

    Returns:
        [num_bytes] uint8, mapped until its last view ends.

    Raises:
        CudaFailed: it is not another process's of this machine, or does not lie on `device`.
    """
    if len(handle) != _HANDLE_BYTES:
        raise CudaFailed(f"a handle has {_HANDLE_BYTES} bytes, not {len(handle)}")
    runtime = _runtime()
    shared = runtime.cudaIpcMemHandle_t()
    ctypes.memmove(shared.getPtr(), handle, _HANDLE_BYTES)
    with torch.cuda.device(device):
        flags = runtime.cudaIpcMemLazyEnablePeerAccess
        (address,) = _checked(runtime.cudaIpcOpenMemHandle(shared, flags))
        return _tensor(address, num_bytes, device, runtime.cudaIpcCloseMemHandle)


def _runtime() -> Any:
    """It comes with torch's builds for CUDA.

    Raises:
        CudaFailed: this is another build.
    """
    try:
        from cuda.bindings import runtime  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError as error:
        raise CudaFailed(f"cuda-bindings is not installed: {error}") from error
    return runtime


def _checked(result: tuple) -> tuple:
    runtime = _runtime()
    error, *values = result
    if error != runtime.cudaError_t.cudaSuccess:
        # It would be reported again by whoever asks next.
        runtime.cudaGetLastError()
        raise CudaFailed(f"{runtime.cudaGetErrorString(error)[1].decode()} ({error.name})")
    return tuple(values)


class _Owner:
    """What torch keeps as long as a view of the memory lives."""

    def __init__(self, address: int, num_bytes: int, end: Callable[[], object]) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
        # A process that ends gives all back.
        weakref.finalize(self, _ends().put, end).atexit = False


def _tensor(address: int, num_bytes: int, device: torch.device, end: Callable[[int], object]) -> Tensor:
    def end_there() -> None:
        with torch.cuda.device(device):
            end(address)

    tensor = torch.as_tensor(_Owner(int(address), num_bytes, end_there), device=device)
    if tensor.data_ptr() != int(address):
        raise CudaFailed(f"it does not lie on {device}")
    return tensor


@cache
def _ends() -> "SimpleQueue[Callable[[], object]]":
    """What ends memory waits for all that the device does: in a thread of its own."""
    ends: SimpleQueue[Callable[[], object]] = SimpleQueue()
    threading.Thread(target=partial(_run, ends), name="cuda memory", daemon=True).start()
    return ends


def _run(ends: "SimpleQueue[Callable[[], object]]") -> None:
    while True:
        ends.get()()
