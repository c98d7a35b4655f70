"""The tensors of one step, and who listens while the model computes them."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from engine.request import SequenceId


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The first `num_decode` rows of a step: one token of each running sequence.

    Attributes:
        block_tables: [num_decode, max_blocks] int64, padded with block 0.
        context_lens: [num_decode] int64, the row's own token included.
        max_context_len: of `context_lens`, known on the host.
    """

    block_tables: Tensor
    context_lens: Tensor
    max_context_len: int


class PrefillRows(NamedTuple):
    """A run of rows that are consecutive tokens of one sequence.

    Attributes:
        first_row: where the run starts in the step.
        num_rows: its tokens.
        context_len: the sequence's tokens up to and with the run's last one.
        block_table: [ceil(context_len / block_size)] int64.
    """

    first_row: int
    num_rows: int
    context_len: int
    block_table: Tensor


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step's tokens, flat: the decode rows first, then the chunks.

    Attributes:
        token_ids: [num_tokens] int64.
        positions: [num_tokens] int64.
        slots: [num_tokens] int64, block * block_size + offset, where each row's K and V are written.
        decode: None when no row decodes.
        prefill: the chunks, in row order.
        sampled_rows: [num_sampled] int64, the rows whose logits are wanted.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    decode: DecodeRows | None
    prefill: tuple[PrefillRows, ...]
    sampled_rows: Tensor


class KVListener(Protocol):
    """Is told, in the engine thread and in layer order, when a layer of a chunk is ready."""

    def on_layer(
        self, sequence_id: SequenceId, layer: int, token_start: int, token_end: int, packed: Tensor
    ) -> None:
        """`packed`: see engine.kv_wire, a copy, on the device."""
        ...


class LayerHook(Protocol):
    """What the model calls after each layer has written its K and V."""

    def __call__(self, layer: int) -> None: ...
