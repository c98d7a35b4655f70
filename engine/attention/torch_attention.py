"""Attention in torch operations alone, for a CPU and for CUDA."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.row_groups import group_rows
from engine.batch import DecodeRows, PrefillRows, StepBatch
from engine.kv_cache import KVCache

# Measured on SmolLM2-135M's heads. A decode group's gathered K (or V): attention finds a small one still in
# the processor's cache, large ones mean fewer launches. A tile of a chunk's rows attends in one call, and the
# keys after its last row are never looked at: 30 % less time for a chunk of 512 than one causal call.
_CPU_GROUP_BYTES = 2 << 20
_CPU_TILE_ROWS = 64
_CUDA_GROUP_BYTES = 1 << 30
_CUDA_TILE_ROWS = 1024


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Decode rows that attend in one call.

    Attributes:
        rows: [num_rows] int64 in the step; None: all decode rows.
        pages: [num_rows * num_kv_heads * blocks per row] int64, each block * num_kv_heads + head.
        num_rows: of the group.
        context_len: the longest; later tokens are not looked at.
        mask: [num_rows, 1, 1, context_len], 0 or -inf; None: all contexts are equally long.
    """

    rows: Tensor | None
    pages: Tensor
    num_rows: int
    context_len: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _PrefillChunk:
    """A chunk. `pages`: [num_kv_heads * num_blocks] as above; None: the chunk is its whole context."""

    rows: PrefillRows
    pages: Tensor | None


