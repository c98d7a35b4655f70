"""The tensors of a step, cut from the sequences that take part."""

from collections.abc import Sequence as Rows

import numpy as np
import torch

from engine.batch import DecodeRows, PrefillRows, StepBatch
from engine.scheduler import Chunk


def step_batch(
    chunks: Rows[Chunk], sampled_rows: Rows[int], block_size: int, device: torch.device
) -> StepBatch:
    """`chunks` has its single tokens first; a row may be sampled several times."""
    num_decode = sum(chunk.num_tokens == 1 for chunk in chunks)
    token_ids = [t for c in chunks for t in c.sequence.tokens[c.token_start : c.token_end]]
    positions = np.concatenate([np.arange(c.token_start, c.token_end) for c in chunks])
    slots = np.concatenate([c.sequence.slots(c.token_start, c.token_end, block_size) for c in chunks])
    ends = np.cumsum([c.num_tokens for c in chunks])
    prefill = tuple(
        PrefillRows(
            int(end) - chunk.num_tokens,
            chunk.num_tokens,
            chunk.token_end,
            torch.from_numpy(chunk.sequence.block_table[: -(-chunk.token_end // block_size)]).to(device),
        )
        for chunk, end in zip(chunks[num_decode:], ends[num_decode:], strict=True)
    )
    return StepBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions=torch.from_numpy(positions).to(device),
        slots=torch.from_numpy(slots).to(device),
        decode=_decode_rows(chunks[:num_decode], block_size, device) if num_decode else None,
        prefill=prefill,
        sampled_rows=torch.tensor(np.array(sampled_rows, np.int64), device=device),
    )


def _decode_rows(chunks: Rows[Chunk], block_size: int, device: torch.device) -> DecodeRows:
    context_lens = [chunk.token_end for chunk in chunks]
    width = -(-max(context_lens) // block_size)
    tables = np.zeros((len(chunks), width), np.int64)
    for row, chunk in enumerate(chunks):
        used = -(-chunk.token_end // block_size)
        tables[row, :used] = chunk.sequence.block_table[:used]
    return DecodeRows(
        torch.from_numpy(tables).to(device),
        torch.tensor(context_lens, dtype=torch.int64, device=device),
        max(context_lens),
    )
