"""A request while an engine has it."""

from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np

from engine.block_hash import BlockHash
from engine.block_pool import BlockId
from engine.logprobs import PromptLogprobs
from engine.request import EngineRequest, FinishReason, KVSource, RunUntil, SequenceId
from engine.sampling_state import SamplingState


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
    """One sample of a request, its tokens so far, and the blocks with the KV of the first `num_computed`.

    Attributes:
        queued: when it began to wait for its first chunk, `time.monotonic()` seconds.
        kv_source: the request's, until the sequence gives up its blocks: then it computes for itself.
        num_cached: tokens whose KV was there when it was admitted.
        num_published: of `blocks`, those that answer prefix lookups or whose content others answer for.
        hashes: the names of the full blocks of `tokens`, as far as they were needed.
        num_samples: of the request, as long as this sequence stands for all of them; then 1.
        prompt_logprobs: gathered until they are told; None when nobody asked or they were told.
    """

    request: EngineRequest
    tokens: list[int]
    sample: int
    kv_source: KVSource
    queued: float
    num_samples: int = 1
    num_computed: int = 0
    num_cached: int = 0
    num_published: int = 0
    num_preemptions: int = 0
    state: SequenceState = SequenceState.WAITING
    blocks: list[BlockId] = field(default_factory=list)
    # The same as `blocks`, int64, as the tensors of a step are cut from it.
    block_table: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    hashes: list[BlockHash] = field(default_factory=list)
    marks: StageMarks = field(default_factory=StageMarks)
    prompt_logprobs: PromptLogprobs | None = None
    _sampling_state: SamplingState | None = field(default=None, init=False)

    @classmethod
    def of(cls, request: EngineRequest, now: float) -> "Sequence":
        return cls(
            request=request,
            tokens=[*request.prompt, *request.generated],
            sample=request.sample,
            kv_source=request.kv_source,
            queued=now,
            num_samples=request.sampling.n,
            prompt_logprobs=_asked_prompt_logprobs(request),
        )

    def fork(self, offset: int) -> "Sequence":
        """The sample that many after this one: the same tokens so far. It holds no blocks yet."""
        return replace(
            self,
            tokens=[*self.tokens],
            sample=self.sample + offset,
            num_samples=1,
            state=SequenceState.WAITING,
            blocks=[],
            hashes=[*self.hashes],
            marks=replace(self.marks),
            prompt_logprobs=None,
        )

    def age(self) -> tuple[float, SequenceId, int]:
        """Smaller is older."""
        return self.request.arrival_s, self.sequence_id, self.sample

    def admission_order(self) -> tuple[bool, float, SequenceId, int]:
        """Smaller is admitted first: what gave up its blocks comes before what never had any."""
        return (self.num_preemptions == 0, *self.age())

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

    @property
    def may_give_way(self) -> bool:
        """Whether its blocks may be taken: it runs, and nobody else reads them."""
        return self.state is SequenceState.RUNNING and self.request.run_until is RunUntil.END

    def hold(self, blocks: list[BlockId]) -> None:
        self.blocks = blocks
        self.block_table = np.array(blocks, np.int64)

    def slots(self, token_start: int, token_end: int, block_size: int) -> np.ndarray:
        """[token_end - token_start] int64: where the KV of these tokens lies, block * block_size + offset."""
        positions = np.arange(token_start, token_end)
        return self.block_table[positions // block_size] * block_size + positions % block_size

    def sampling_state(self) -> SamplingState | None:
        """After all `tokens`; None when neither penalties nor a grammar were asked for."""
        if self._sampling_state is None and SamplingState.is_needed(self.request):
            self._sampling_state = SamplingState(self.request)
        if self._sampling_state is not None:
            self._sampling_state.catch_up(self.tokens)
        return self._sampling_state

    def banned_tokens(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """What must not be sampled next: the tokens that would end it, before `min_tokens`.

        A grammar's text ends when it can only end, also if the model's own end is ignored: it is put off.
        """
        sampling = self.request.sampling
        ignored = eos_token_ids if sampling.ignore_eos and self.request.grammar is not None else frozenset()
        if self.num_generated >= sampling.min_tokens:
            return ignored
        ends = frozenset() if sampling.ignore_eos else eos_token_ids
        return sampling.stop_token_ids | ends | ignored

    def end_with(self, token: int, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Why `token`, as the next one, would end the sequence, or None.

        `min_tokens` is kept by the sampler's bans.
        """
        sampling = self.request.sampling
        heeds_eos = not sampling.ignore_eos or self.request.grammar is not None
        if token in sampling.stop_token_ids or (heeds_eos and token in eos_token_ids):
            return FinishReason.STOP
        if self.num_generated + 1 >= sampling.max_tokens:
            return FinishReason.LENGTH
        return None


def _asked_prompt_logprobs(request: EngineRequest) -> PromptLogprobs | None:
    """Whoever computes the prompt first tells them: not the receiver of a hand-off."""
    count = request.sampling.prompt_logprobs
    if count is None or request.kv_source is KVSource.HANDOFF:
        return None
    return PromptLogprobs(len(request.prompt), count)
