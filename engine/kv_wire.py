"""K and V as they leave one engine for another: bytes in the order of the blocks.

*Packed*, tokens [token_start, token_end) of a layer are: one tensor after the other, in layout order; of each
tensor, for every block that the tokens touch, in order, [num_heads, tokens of the block, head_dim]. A whole
block is thus a page, and moves as one piece. The blocks are those of the layout on the wire, which is the
sender's; a receiver may have another block size, or another dtype.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.kv_cache import KVCache
from engine.kv_conversion import convert
from engine.kv_layout import KVLayout, TensorLayout

# A tensor: [num_bytes] uint8, on any device.
Packed = bytes | bytearray | memoryview | Tensor
View = memoryview | Tensor


class Span(NamedTuple):
    """Blocks that follow each other in a block table, with the same tokens of each.

    Attributes:
        first_block: its place in the table.
        rows: tokens of each block.
    """

    first_block: int
    num_blocks: int
    rows: slice

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * (self.rows.stop - self.rows.start)


def spans(token_start: int, token_end: int, block_size: int) -> Iterator[Span]:
    """Tokens as a part of a block, whole blocks, and a part of a block; what is empty is left out."""
    first, start = divmod(token_start, block_size)
    last, end = divmod(token_end, block_size)
    if first == last:
        if start < end:
            yield Span(first, 1, slice(start, end))
        return
    if start:
        yield Span(first, 1, slice(start, block_size))
        first += 1
    if first < last:
        yield Span(first, last - first, slice(0, block_size))
    if end:
        yield Span(last, 1, slice(0, end))


class KVPlace(Protocol):
    """Some tokens of a sequence in the pages of a cache, and their packed form in one layout."""

    def pack(self, layer: int) -> Tensor:
        """Never waits for the device.

        Returns:
            [num_bytes] uint8, on the device of the cache, in memory of its own.
        """
        ...

    def unpack(self, layer: int, packed: Packed) -> None:
        """Stores what `pack` made. A device may still be at it when this returns.

        Raises:
            ValueError: `packed` is not of the length that the layout gives it.
        """
        ...


class KVWire(Protocol):
    """Moves K and V between the pages of one cache and one layout on the wire."""

    def at(self, block_table: np.ndarray, token_start: int, token_end: int) -> KVPlace:
        """What is the same in every layer is prepared here, once."""
        ...


def kv_wire(cache: KVCache, layout: KVLayout) -> KVWire:
    """
    Args:
        layout: on the wire.
    """
    ours = cache.layout
    if layout.layers == ours.layers and layout.block_size == ours.block_size:
        return PageWire(cache)
    return ConvertingWire(cache, layout)


class PageWire:
    """A KVWire whose layout is the cache's."""

    def __init__(self, cache: KVCache) -> None:
        self.layout = cache.layout
        self.device = cache.device
        kind = HostPages if cache.device.type == "cpu" else DevicePages
        self.pages = tuple(
            tuple(kind(cache.pages(layer, index)) for index in range(len(tensors)))
            for layer, tensors in enumerate(self.layout.layers)
        )

    def at(self, block_table: np.ndarray, token_start: int, token_end: int) -> "PagePlace":
        return PagePlace(self, block_table, token_start, token_end)


class PagePlace:
    """See KVPlace."""

    def __init__(self, wire: PageWire, block_table: np.ndarray, token_start: int, token_end: int) -> None:
        self._wire = wire
        self._num_tokens = token_end - token_start
        self._parts = tuple(
            (self._blocks(block_table, span), span)
            for span in spans(token_start, token_end, wire.layout.block_size)
        )

    def _blocks(self, block_table: np.ndarray, span: Span) -> Tensor:
        blocks = block_table[span.first_block : span.first_block + span.num_blocks]
        return torch.from_numpy(blocks).to(self._wire.device)

    def pack(self, layer: int) -> Tensor:
        num_bytes = self._num_tokens * self._wire.layout.layer_token_bytes(layer)
        packed = torch.empty(num_bytes, dtype=torch.uint8, device=self._wire.device)
        for pages, blocks, rows, start, end in self._runs(layer):
            pages.read(blocks, rows, packed[start:end])
        return packed

    def unpack(self, layer: int, packed: Packed) -> None:
        data = _view(packed, self._num_tokens * self._wire.layout.layer_token_bytes(layer))
        for pages, blocks, rows, start, end in self._runs(layer):
            pages.write(blocks, rows, data[start:end])

    def _runs(self, layer: int) -> Iterator[tuple["HostPages | DevicePages", Tensor, slice, int, int]]:
        """Pages, the blocks and rows of them, and from where to where they lie in the packed form."""
        end = 0
        for pages, form in zip(self._wire.pages[layer], self._wire.layout.layers[layer], strict=True):
            for blocks, span in self._parts:
                start, end = end, end + span.num_tokens * form.token_bytes
                yield pages, blocks, span.rows, start, end


