"""K and V of many pages in one piece."""

from typing import Literal

import torch
from torch import Tensor

from engine.kv_cache import KVCache
from engine.kv_quantization import dequantize


class PageReader:
    """Copies pages into scratch memory, in the dtype that attention computes in.

    Scratch memory grows on demand and is kept: fresh memory of this size costs more than the copy into it.
    """

    def __init__(self) -> None:
        self._scratch: dict[tuple[str, int], Tensor] = {}

    def read(self, cache: KVCache, layer: int, index: int, pages: Tensor, dtype: torch.dtype) -> Tensor:
        """
        Args:
            index: of K or V in the layer's layout.
            pages: [num_pages] int64, each block * num_heads + head.
            dtype: of the result, if the cache is quantized; else it is the cache's.

        Returns:
            [num_pages, block_size * head_dim], overwritten by the next call with the same `index`.
        """
        stored, scales = cache.pages(layer, index), cache.scales(layer, index)
        gathered = self._gather("gathered", index, stored, pages)
        if scales is None:
            return gathered
        scale = self._gather("scale", index, scales, pages)
        rows = gathered.view(-1, stored.shape[-1])
        shape, device = (rows.shape[0], rows.shape[1]), rows.device
        out = self._take("float32", index, shape, torch.float32, device)
        found = dequantize(rows, scale.view(-1, 1), out)
        if dtype is not torch.float32:
            found = self._take("rounded", index, shape, dtype, device).copy_(found)
        return found.view(gathered.shape)

    def _gather(self, use: Literal["gathered", "scale"], index: int, stored: Tensor, pages: Tensor) -> Tensor:
        """Of pages [num_blocks, num_heads, block_size, head_dim], viewed as [num_blocks * num_heads, -1]."""
        width = stored.shape[2] * stored.shape[3]
        out = self._take(use, index, (pages.shape[0], width), stored.dtype, stored.device)
        return torch.index_select(stored.view(-1, width), 0, pages, out=out)

    def _take(
        self,
        use: Literal["gathered", "scale", "float32", "rounded"],
        index: int,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        size = shape[0] * shape[1]
        scratch = self._scratch.get((use, index))
        if scratch is None or scratch.numel() < size or scratch.dtype != dtype:
            scratch = torch.empty(size + size // 4, dtype=dtype, device=device)
            self._scratch[use, index] = scratch
        return scratch[:size].view(shape)
