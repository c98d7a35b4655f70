"""Runs one model on one device, a step at a time. Knows no network and no role."""

import time
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.batch import DecodeRows, KVListener, LayerHook, PrefillRows, ReadyChunk, StepBatch
from engine.block_pool import BlockPool
from engine.kv_cache import KVCache
from engine.model import Model
from engine.request import EngineRequest, FinishReason, InvalidRequest, RunUntil, SequenceId
from engine.sampler import SamplingRow, sample_tokens
from engine.scheduler import Chunk, Scheduler
from engine.sequence import Sequence, SequenceState, StageMarks


class EngineLimits(NamedTuple):
    """What a request and a step are held to. Tokens, but for `max_running`: sequences."""

    max_model_len: int
    step_tokens: int
    max_running: int


@dataclass(frozen=True, slots=True)
class GrantedSequence:
    """`cached_tokens`: its first tokens whose KV is in its blocks already."""

    sequence_id: SequenceId
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class SampledToken:
    """`index`: its place among the sequence's generated tokens."""

    sequence_id: SequenceId
    index: int
    token: int


class EndedSequence(NamedTuple):
    """A sequence that has its end; its blocks are free."""

    sequence_id: SequenceId
    reason: FinishReason
    marks: StageMarks


class HeldSequence(NamedTuple):
    """A sequence that has its first token and keeps its blocks until `Engine.remove`."""

    sequence_id: SequenceId
    first_token: int
    marks: StageMarks


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that the device computes. `tokens`: [num_sampled] int64, on the device."""

    chunks: tuple[Chunk, ...]
    tokens: Tensor
    started: float


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought. Every ended or held sequence's last token is also in `tokens`."""

    tokens: tuple[SampledToken, ...]
    ended: tuple[EndedSequence, ...]
    held: tuple[HeldSequence, ...]
    num_prompt_tokens: int
    duration_s: float


class EngineLoad(NamedTuple):
    """How busy an engine is. The totals count from its start. Cached blocks count as free."""

    num_running: int
    num_waiting: int
    waiting_prompt_tokens: int
    num_blocks: int
    free_blocks: int
    computed_prompt_tokens: int
    generated_tokens: int
    num_preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int


