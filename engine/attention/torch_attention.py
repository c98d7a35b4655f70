"""Attention in torch operations alone, for a CPU and for CUDA."""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.attention import PLAIN, AttentionForm
from engine.attention.page_reader import PageReader
from engine.attention.step_plan import DecodeGroup, PageShape, StepPlan, longest_context, plan_step
from engine.batch import StepBatch
from engine.kv_cache import KVCache

# Measured on SmolLM2-135M's heads. A tile of a chunk's rows attends in one call, and the keys after its last
# row are never looked at: 30 % less time for a chunk of 512 than one causal call.
_CPU_TILE_ROWS = 64
_CUDA_TILE_ROWS = 1024


class TorchAttention:
    """Gathers the pages of a context into one piece and calls scaled_dot_product_attention.

    The query heads of a KV head are rows of one product (decode) or share K and V by broadcasting
    (prefill): K and V are never repeated.
    """

    def __init__(self) -> None:
        self.reader = PageReader()
        # By window; they grow on demand.
        self._tile_masks: dict[int | None, Tensor] = {}

    def prepare(self, batch: StepBatch, cache: KVCache) -> "TorchStepAttention":
        return TorchStepAttention(self, batch, cache)

    def tile_mask(self, num_rows: int, context_len: int, window: int | None, query: Tensor) -> Tensor:
        """[num_rows, context_len], 0 or -inf: the rows are the last of their context, in `query`'s dtype."""
        tile_rows = _tile_rows(query.device)
        mask = self._tile_masks.get(window)
        if mask is None or mask.shape[1] < context_len + tile_rows or mask.dtype != query.dtype:
            mask = _right_aligned_mask(tile_rows, 2 * (context_len + tile_rows), window, query)
            self._tile_masks[window] = mask
        end = mask.shape[1] - tile_rows + num_rows
        tile = mask[:num_rows, end - context_len : end]
        return tile if query.device.type == "cpu" else tile.contiguous()


def _tile_rows(device: torch.device) -> int:
    return _CPU_TILE_ROWS if device.type == "cpu" else _CUDA_TILE_ROWS


