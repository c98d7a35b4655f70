"""Memory of a GPU that another process of the machine can map: CUDA's IPC handles."""

import ctypes
import threading
import weakref
from collections.abc import Callable

import torch
from cuda.bindings import runtime  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor

# CUDA_IPC_HANDLE_SIZE
_HANDLE_BYTES = 64


class CudaFailed(RuntimeError):
    """What CUDA says."""


def allocate(num_bytes: int, device: torch.device) -> tuple[Tensor, bytes]:
    """
    Returns:
        [num_bytes] uint8, not filled, and the handle by which another process maps it. It ends with its last
        view; whoever has it mapped then must not read it any more.

    Raises:
        CudaFailed: there is no room, or the machine has no such handles.
    """
    with torch.cuda.device(device):
        (address,) = _checked(runtime.cudaMalloc(num_bytes))
        memory = _tensor(address, num_bytes, device, runtime.cudaFree)
        (handle,) = _checked(runtime.cudaIpcGetMemHandle(address))
    return memory, ctypes.string_at(handle.getPtr(), _HANDLE_BYTES)


def map_shared(handle: bytes, num_bytes: int, device: torch.device) -> Tensor:
    """
    Args:
        device: that reads it; another one than it lies on must be its peer.

    Returns:
        [num_bytes] uint8, mapped until its last view ends.

    Raises:
        CudaFailed: it is not another process's of this machine, or out of this device's reach.
    """
    if len(handle) != _HANDLE_BYTES:
        raise CudaFailed(f"a handle has {_HANDLE_BYTES} bytes, not {len(handle)}")
    shared = runtime.cudaIpcMemHandle_t()
    ctypes.memmove(shared.getPtr(), handle, _HANDLE_BYTES)
    with torch.cuda.device(device):
        flags = runtime.cudaIpcMemLazyEnablePeerAccess
        (address,) = _checked(runtime.cudaIpcOpenMemHandle(shared, flags))
        return _tensor(address, num_bytes, device, runtime.cudaIpcCloseMemHandle)


def _checked(result: tuple) -> tuple:
    error, *values = result
    if error != runtime.cudaError_t.cudaSuccess:
        # It would be reported again by whoever asks next.
        runtime.cudaGetLastError()
        raise CudaFailed(f"{runtime.cudaGetErrorString(error)[1].decode()} ({error.name})")
    return tuple(values)


class _Owner:
    """What torch keeps as long as a view of the memory lives."""

    def __init__(self, address: int, num_bytes: int, end: Callable[[int], object]) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
        # A process that ends gives all back.
        weakref.finalize(self, _end_in_thread, end, address).atexit = False


def _end_in_thread(end: Callable[[int], object], address: int) -> None:
    # It waits for all that the device does.
    threading.Thread(target=end, args=(address,), name="cuda memory", daemon=True).start()


def _tensor(address: int, num_bytes: int, device: torch.device, end: Callable[[int], object]) -> Tensor:
    return torch.as_tensor(_Owner(int(address), num_bytes, end), device=device)
