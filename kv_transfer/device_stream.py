"""Work on a device beside the engine's: its kernels, which may be long, are not waited for."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


@contextmanager
def device_stream(device: torch.device) -> Iterator[None]:
    """What is given to `device` in here is done when this ends. It blocks: mostly for some microseconds."""
    with torch.inference_mode():
        if device.type != "cuda":
            yield
            return
        stream = _stream(device)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            stream.synchronize()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)