class TorchAttention:
    """Gathers the pages of a context into one piece and calls scaled_dot_product_attention.

    The query heads of a KV head are rows of one product (decode) or share K and V by broadcasting
    (prefill): K and V are never repeated.
    """

    def __init__(self) -> None:
        # Both grow on demand and are kept: fresh memory of this size costs more than the copy into it.
        self._scratch: dict[int, Tensor] = {}
        self._tile_mask: Tensor | None = None

    def prepare(self, batch: StepBatch, cache: KVCache) -> "TorchStepAttention":
        return TorchStepAttention(self, batch, cache)

    def gather(self, pages: Tensor, index: Tensor, which: int) -> Tensor:
        """Copies pages [num_blocks, num_heads, block_size, head_dim], viewed as [num_blocks * num_heads, -1].

        Args:
            which: of two scratch buffers, overwritten by the next call with the same.

        Returns:
            [len(index), block_size * head_dim], in scratch memory.
        """
        width = pages.shape[2] * pages.shape[3]
        size = index.shape[0] * width
        scratch = self._scratch.get(which)
        if scratch is None or scratch.numel() < size or scratch.dtype != pages.dtype:
            scratch = torch.empty(size + size // 4, dtype=pages.dtype, device=pages.device)
            self._scratch[which] = scratch
        out = scratch[:size].view(-1, width)
        return torch.index_select(pages.view(-1, width), 0, index, out=out)

    def tile_mask(self, num_rows: int, context_len: int, query: Tensor) -> Tensor:
        """[num_rows, context_len], 0 or -inf: the rows are the last of their context, in `query`'s dtype."""
        tile_rows = _tile_rows(query.device)
        mask = self._tile_mask
        if mask is None or mask.shape[1] < context_len + tile_rows or mask.dtype != query.dtype:
            mask = _right_aligned_mask(tile_rows, 2 * (context_len + tile_rows), query)
            self._tile_mask = mask
        end = mask.shape[1] - tile_rows + num_rows
        tile = mask[:num_rows, end - context_len : end]
        return tile if query.device.type == "cpu" else tile.contiguous()


def _tile_rows(device: torch.device) -> int:
    return _CPU_TILE_ROWS if device.type == "cpu" else _CUDA_TILE_ROWS


def _right_aligned_mask(num_rows: int, width: int, like: Tensor) -> Tensor:
    """[num_rows, width]: row i may see all but the last num_rows - 1 - i columns."""
    allowed = torch.ones(num_rows, width, dtype=torch.bool, device=like.device).tril(width - num_rows)
    mask = torch.zeros(num_rows, width, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(~allowed, float("-inf"))


class TorchStepAttention:
    """The step's page numbers and masks, computed once for all layers."""

    def __init__(self, attention: TorchAttention, batch: StepBatch, cache: KVCache) -> None:
        self._attention = attention
        self._cache = cache
        tensor = cache.layout.layers[0][0]
        self._num_kv_heads = tensor.num_heads
        self._token_bytes = tensor.token_bytes
        self._block_size = cache.layout.block_size
        self._write_rows = cache.rows(batch.slots, tensor.num_heads)
        decode = batch.decode
        self._num_decode = 0 if decode is None else decode.context_lens.shape[0]
        self._groups = [] if decode is None else self._plan_decode(decode)
        self._chunks = [self._plan_chunk(rows) for rows in batch.prefill]

    def _pages(self, block_table: Tensor) -> Tensor:
        """From [..., num_blocks] blocks to [... * num_kv_heads * num_blocks] pages, heads before blocks."""
        heads = torch.arange(self._num_kv_heads, device=block_table.device).unsqueeze(1)
        return (block_table.unsqueeze(-2) * self._num_kv_heads + heads).view(-1)

    def _plan_decode(self, decode: DecodeRows) -> list[_DecodeGroup]:
        num_rows = decode.context_lens.shape[0]
        if decode.context_lens.device.type != "cpu":
            # Their lengths are not known here, and asking the device would wait for it.
            per_group = max(1, _CUDA_GROUP_BYTES // (self._token_bytes * decode.max_context_len))
            groups = [list(range(i, min(i + per_group, num_rows))) for i in range(0, num_rows, per_group)]
            lengths = [decode.max_context_len] * len(groups)
        else:
            lens: list[int] = decode.context_lens.tolist()
            groups = group_rows(lens, _CPU_GROUP_BYTES // self._token_bytes)
            lengths = [max(lens[row] for row in group) for group in groups]
        return [self._plan_group(decode, g, n) for g, n in zip(groups, lengths, strict=True)]

    def _plan_group(self, decode: DecodeRows, group: list[int], context_len: int) -> _DecodeGroup:
        lens, tables, rows = decode.context_lens, decode.block_tables, None
        if len(group) < lens.shape[0]:
            rows = torch.tensor(group, device=lens.device)
            lens, tables = lens.index_select(0, rows), tables.index_select(0, rows)
        num_blocks = -(-context_len // self._block_size)
        pages = self._pages(tables[:, :num_blocks])
        if lens.device.type == "cpu" and bool((lens == context_len).all()):
            return _DecodeGroup(rows, pages, len(group), context_len, None)
        # To the end of the last block: CUDA's kernels want an aligned mask.
        context_len = num_blocks * self._block_size
        masked = torch.arange(context_len, device=lens.device) >= lens.unsqueeze(1)
        mask = torch.zeros(
            masked.shape, dtype=self._cache.layout.layers[0][0].torch_dtype, device=lens.device
        )
        mask = mask.masked_fill_(masked, float("-inf")).view(len(group), 1, 1, context_len)
        return _DecodeGroup(rows, pages, len(group), context_len, mask)

    def _plan_chunk(self, rows: PrefillRows) -> _PrefillChunk:
        is_whole = rows.num_rows == rows.context_len
        return _PrefillChunk(rows, None if is_whole else self._pages(rows.block_table))

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        return self._cache.write(layer, self._write_rows, (key, value))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        num_tokens, num_heads, head_dim = query.shape
        out = query.new_empty(num_tokens, num_heads * head_dim)
        # Query heads by the KV head that they read.
        grouped = (num_tokens, self._num_kv_heads, num_heads // self._num_kv_heads, head_dim)
        grouped_query, grouped_out = query.view(grouped), out.view(grouped)
        for group in self._groups:
            self._attend_group(layer, group, grouped_query[: self._num_decode], grouped_out)
        for chunk in self._chunks:
            start, end = chunk.rows.first_row, chunk.rows.first_row + chunk.rows.num_rows
            if chunk.pages is None:
                context = key[start:end].transpose(0, 1), value[start:end].transpose(0, 1)
            else:
                context = self._context(layer, chunk.pages, 1, chunk.rows.context_len)
                context = context[0].squeeze(0), context[1].squeeze(0)
            self._attend_chunk(grouped_query[start:end], *context, grouped_out[start:end])
        return out

    def _context(self, layer: int, pages: Tensor, num_rows: int, context_len: int) -> tuple[Tensor, Tensor]:
        """K and V [num_rows, num_kv_heads, context_len, head_dim], in scratch memory."""
        key, value = (
            self._attention.gather(stored, pages, which).view(
                num_rows, self._num_kv_heads, -1, stored.shape[-1]
            )[:, :, :context_len]
            for which, stored in enumerate((self._cache.pages(layer, 0), self._cache.pages(layer, 1)))
        )
        return key, value

    def _attend_group(self, layer: int, group: _DecodeGroup, query: Tensor, out: Tensor) -> None:
        """`query`, `out`: [num_decode, num_kv_heads, heads_per_kv_head, head_dim]."""
        key, value = self._context(layer, group.pages, group.num_rows, group.context_len)
        if group.rows is not None:
            query = query.index_select(0, group.rows)
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=group.mask)
        if group.rows is None:
            out[: group.num_rows].copy_(found)
        else:
            out.index_copy_(0, group.rows, found)

    def _attend_chunk(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        """`query`, `out`: [num_rows, num_kv_heads, heads_per_kv_head, head_dim]; `key`, `value`:
        [num_kv_heads, context_len, head_dim], the rows being the last of the context."""
        num_rows, num_kv_heads, heads_per_kv_head, head_dim = query.shape
        start = key.shape[1] - num_rows
        query, out = query.permute(1, 2, 0, 3), out.permute(1, 2, 0, 3)
        tile_rows = _tile_rows(query.device)
        for first in range(0, num_rows, tile_rows):
            last = min(first + tile_rows, num_rows)
            context_len = start + last
            shared = (num_kv_heads, heads_per_kv_head, context_len, head_dim)
            out[:, :, first:last] = F.scaled_dot_product_attention(
                query[:, :, first:last],
                key[:, :context_len].unsqueeze(1).expand(shared),
                value[:, :context_len].unsqueeze(1).expand(shared),
                attn_mask=self._attention.tile_mask(last - first, context_len, query),
            )