class Engine:
    """The sequences of one model on one device. One thread owns it; no method may be called from another.

    A sequence waits for blocks (`admit` gives them, oldest first), then runs, a step being `launch` and
    `collect`, until it ends, is held, or is removed. One whose KV comes by hand-off gets its
    blocks, is filled by `import_kv`, and runs from `begin_decode` on.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        eos_token_ids: frozenset[int],
        limits: EngineLimits,
        listener: KVListener | None = None,
    ) -> None:
        self.layout = cache.layout
        self.limits = limits
        self._model = model
        self._cache = cache
        self._eos = eos_token_ids
        self._listener = listener
        self._pool = BlockPool(cache.num_blocks)
        self._scheduler = Scheduler(
            self._pool,
            block_size=self.layout.block_size,
            step_tokens=limits.step_tokens,
            max_running=limits.max_running,
        )
        self._sequences: dict[SequenceId, Sequence] = {}
        self._computed_prompt_tokens = 0
        self._generated_tokens = 0

    def submit(self, request: EngineRequest) -> None:
        """Queues a request.

        Raises:
            InvalidRequest: it can never run here.
        """
        sequence = Sequence.of(request, time.monotonic())
        self._validate(sequence)
        self._sequences[request.sequence_id] = sequence
        self._scheduler.add(sequence)

    def _validate(self, sequence: Sequence) -> None:
        request, limits = sequence.request, self.limits
        if request.sequence_id in self._sequences:
            raise InvalidRequest(f"sequence {request.sequence_id} exists already")
        if not request.prompt:
            raise InvalidRequest("prompt: at least one token")
        if min(sequence.tokens) < 0 or max(sequence.tokens) >= self._model.vocab_size:
            raise InvalidRequest(f"prompt: token ids go from 0 to {self._model.vocab_size - 1}")
        if request.sampling.max_tokens <= sequence.num_generated:
            raise InvalidRequest(f"max_tokens: more than the {sequence.num_generated} generated already")
        total = len(request.prompt) + request.sampling.max_tokens
        if total > limits.max_model_len:
            raise InvalidRequest(
                f"max_tokens: prompt ({len(request.prompt)}) and max_tokens ({request.sampling.max_tokens}) "
                f"add up to {total}, the model's limit is {limits.max_model_len}"
            )
        needed = self._scheduler.blocks_for(sequence.max_kv_tokens)
        if needed > self._pool.num_blocks:
            raise InvalidRequest(
                f"max_tokens: prompt and output need {needed} KV blocks, there are {self._pool.num_blocks}"
            )

    def admit(self) -> list[GrantedSequence]:
        """Gives blocks to waiting sequences; returns those whose KV may now be imported."""
        admitted = self._scheduler.admit()
        for sequence in admitted:
            self._export_cached(sequence)
        return [
            GrantedSequence(s.sequence_id, s.num_cached)
            for s in admitted
            if s.state is SequenceState.IMPORTING
        ]

    def _export_cached(self, sequence: Sequence) -> None:
        """Tells the listener of KV that leaves this engine and was there before the sequence."""
        start, end = sequence.request.export_from, sequence.num_cached
        listener = self._listener
        if listener is None or sequence.request.run_until is not RunUntil.FIRST_TOKEN or start >= end:
            return
        slots = torch.from_numpy(sequence.slots(start, end, self.layout.block_size)).to(self._cache.device)
        ready = [ReadyChunk(sequence.sequence_id, 0, start, end)]
        for layer, tensors in enumerate(self.layout.layers):
            cached = tuple(self._cache.gather(layer, index, slots) for index in range(len(tensors)))
            listener.on_layer(layer, cached, ready)

    def remove(self, sequence_id: SequenceId) -> bool:
        """Cancels a sequence or lets a held one go, and frees its blocks. False: there is none."""
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is None:
            return False
        self._scheduler.remove(sequence)
        return True

    def import_kv(
        self, sequence_id: SequenceId, layer: int, tensor: int, token_start: int, data: Tensor
    ) -> bool:
        """Writes KV of tokens from `token_start` on into an importing sequence's blocks.

        Args:
            tensor: its place in the layer's layout.
            data: [num_tokens, num_heads, head_dim].

        Returns:
            False: the sequence is gone, nothing was written.

        Raises:
            ValueError: the tokens go beyond the sequence's.
        """
        sequence = self._sequences.get(sequence_id)
        if sequence is None or sequence.state is not SequenceState.IMPORTING:
            return False
        token_end = token_start + data.shape[0]
        if token_end > len(sequence.tokens):
            raise ValueError(f"KV of tokens up to {token_end} for a prompt of {len(sequence.tokens)}")
        slots = torch.from_numpy(sequence.slots(token_start, token_end, self.layout.block_size))
        self._cache.scatter(layer, tensor, slots.to(self._cache.device), data.to(self._cache.device))
        return True

    def begin_decode(self, sequence_id: SequenceId, first_token: int) -> FinishReason | None:
        """All KV of an importing sequence has arrived: it runs from its first token on.

        Returns:
            Why that token already ends it, or None. An ended sequence's blocks are free.

        Raises:
            KeyError: the sequence is gone or does not import.
        """
        sequence = self._sequences[sequence_id]
        if sequence.state is not SequenceState.IMPORTING:
            raise KeyError(sequence_id)
        self._scheduler.book_computed(sequence, len(sequence.tokens))
        sequence.tokens.append(first_token)
        sequence.marks.decode_ready = time.monotonic()
        reason = sequence.finish_reason(self._eos)
        if reason is None:
            self._scheduler.run(sequence)
        else:
            self.remove(sequence_id)
        return reason

    def launch(self) -> LaunchedStep | None:
        """Starts a step on the device. None: there is nothing to compute."""
        started = time.monotonic()
        chunks = self._scheduler.next_chunks(started)
        if not chunks:
            return None
        for chunk in chunks:
            marks = chunk.sequence.marks
            if chunk.sequence.num_generated == len(chunk.sequence.request.generated):
                marks.first_chunk = marks.first_chunk or started
            else:
                marks.first_decode = marks.first_decode or started
        with torch.inference_mode():
            logits = self._model.forward(self._batch(chunks), self._cache, self._hook(chunks))
            tokens = sample_tokens(logits, [self._sampling_row(c.sequence) for c in chunks if c.samples])
        return LaunchedStep(tuple(chunks), tokens, started)

    def collect(self, step: LaunchedStep) -> StepResult:
        """Waits for a step and books what it brought. A sequence removed meanwhile is skipped."""
        sampled = iter(step.tokens.tolist())
        ended_at = time.monotonic()
        tokens: list[SampledToken] = []
        ended: list[EndedSequence] = []
        held: list[HeldSequence] = []
        num_prompt_tokens = 0
        for chunk in step.chunks:
            sequence = chunk.sequence
            token = next(sampled) if chunk.samples else None
            num_prompt_tokens += max(
                0, min(chunk.token_end, len(sequence.request.prompt)) - chunk.token_start
            )
            if sequence.sequence_id not in self._sequences:
                continue
            self._scheduler.book_computed(sequence, chunk.token_end)
            if token is None:
                continue
            tokens.append(SampledToken(sequence.sequence_id, sequence.num_generated, token))
            self._book_token(sequence, token, ended_at, ended, held)
        if num_prompt_tokens:
            self._scheduler.book_prefill(num_prompt_tokens, ended_at - step.started)
        self._computed_prompt_tokens += num_prompt_tokens
        self._generated_tokens += len(tokens)
        return StepResult(
            tuple(tokens), tuple(ended), tuple(held), num_prompt_tokens, ended_at - step.started
        )

    def _book_token(
        self,
        sequence: Sequence,
        token: int,
        now: float,
        ended: list[EndedSequence],
        held: list[HeldSequence],
    ) -> None:
        marks = sequence.marks
        sequence.tokens.append(token)
        marks.last_token = now
        if not marks.decode_ready:
            marks.first_token = marks.decode_ready = now
        reason = sequence.finish_reason(self._eos)
        if reason is not None:
            self.remove(sequence.sequence_id)
            ended.append(EndedSequence(sequence.sequence_id, reason, marks))
        elif sequence.request.run_until is RunUntil.FIRST_TOKEN:
            self._scheduler.pause(sequence)
            held.append(HeldSequence(sequence.sequence_id, token, marks))

    def _sampling_row(self, sequence: Sequence) -> SamplingRow:
        request = sequence.request
        banned = sequence.banned_tokens(self._eos)
        return SamplingRow(request.sampling, request.sample, sequence.num_generated, banned)

    def _hook(self, chunks: Rows[Chunk]) -> LayerHook | None:
        """Tells the listener of the chunks whose KV leaves this engine."""
        listener = self._listener
        ready = []
        first_row = 0
        for chunk in chunks:
            request = chunk.sequence.request
            start = max(chunk.token_start, request.export_from)
            if request.run_until is RunUntil.FIRST_TOKEN and start < chunk.token_end:
                row = first_row + start - chunk.token_start
                ready.append(ReadyChunk(request.sequence_id, row, start, chunk.token_end))
            first_row += chunk.num_tokens
        if listener is None or not ready:
            return None
        return lambda layer, tensors: listener.on_layer(layer, tensors, ready)

    def _batch(self, chunks: Rows[Chunk]) -> StepBatch:
        """The tensors of a step; `chunks` has its single tokens first."""
        device = self._cache.device
        block_size = self.layout.block_size
        num_decode = sum(chunk.num_tokens == 1 for chunk in chunks)
        token_ids = [t for c in chunks for t in c.sequence.tokens[c.token_start : c.token_end]]
        positions = np.concatenate([np.arange(c.token_start, c.token_end) for c in chunks])
        slots = np.concatenate([c.sequence.slots(c.token_start, c.token_end, block_size) for c in chunks])
        ends = np.cumsum([c.num_tokens for c in chunks])
        sampled = [end - 1 for chunk, end in zip(chunks, ends, strict=True) if chunk.samples]
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
            decode=self._decode_rows(chunks[:num_decode]) if num_decode else None,
            prefill=prefill,
            sampled_rows=torch.tensor(np.array(sampled, np.int64), device=device),
        )

    def _decode_rows(self, chunks: Rows[Chunk]) -> DecodeRows:
        block_size, device = self.layout.block_size, self._cache.device
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

    def load(self) -> EngineLoad:
        return EngineLoad(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            waiting_prompt_tokens=self._scheduler.waiting_prompt_tokens(),
            num_blocks=self._pool.num_blocks,
            free_blocks=self._pool.num_available,
            computed_prompt_tokens=self._computed_prompt_tokens,
            generated_tokens=self._generated_tokens,
            num_preemptions=self._scheduler.num_preemptions,
            prefix_query_tokens=self._scheduler.prefix_query_tokens,
            prefix_hit_tokens=self._scheduler.prefix_hit_tokens,
        )

    def check_integrity(self) -> None:
        """Raises:
        IntegrityError: the books of blocks and sequences do not agree.
        """
        self._scheduler.check_integrity()
