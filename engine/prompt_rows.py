"""The rows of a step whose logits speak of a prompt's next token, for those who asked for prompt logprobs."""

from collections.abc import Sequence as Rows
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.logprobs import LogprobTensors, TokenLogprobs, token_logprobs
from engine.request import SequenceId
from engine.scheduler import Chunk
from engine.sequence import Sequence


class PromptRows(NamedTuple):
    """`positions`: in the sequence. `first_row`: in the step, of the first of them. `num_top`: asked for."""

    sequence: Sequence
    positions: range
    first_row: int
    num_top: int


class ToldPromptLogprobs(NamedTuple):
    """`tokens`: one for every prompt token but the first."""

    sequence_id: SequenceId
    tokens: tuple[TokenLogprobs, ...]


def prompt_rows(chunks: Rows[Chunk]) -> tuple[PromptRows, ...]:
    """Of the chunks whose sequences ask, also where a chunk brings nothing new."""
    asked = []
    first_row = 0
    for chunk in chunks:
        gathering = chunk.sequence.prompt_logprobs
        if gathering is not None:
            positions = gathering.positions(chunk.token_start, chunk.token_end)
            row = first_row + positions.start - chunk.token_start
            asked.append(PromptRows(chunk.sequence, positions, row, gathering.num_top))
        first_row += chunk.num_tokens
    return tuple(asked)


def rows_of(asked: Rows[PromptRows]) -> np.ndarray:
    """[num_rows] int64, in the step."""
    ranges = [np.arange(rows.first_row, rows.first_row + len(rows.positions)) for rows in asked]
    return np.concatenate(ranges) if ranges else np.empty(0, np.int64)


def prompt_logprobs(logits: Tensor, asked: Rows[PromptRows]) -> LogprobTensors | None:
    """`logits`: [num_rows, vocab] float32, of `rows_of(asked)`."""
    if len(logits) == 0:
        return None
    targets = [
        token
        for rows in asked
        for token in rows.sequence.request.prompt[rows.positions.start + 1 : rows.positions.stop + 1]
    ]
    counts = [rows.num_top for rows in asked for _ in rows.positions]
    return token_logprobs(logits, torch.tensor(targets, device=logits.device), counts)


def book_prompt_logprobs(
    asked: Rows[PromptRows], tensors: LogprobTensors | None
) -> tuple[ToldPromptLogprobs, ...]:
    """Gives each sequence what its step brought, and returns those that are complete."""
    read = iter(tensors.read() if tensors is not None else ())
    told = []
    for rows in asked:
        gathering = rows.sequence.prompt_logprobs
        values = [next(read) for _ in rows.positions]
        if gathering is None:
            continue
        gathering.add(rows.positions, values)
        complete = gathering.complete()
        if complete is not None:
            rows.sequence.prompt_logprobs = None
            told.append(ToldPromptLogprobs(rows.sequence.sequence_id, complete))
    return tuple(told)
