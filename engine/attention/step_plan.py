"""Which pages the rows of a step read, for layers of one form."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.row_groups import group_rows
from engine.batch import DecodeRows, PrefillRows, StepBatch

# A decode group's gathered K (or V), measured on SmolLM2-135M's heads: attention finds a small one still in
# the processor's cache, large ones mean fewer launches.
_CPU_GROUP_BYTES = 2 << 20
_CUDA_GROUP_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class PageShape:
    """Of a layer's K pages.

    Attributes:
        token_bytes: of one token's K as attention reads it.
        dtype: of the products with Q.
        is_lossy: K and V read from the pages are not quite those written.
    """

    num_kv_heads: int
    block_size: int
    token_bytes: int
    dtype: torch.dtype
    is_lossy: bool


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows that attend in one call.

    Attributes:
        rows: [num_rows] int64 in the step; None: all decode rows.
        pages: [num_rows * num_kv_heads * blocks per row] int64, each block * num_kv_heads + head.
        num_rows: of the group.
        context_len: the longest; later tokens are not looked at.
        mask: [num_rows, 1, 1, context_len], 0 or -inf; None: all contexts are equally long and whole.
    """

    rows: Tensor | None
    pages: Tensor
    num_rows: int
    context_len: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """A chunk. `pages`: [num_kv_heads * num_blocks] as above; None: its whole context is at hand.

    Blocks that no row of it sees are left out of `rows.block_table` and `rows.context_len`.
    """

    rows: PrefillRows
    pages: Tensor | None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The calls that a layer's attention is made of. `num_decode`: the rows of all `groups`."""

    num_decode: int
    groups: tuple[DecodeGroup, ...]
    chunks: tuple[PrefillChunk, ...]


@dataclass(frozen=True, slots=True)
class _VisibleRows:
    """Decode rows, without the blocks that a window hides. `starts`: [num_decode] int64, the first token of
    each row's table that the row sees; None: it sees all."""

    decode: DecodeRows
    starts: Tensor | None


def longest_context(batch: StepBatch) -> int:
    """In tokens, over all rows."""
    decode = 0 if batch.decode is None else batch.decode.max_context_len
    return max([decode, *(rows.context_len for rows in batch.prefill)])


def plan_step(batch: StepBatch, shape: PageShape, window: int | None) -> StepPlan:
    """The plan of layers whose pages have `shape` and whose rows see `window` tokens; None: all."""
    groups: list[DecodeGroup] = []
    if batch.decode is not None:
        groups = _plan_decode(_visible_rows(batch.decode, shape.block_size, window), shape)
    chunks = tuple(
        _plan_chunk(_visible_chunk(rows, shape.block_size, window), shape) for rows in batch.prefill
    )
    return StepPlan(sum(group.num_rows for group in groups), tuple(groups), chunks)


def _visible_rows(decode: DecodeRows, block_size: int, window: int | None) -> _VisibleRows:
    if window is None or decode.max_context_len <= window:
        return _VisibleRows(decode, None)
    tables, lens = decode.block_tables, decode.context_lens
    first_tokens = (lens - window).clamp_(min=0)
    first_blocks = first_tokens // block_size
    # The window's blocks, and one more when it starts inside a block.
    width = min(tables.shape[1], -(-window // block_size) + 1)
    columns = first_blocks.unsqueeze(1) + torch.arange(width, device=lens.device)
    tables = tables.gather(1, columns.clamp_(max=tables.shape[1] - 1))
    hidden = first_blocks * block_size
    max_context_len = min(decode.max_context_len, width * block_size)
    return _VisibleRows(DecodeRows(tables, lens - hidden, max_context_len), first_tokens - hidden)


def _plan_decode(visible: _VisibleRows, shape: PageShape) -> list[DecodeGroup]:
    decode = visible.decode
    num_rows = decode.context_lens.shape[0]
    if decode.context_lens.device.type != "cpu":
        # Their lengths are not known here, and asking the device would wait for it.
        per_group = max(1, _CUDA_GROUP_BYTES // (shape.token_bytes * decode.max_context_len))
        groups = [list(range(i, min(i + per_group, num_rows))) for i in range(0, num_rows, per_group)]
        lengths = [decode.max_context_len] * len(groups)
    else:
        lens: list[int] = decode.context_lens.tolist()
        groups = group_rows(lens, _CPU_GROUP_BYTES // shape.token_bytes)
        lengths = [max(lens[row] for row in group) for group in groups]
    return [_plan_group(visible, shape, g, n) for g, n in zip(groups, lengths, strict=True)]


def _plan_group(visible: _VisibleRows, shape: PageShape, group: list[int], context_len: int) -> DecodeGroup:
    lens, tables, starts = visible.decode.context_lens, visible.decode.block_tables, visible.starts
    rows = None
    if len(group) < lens.shape[0]:
        rows = torch.tensor(group, device=lens.device)
        lens, tables = lens.index_select(0, rows), tables.index_select(0, rows)
        starts = None if starts is None else starts.index_select(0, rows)
    num_blocks = -(-context_len // shape.block_size)
    pages = _pages(tables[:, :num_blocks], shape.num_kv_heads)
    if starts is None and lens.device.type == "cpu" and bool((lens == context_len).all()):
        return DecodeGroup(rows, pages, len(group), context_len, None)
    # To the end of the last block: CUDA's kernels want an aligned mask.
    context_len = num_blocks * shape.block_size
    tokens = torch.arange(context_len, device=lens.device)
    hidden = tokens >= lens.unsqueeze(1)
    if starts is not None:
        hidden |= tokens < starts.unsqueeze(1)
    mask = torch.zeros(hidden.shape, dtype=shape.dtype, device=lens.device)
    mask = mask.masked_fill_(hidden, float("-inf")).view(len(group), 1, 1, context_len)
    return DecodeGroup(rows, pages, len(group), context_len, mask)


def _visible_chunk(rows: PrefillRows, block_size: int, window: int | None) -> PrefillRows:
    first_token = 0 if window is None else max(0, rows.context_len - rows.num_rows + 1 - window)
    hidden = first_token // block_size
    if hidden == 0:
        return rows
    return rows._replace(
        context_len=rows.context_len - hidden * block_size, block_table=rows.block_table[hidden:]
    )


def _plan_chunk(rows: PrefillRows, shape: PageShape) -> PrefillChunk:
    # What is lossy is read back even here, so that a text does not depend on how its prompt was cut into
    # chunks, handed off or found in a prefix cache.
    is_at_hand = rows.num_rows == rows.context_len and not shape.is_lossy
    return PrefillChunk(rows, None if is_at_hand else _pages(rows.block_table, shape.num_kv_heads))


def _pages(block_table: Tensor, num_kv_heads: int) -> Tensor:
    """From [..., num_blocks] blocks to [... * num_kv_heads * num_blocks] pages, heads before blocks."""
    heads = torch.arange(num_kv_heads, device=block_table.device).unsqueeze(1)
    return (block_table.unsqueeze(-2) * num_kv_heads + heads).view(-1)