def _right_aligned_mask(num_rows: int, width: int, window: int | None, like: Tensor) -> Tensor:
    """[num_rows, width]: row i sees the last `window` of all but the last num_rows - 1 - i columns."""
    allowed = torch.ones(num_rows, width, dtype=torch.bool, device=like.device).tril(width - num_rows)
    if window is not None:
        allowed = allowed.triu(width - num_rows - window + 1)
    mask = torch.zeros(num_rows, width, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(~allowed, float("-inf"))


class TorchStepAttention:
    """The step's page numbers and masks, computed once for all layers of one form."""

    def __init__(self, attention: TorchAttention, batch: StepBatch, cache: KVCache) -> None:
        self._attention = attention
        self._batch = batch
        self._cache = cache
        self._longest = longest_context(batch)
        # By the layer's KV heads.
        self._write_rows: dict[int, Tensor] = {}
        # By the bytes and heads of the layer's K, and its window.
        self._plans: dict[tuple[int, int, int | None], StepPlan] = {}

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        num_kv_heads = key.shape[1]
        rows = self._write_rows.get(num_kv_heads)
        if rows is None:
            rows = self._cache.rows(self._batch.slots, num_kv_heads)
            self._write_rows[num_kv_heads] = rows
        self._cache.write(layer, rows, (key, value))

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm = PLAIN
    ) -> Tensor:
        (num_tokens, num_heads, _), num_kv_heads = query.shape, key.shape[1]
        # A window that no context of this step exceeds is none.
        window = form.window if form.window is not None and form.window < self._longest else None
        plan = self._plan(layer, window, query.dtype)
        out = query.new_empty(num_tokens, num_heads * value.shape[-1])
        # Query heads by the KV head that they read.
        grouped = (num_tokens, num_kv_heads, num_heads // num_kv_heads, -1)
        grouped_query, grouped_out = query.view(grouped), out.view(grouped)
        for group in plan.groups:
            self._attend_group(layer, group, form, grouped_query[: plan.num_decode], grouped_out)
        for chunk in plan.chunks:
            start, end = chunk.rows.first_row, chunk.rows.first_row + chunk.rows.num_rows
            if chunk.pages is None:
                context = key[start:end].transpose(0, 1), value[start:end].transpose(0, 1)
            else:
                context = self._context(layer, chunk.pages, 1, chunk.rows.context_len, query.dtype)
                context = context[0].squeeze(0), context[1].squeeze(0)
            self._attend_chunk(form, window, grouped_query[start:end], *context, grouped_out[start:end])
        return out

    def _plan(self, layer: int, window: int | None, dtype: torch.dtype) -> StepPlan:
        tensor = self._cache.layout.layers[layer][0]
        token_bytes = tensor.num_heads * tensor.head_dim * dtype.itemsize
        wanted = (tensor.num_heads, token_bytes, window)
        plan = self._plans.get(wanted)
        if plan is None:
            block_size = self._cache.layout.block_size
            shape = PageShape(tensor.num_heads, block_size, token_bytes, dtype, self._cache.is_quantized)
            plan = plan_step(self._batch, shape, window)
            self._plans[wanted] = plan
        return plan

    def _context(
        self, layer: int, pages: Tensor, num_rows: int, context_len: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """K and V [num_rows, num_kv_heads, context_len, head_dim] in `dtype`, in scratch memory."""
        key, value = (
            self._attention.reader.read(self._cache, layer, index, pages, dtype).view(
                num_rows, tensor.num_heads, -1, tensor.head_dim
            )[:, :, :context_len]
            for index, tensor in enumerate(self._cache.layout.layers[layer][:2])
        )
        return key, value

    def _attend_group(
        self, layer: int, group: DecodeGroup, form: AttentionForm, query: Tensor, out: Tensor
    ) -> None:
        """`query`, `out`: [num_decode, num_kv_heads, heads_per_kv_head, head_dim]."""
        key, value = self._context(layer, group.pages, group.num_rows, group.context_len, query.dtype)
        if group.rows is not None:
            query = query.index_select(0, group.rows)
        sinks = None if form.sinks is None else form.sinks.view(*query.shape[1:3], 1)
        found = _attend(query, key, value, group.mask, form, sinks)
        if group.rows is None:
            out[: group.num_rows].copy_(found)
        else:
            out.index_copy_(0, group.rows, found)

    def _attend_chunk(
        self,
        form: AttentionForm,
        window: int | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
    ) -> None:
        """`query`, `out`: [num_rows, num_kv_heads, heads_per_kv_head, head_dim]; `key`, `value`:
        [num_kv_heads, context_len, head_dim], the rows being the last of the context."""
        num_rows, num_kv_heads, heads_per_kv_head, _ = query.shape
        start = key.shape[1] - num_rows
        query, out = query.permute(1, 2, 0, 3), out.permute(1, 2, 0, 3)
        sinks = None if form.sinks is None else form.sinks.view(num_kv_heads, heads_per_kv_head, 1, 1)
        tile_rows = _tile_rows(query.device)
        for first in range(0, num_rows, tile_rows):
            last = min(first + tile_rows, num_rows)
            # What the tile's rows see: its last row all up to itself, its first one the window's start.
            begin = 0 if window is None else max(0, start + first + 1 - window)
            end = start + last
            shared = (num_kv_heads, heads_per_kv_head, end - begin, -1)
            out[:, :, first:last] = _attend(
                query[:, :, first:last],
                key[:, begin:end].unsqueeze(1).expand(shared),
                value[:, begin:end].unsqueeze(1).expand(shared),
                self._attention.tile_mask(last - first, end - begin, window, query),
                form,
                sinks,
            )


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, form: AttentionForm, sinks: Tensor | None
) -> Tensor:
    """[..., num_rows, value_dim] of `query` [..., num_rows, key_dim] over [..., num_tokens, their dim].

    Args:
        mask: 0 or -inf, broadcast over the scores [..., num_rows, num_tokens].
        sinks: `form.sinks`, broadcast over [..., num_rows, 1].
    """
    if form.logit_cap is None and sinks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=form.scale)
    scale = query.shape[-1] ** -0.5 if form.scale is None else form.scale
    scores = (query @ key.mT).float().mul_(scale)
    if form.logit_cap is not None:
        scores = scores.div_(form.logit_cap).tanh_().mul_(form.logit_cap)
    if mask is not None:
        scores += mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().expand(*scores.shape[:-1], 1)), -1)
    weights = scores.softmax(-1)[..., : key.shape[-2]]
    return weights.to(value.dtype) @ value
