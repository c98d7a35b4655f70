"""A request while an engine has it."""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from engine.block_pool import BlockId
from engine.request import EngineRequest, FinishReason, RunUntil, SequenceId


class SequenceState(Enum):
    # Holds no block.
    WAITING = "waiting"
    # Holds blocks that a hand-off fills; not scheduled before `Engine.begin_decode`.
    IMPORTING = "importing"
    # Has tokens to compute.
    RUNNING = "running"
    # Has its first token and keeps its blocks for a hand-off.
    HELD = "held"


@dataclass(slots=True)
class StageMarks:
    """When a sequence reached a stage on this engine, `time.monotonic()` seconds; 0 if it has not."""

    first_chunk: float = 0.0
    first_token: float = 0.0
    decode_ready: float = 0.0
    first_decode: float = 0.0
    last_token: float = 0.0


@dataclass(slots=True, eq=False)
class Sequence:
    """A request, its tokens so far, and the blocks with the KV of the first `num_computed` of them."""

    request: EngineRequest
    tokens: list[int]
    num_computed: int = 0
    state: SequenceState = SequenceState.WAITING
    blocks: list[BlockId] = field(default_factory=list)
    # The same as `blocks`, int64, as the tensors of a step are cut from it.
    block_table: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    marks: StageMarks = field(default_factory=StageMarks)

    @classmethod
    def of(cls, request: EngineRequest) -> "Sequence":
        return cls(request, [*request.prompt, *request.generated])

    @property
    def sequence_id(self) -> SequenceId:
        return self.request.sequence_id

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def max_kv_tokens(self) -> int:
        """Tokens whose KV it can come to hold: the last one sampled is never computed."""
        if self.request.run_until is RunUntil.FIRST_TOKEN:
            return len(self.tokens)
        return len(self.request.prompt) + self.request.sampling.max_tokens - 1

    def hold(self, blocks: list[BlockId]) -> None:
        self.blocks = blocks
        self.block_table = np.array(blocks, np.int64)

    def slots(self, token_start: int, token_end: int, block_size: int) -> np.ndarray:
        """[token_end - token_start] int64: where the KV of these tokens lies, block * block_size + offset."""
        positions = np.arange(token_start, token_end)
        return self.block_table[positions // block_size] * block_size + positions % block_size

    def banned_tokens(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """What must not be sampled next: the tokens that would end it, before `min_tokens`."""
        sampling = self.request.sampling
        if self.num_generated >= sampling.min_tokens:
            return frozenset()
        return sampling.stop_token_ids if sampling.ignore_eos else sampling.stop_token_ids | eos_token_ids

    def finish_reason(self, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Why the last token ends the sequence, or None. `min_tokens` is kept by the sampler's bans."""
        sampling = self.request.sampling
        last = self.tokens[-1]
        is_stop = last in sampling.stop_token_ids or (not sampling.ignore_eos and last in eos_token_ids)
        if is_stop:
            return FinishReason.STOP
        if self.num_generated >= sampling.max_tokens:
            return FinishReason.LENGTH
        return None
