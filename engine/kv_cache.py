"""The memory of the KV blocks."""

import math

import numpy as np
import torch
from torch import Tensor

from engine.kv_layout import KVLayout, TensorLayout
from engine.kv_quantization import LARGEST, quantize

_ALIGNMENT_BYTES = 64


class KVCache:
    """The pages of every layer on one device.

    A page is a block of one tensor: [num_heads, block_size, head_dim]. Heads come before tokens, so that
    gathering the pages of a sequence head by head gives attention its contiguous [heads, tokens, head_dim].
    A slot is a token's place, block * block_size + offset, the same in every layer and tensor.
    Invariant: memory is zero until written, so that what attention masks out is always finite.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = device
        self.is_quantized = layout.layers[0][0].torch_dtype in LARGEST
        self._pages = tuple(
            tuple(self._zeros(self._page_shape(tensor), tensor.torch_dtype) for tensor in layer)
            for layer in layout.layers
        )

    def _page_shape(self, tensor: TensorLayout) -> tuple[int, int, int, int]:
        return (self.num_blocks, tensor.num_heads, self.layout.block_size, tensor.head_dim)

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """On a CPU from calloc: memory that no block has used yet takes no room, unlike torch.zeros."""
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=self.device)
        num_bytes = math.prod(shape) * dtype.itemsize
        memory = torch.from_numpy(np.zeros(num_bytes + _ALIGNMENT_BYTES, np.uint8))
        start = -memory.data_ptr() % _ALIGNMENT_BYTES
        return memory[start : start + num_bytes].view(dtype).view(shape)

    def pages(self, layer: int, index: int) -> Tensor:
        """[num_blocks, num_heads, block_size, head_dim] of the layer's tensor `index` (layout order)."""
        return self._pages[layer][index]

    def scales(self, layer: int, index: int) -> Tensor | None:
        """[num_blocks, num_heads, block_size, 1] of K or V `index`; None: the cache is not quantized."""
        if not self.is_quantized:
            return None
        return self._pages[layer][index + len(self._pages[layer]) // 2]

    def rows(self, slots: Tensor, num_heads: int) -> Tensor:
        """Where the heads of `slots` lie in pages seen as [num_blocks * num_heads * block_size, head_dim].

        Returns:
            [num_slots * num_heads] int64, token by token.
        """
        block_size = self.layout.block_size
        blocks = slots // block_size
        first = blocks * (num_heads * block_size) + (slots - blocks * block_size)
        heads = torch.arange(num_heads, device=slots.device) * block_size
        return (first.unsqueeze(1) + heads).view(-1)

    def write(self, layer: int, rows: Tensor, tensors: tuple[Tensor, ...]) -> None:
        """Stores a layer's K and V, each [num_tokens, num_heads, head_dim], at their `rows`, quantized if
        the layout says so.

        For tensors that all have the same number of heads: `rows` are computed once for all layers.
        """
        cached = self._quantized(layer, tensors) if self.is_quantized else tensors
        for pages, data in zip(self._pages[layer], cached, strict=True):
            _copy_rows(pages, rows, data)

    def _quantized(self, layer: int, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        forms = self.layout.layers[layer][: len(tensors)]
        pairs = [quantize(data, form.torch_dtype) for data, form in zip(tensors, forms, strict=True)]
        return (*(stored for stored, _ in pairs), *(scale for _, scale in pairs))

    def scatter(self, layer: int, index: int, slots: Tensor, data: Tensor) -> None:
        """Stores `data` [num_slots, num_heads, head_dim] in the layer's tensor `index`, at `slots` int64.

        Raises:
            ValueError: `data` has another shape or dtype than the layout says.
        """
        tensor = self.layout.layers[layer][index]
        shape = (slots.shape[0], tensor.num_heads, tensor.head_dim)
        if data.shape != shape or data.dtype != tensor.torch_dtype:
            raise ValueError(
                f"{tensor.name} of layer {layer}: {tuple(data.shape)} {data.dtype} where "
                f"{shape} {tensor.torch_dtype} belongs"
            )
        _copy_rows(self._pages[layer][index], self.rows(slots, tensor.num_heads), data)

    def gather(self, layer: int, index: int, slots: Tensor) -> Tensor:
        """A copy of what `scatter` stores: [num_slots, num_heads, head_dim] at `slots` int64."""
        tensor = self.layout.layers[layer][index]
        pages = self._pages[layer][index].view(-1, tensor.head_dim)
        found = pages.index_select(0, self.rows(slots, tensor.num_heads))
        return found.view(slots.shape[0], tensor.num_heads, tensor.head_dim)

    def copy_block(self, source: int, target: int) -> None:
        """Makes block `target` hold what block `source` holds, in every layer and tensor."""
        for layer in self._pages:
            for pages in layer:
                pages[target].copy_(pages[source])


def _copy_rows(pages: Tensor, rows: Tensor, data: Tensor) -> None:
    if pages.dtype is torch.float8_e4m3fn:
        # torch does not index it on a CPU.
        pages, data = pages.view(torch.int8), data.view(torch.int8)
    head_dim = data.shape[-1]
    pages.view(-1, head_dim).index_copy_(0, rows, data.reshape(-1, head_dim))