class HostPages:
    """The pages of one tensor on a CPU. numpy moves a whole block as one item, as fast as a plain copy."""

    def __init__(self, pages: Tensor) -> None:
        num_blocks, _, self._block_size, _ = pages.shape
        self._rows: np.ndarray = pages.view(torch.uint8).numpy()
        by_block = self._rows.reshape(num_blocks, -1)
        self._item = np.dtype((np.void, by_block.shape[1]))
        self._items = by_block.view(self._item)[:, 0]

    def read(self, blocks: Tensor, rows: slice, into: Tensor) -> None:
        target = into.numpy()
        if self._are_whole(rows):
            # A mode that checks nothing: with checks numpy takes a buffer of its own.
            np.take(self._items, blocks.numpy(), out=target.view(self._item), mode="clip")
        else:
            part = self._rows[int(blocks[0]), :, rows]
            target.reshape(part.shape)[...] = part

    def write(self, blocks: Tensor, rows: slice, data: View) -> None:
        source = data.cpu().numpy() if isinstance(data, Tensor) else np.frombuffer(data, np.uint8)
        if self._are_whole(rows):
            self._items[blocks.numpy()] = source.view(self._item)
        else:
            part = self._rows[int(blocks[0]), :, rows]
            part[...] = source.reshape(part.shape)

    def _are_whole(self, rows: slice) -> bool:
        return rows.stop - rows.start == self._block_size


class DevicePages:
    """The pages of one tensor on a device."""

    def __init__(self, pages: Tensor) -> None:
        self._rows = pages.view(torch.uint8)

    def read(self, blocks: Tensor, rows: slice, into: Tensor) -> None:
        part = self._rows[:, :, rows].index_select(0, blocks)
        into.view(part.shape).copy_(part)

    def write(self, blocks: Tensor, rows: slice, data: View) -> None:
        _, num_heads, _, row_bytes = self._rows.shape
        part = _on_device(data, self._rows.device)
        part = part.view(len(blocks), num_heads, rows.stop - rows.start, row_bytes)
        self._rows[:, :, rows].index_copy_(0, blocks, part)


class ConvertingWire:
    """A KVWire between different layouts."""

    def __init__(self, cache: KVCache, layout: KVLayout) -> None:
        self.cache = cache
        self.layout = layout

    def at(self, block_table: np.ndarray, token_start: int, token_end: int) -> "ConvertedPlace":
        return ConvertedPlace(self, block_table, token_start, token_end)


class ConvertedPlace:
    """See KVPlace: through rows, a tensor at a time."""

    def __init__(
        self, wire: ConvertingWire, block_table: np.ndarray, token_start: int, token_end: int
    ) -> None:
        self._cache = wire.cache
        self._layout = wire.layout
        self._tokens = (token_start, token_end)
        size = self._cache.layout.block_size
        positions = np.arange(token_start, token_end)
        slots = block_table[positions // size] * size + positions % size
        self._slots = torch.from_numpy(slots).to(self._cache.device)

    def pack(self, layer: int) -> Tensor:
        cached, wire = self._cache.layout.layers[layer], self._layout.layers[layer]
        rows = tuple(self._cache.gather(layer, index, self._slots) for index in range(len(cached)))
        parts = [
            part
            for tensor in convert(rows, cached, wire)
            for part in _by_block(tensor, self._tokens[0], self._layout.block_size)
        ]
        return torch.cat(parts)

    def unpack(self, layer: int, packed: Packed) -> None:
        cached, wire = self._cache.layout.layers[layer], self._layout.layers[layer]
        num_tokens = len(self._slots)
        data = _view(packed, num_tokens * self._layout.layer_token_bytes(layer))
        rows: list[Tensor] = []
        end = 0
        for form in wire:
            start, end = end, end + num_tokens * form.token_bytes
            tensor = _on_device(data[start:end], self._cache.device)
            rows.append(_by_token(tensor, form, *self._tokens, self._layout.block_size))
        for index, tensor in enumerate(convert(tuple(rows), wire, cached)):
            self._cache.scatter(layer, index, self._slots, tensor)


def _view(packed: Packed, num_bytes: int) -> View:
    """What can be cut without a copy.

    Raises:
        ValueError: it has another length.
    """
    view = packed if isinstance(packed, Tensor) else memoryview(packed)
    if view.nbytes != num_bytes:
        raise ValueError(f"{view.nbytes} bytes of K and V, the layout says {num_bytes}")
    return view


def _on_device(data: View, device: torch.device) -> Tensor:
    if isinstance(data, Tensor):
        return data.to(device)
    # torch has no tensors that may only be read: what is not writable is copied.
    return torch.from_numpy(np.require(np.frombuffer(data, np.uint8), requirements="W")).to(device)


def _by_block(rows: Tensor, token_start: int, block_size: int) -> Iterator[Tensor]:
    """Rows [num_tokens, num_heads, head_dim] in the order of the blocks: pieces of [num_bytes] uint8."""
    _, num_heads, head_dim = rows.shape
    for start, span in _placed(token_start, token_start + len(rows), block_size):
        piece = rows[start : start + span.num_tokens].view(span.num_blocks, -1, num_heads, head_dim)
        yield piece.transpose(1, 2).contiguous().view(-1).view(torch.uint8)


def _by_token(
    packed: Tensor, form: TensorLayout, token_start: int, token_end: int, block_size: int
) -> Tensor:
    """[num_bytes] uint8 in the order of the blocks as rows [num_tokens, num_heads, head_dim]."""
    pieces: list[Tensor] = []
    for start, span in _placed(token_start, token_end, block_size):
        part = packed[start * form.token_bytes : (start + span.num_tokens) * form.token_bytes]
        pages = part.view(form.torch_dtype).view(span.num_blocks, form.num_heads, -1, form.head_dim)
        pieces.append(pages.transpose(1, 2).reshape(-1, form.num_heads, form.head_dim).view(torch.uint8))
    return torch.cat(pieces).view(form.torch_dtype)


def _placed(token_start: int, token_end: int, block_size: int) -> Iterator[tuple[int, Span]]:
    """Each span, and how many tokens come before it."""
    before = 0
    for span in spans(token_start, token_end, block_size):
        yield before, span
        before += span.num_tokens
