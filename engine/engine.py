"""Runs one model on one device, a step at a time. Knows no network and no role."""

import time
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from engine.batch import KVListener, LayerHook
from engine.block_hash import BlockHash
from engine.block_pool import BlockPool, CacheChanges
from engine.kv_cache import KVCache
from engine.kv_layout import KVLayout
from engine.kv_wire import KVPlace, KVWire, Packed, kv_wire
from engine.logprobs import LogprobTensors, TokenLogprobs
from engine.model import Model
from engine.prompt_rows import PromptRows, book_prompt_logprobs, prompt_logprobs, prompt_rows, rows_of
from engine.request import EngineRequest, InvalidRequest, RunUntil, SequenceId
from engine.sampler import Sampled, SamplingRow, sample_rows
from engine.scheduler import Chunk, Scheduler
from engine.sequence import Sequence, SequenceState
from engine.step_result import (
    EndedSequence,
    EngineLoad,
    GrantedSequence,
    HeldSequence,
    SampledToken,
    StepResult,
)
from engine.step_tensors import step_batch


class EngineLimits(NamedTuple):
    """What a request and a step are held to. Tokens, but for `max_running`: sequences."""

    max_model_len: int
    step_tokens: int
    max_running: int
    local_prefill_step_tokens: int


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that the device computes."""

    chunks: tuple[Chunk, ...]
    sampled: Sampled
    prompt_rows: tuple[PromptRows, ...]
    prompt_logprobs: LogprobTensors | None
    started: float


@dataclass(slots=True)
class _Booking:
    """Gathers what a step brought."""

    tokens: list[SampledToken] = field(default_factory=list)
    ended: list[EndedSequence] = field(default_factory=list)
    held: list[HeldSequence] = field(default_factory=list)


class Engine:
    """The sequences of one model on one device. One thread owns it; no method may be called from another.

    A request waits for blocks (`admit` gives them), then runs, a step being `launch` and `collect`, until it
    ends, is held, or is removed. It is one sequence until its first tokens are sampled, then one for
    each sample. One whose KV comes by hand-off gets its blocks, is filled by `import_kv`, and runs from
    `begin_decode` on.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        eos_token_ids: frozenset[int],
        limits: EngineLimits,
        listener: KVListener | None = None,
        wire_layout: KVLayout | None = None,
    ) -> None:
        """`wire_layout`: in which the listener gets K and V; None: the cache's."""
        self.layout = cache.layout
        self.wire_layout = wire_layout or cache.layout
        self.device = cache.device
        self.limits = limits
        self.vocab_size = model.vocab_size
        self.eos_token_ids = eos_token_ids
        self._model = model
        self._cache = cache
        self._eos = eos_token_ids
        self._listener = listener
        self._own_wire = kv_wire(cache, cache.layout)
        self._export_wire = self.wire(self.wire_layout)
        self._pool = BlockPool(cache.num_blocks)
        self._scheduler = Scheduler(
            self._pool,
            block_size=self.layout.block_size,
            step_tokens=limits.step_tokens,
            max_running=limits.max_running,
            local_prefill_step_tokens=limits.local_prefill_step_tokens,
        )
        # The samples of each request that have no end yet.
        self._sequences: dict[SequenceId, list[Sequence]] = {}
        self._computed_prompt_tokens = 0
        self._generated_tokens = 0

    def submit(self, request: EngineRequest) -> None:
        """Queues a request.

        Raises:
            InvalidRequest: it can never run here.
        """
        sequence = Sequence.of(request, time.monotonic())
        self._validate(sequence)
        self._sequences[request.sequence_id] = [sequence]
        self._scheduler.add(sequence)

    def _validate(self, sequence: Sequence) -> None:
        request, limits = sequence.request, self.limits
        if request.sequence_id in self._sequences:
            raise InvalidRequest(f"sequence {request.sequence_id} exists already")
        if not request.prompt:
            raise InvalidRequest("prompt: at least one token")
        if min(sequence.tokens) < 0 or max(sequence.tokens) >= self._model.vocab_size:
            raise InvalidRequest(f"prompt: token ids go from 0 to {self._model.vocab_size - 1}")
        self._validate_sampling(sequence)
        if request.sampling.n > 1 and request.generated:
            raise InvalidRequest("n: each sample is continued by itself")
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

    def _validate_sampling(self, sequence: Sequence) -> None:
        sampling, last = sequence.request.sampling, self._model.vocab_size - 1
        if any(not 0 <= token <= last for token, _ in sampling.logit_bias):
            raise InvalidRequest(f"logit_bias: token ids go from 0 to {last}")
        if any(not 0 <= token <= last for token in sampling.stop_token_ids):
            raise InvalidRequest(f"stop_token_ids: token ids go from 0 to {last}")
        state = sequence.sampling_state()
        if state is not None and state.matcher is not None and not state.matcher.fits:
            raise InvalidRequest("generated: the tokens are not what response_format allows")

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
        place = self._export_wire.at(sequence.block_table, start, end)
        for layer in range(len(self.layout.layers)):
            listener.on_layer(sequence.sequence_id, layer, start, end, place.pack(layer))

    def remove(self, sequence_id: SequenceId) -> bool:
        """Cancels a request or lets a held one go, and frees its blocks. False: there is none."""
        samples = self._sequences.pop(sequence_id, [])
        for sequence in samples:
            self._scheduler.remove(sequence)
        return bool(samples)

    def wire(self, layout: KVLayout) -> KVWire:
        """For `import_kv`. May be called from anywhere.

        Args:
            layout: in which KV comes.
        """
        return self._own_wire if layout == self.layout else kv_wire(self._cache, layout)

    def import_kv(
        self,
        sequence_id: SequenceId,
        wire: KVWire,
        layer: int,
        token_start: int,
        token_end: int,
        packed: Packed,
    ) -> bool:
        """Writes a layer's KV of tokens [token_start, token_end) into an importing sequence's blocks.

        Args:
            packed: see engine.kv_wire.

        Returns:
            False: the sequence is gone, nothing was written.

        Raises:
            ValueError: the tokens go beyond the sequence's, or the bytes do not fit the layout.
        """
        sequence = self._importing(sequence_id)
        if sequence is None:
            return False
        if token_end > len(sequence.tokens):
            raise ValueError(f"KV of tokens up to {token_end} for a prompt of {len(sequence.tokens)}")
        wire.at(sequence.block_table, token_start, token_end).unpack(layer, packed)
        return True

    def wait_for_device(self) -> None:
        """Returns when the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _importing(self, sequence_id: SequenceId) -> Sequence | None:
        samples = self._sequences.get(sequence_id, [])
        return next((s for s in samples if s.state is SequenceState.IMPORTING), None)

    def begin_decode(self, sequence_id: SequenceId, first_tokens: Rows[int]) -> list[EndedSequence]:
        """All KV of an importing sequence has arrived: each sample runs from its first token on.

        Returns:
            The samples that their first token already ends.

        Raises:
            KeyError: the sequence is gone or does not import.
            ValueError: there are not as many tokens as samples.
        """
        sequence = self._importing(sequence_id)
        if sequence is None:
            raise KeyError(sequence_id)
        if len(first_tokens) != sequence.num_samples:
            raise ValueError(f"{len(first_tokens)} first tokens for {sequence.num_samples} samples")
        self._scheduler.book_computed(sequence, len(sequence.tokens))
        self._scheduler.run(sequence)
        booking = _Booking()
        for each, token in zip(self._fork(sequence), first_tokens, strict=True):
            each.marks.decode_ready = time.monotonic()
            self._book_token(each, token, booking)
        return booking.ended

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
        asked = prompt_rows(chunks)
        wanted = [*_sampled_rows(chunks), *rows_of(asked)]
        rows = [row for chunk in chunks if chunk.samples for row in self._sampling_rows(chunk.sequence)]
        with torch.inference_mode():
            for source, target in self._scheduler.take_copies():
                self._cache.copy_block(source, target)
            batch = step_batch(chunks, wanted, self.layout.block_size, self._cache.device)
            logits = self._model.forward(batch, self._cache, self._hook(chunks))
            of_prompts = prompt_logprobs(logits[len(rows) :], asked)
            sampled = sample_rows(logits[: len(rows)], rows)
        return LaunchedStep(tuple(chunks), sampled, asked, of_prompts, started)

    def collect(self, step: LaunchedStep) -> StepResult:
        """Waits for a step and books what it brought. A sequence removed meanwhile is skipped."""
        sampled = iter(step.sampled.read())
        now = time.monotonic()
        booking = _Booking()
        num_prompt_tokens = 0
        for chunk in step.chunks:
            sequence = chunk.sequence
            drawn = [next(sampled) for _ in range(sequence.num_samples)] if chunk.samples else []
            num_prompt_tokens += max(
                0, min(chunk.token_end, len(sequence.request.prompt)) - chunk.token_start
            )
            if sequence not in self._sequences.get(sequence.sequence_id, []):
                continue
            self._scheduler.book_computed(sequence, chunk.token_end)
            if drawn:
                self._book_drawn(sequence, drawn, now, booking)
        if num_prompt_tokens:
            self._scheduler.book_prefill(num_prompt_tokens, now - step.started)
        self._computed_prompt_tokens += num_prompt_tokens
        self._generated_tokens += len(booking.tokens)
        return StepResult(
            tuple(booking.tokens),
            tuple(booking.ended),
            tuple(booking.held),
            book_prompt_logprobs(step.prompt_rows, step.prompt_logprobs),
            num_prompt_tokens,
            now - step.started,
        )

    def _book_drawn(
        self,
        sequence: Sequence,
        drawn: Rows[tuple[int, TokenLogprobs | None]],
        now: float,
        booking: _Booking,
    ) -> None:
        """Books the next token of a sequence, or the first ones of all its samples."""
        marks = sequence.marks
        marks.last_token = now
        if not marks.decode_ready:
            marks.first_token = marks.decode_ready = now
        index = sequence.num_generated
        for sample, (token, logprobs) in enumerate(drawn, start=sequence.sample):
            booking.tokens.append(SampledToken(sequence.sequence_id, sample, index, token, logprobs))
        tokens = tuple(token for token, _ in drawn)
        goes_on = any(sequence.end_with(token, self._eos) is None for token in tokens)
        if sequence.request.run_until is RunUntil.FIRST_TOKEN and goes_on:
            # The receiver makes the samples, also of those whose first token is their last.
            self._scheduler.pause(sequence)
            booking.held.append(HeldSequence(sequence.sequence_id, tokens, marks, sequence.num_cached))
            return
        for each, token in zip(self._fork(sequence), tokens, strict=True):
            self._book_token(each, token, booking)

    def _fork(self, sequence: Sequence) -> list[Sequence]:
        """A sequence for each sample, all over the same blocks, if there is only one for all of them."""
        forks = [sequence.fork(offset) for offset in range(1, sequence.num_samples)]
        sequence.num_samples = 1
        for fork in forks:
            self._scheduler.share(sequence, fork)
        self._sequences[sequence.sequence_id] += forks
        return [sequence, *forks]

    def _book_token(self, sequence: Sequence, token: int, booking: _Booking) -> None:
        reason = sequence.end_with(token, self._eos)
        sequence.tokens.append(token)
        if reason is None:
            return
        self._scheduler.remove(sequence)
        samples = self._sequences[sequence.sequence_id]
        samples.remove(sequence)
        if not samples:
            del self._sequences[sequence.sequence_id]
        booking.ended.append(
            EndedSequence(
                sequence.sequence_id,
                sequence.sample,
                reason,
                not samples,
                sequence.marks,
                min(sequence.num_cached, len(sequence.request.prompt)),
            )
        )

    def _sampling_rows(self, sequence: Sequence) -> list[SamplingRow]:
        params, index = sequence.request.sampling, sequence.num_generated
        banned = sequence.banned_tokens(self._eos)
        return [
            SamplingRow(params, sequence.sample + offset, index, banned, sequence.sampling_state())
            for offset in range(sequence.num_samples)
        ]

    def _hook(self, chunks: Rows[Chunk]) -> LayerHook | None:
        """Tells the listener of the chunks whose KV leaves this engine."""
        listener = self._listener
        ready: list[tuple[SequenceId, int, int, KVPlace]] = []
        for chunk in chunks:
            request = chunk.sequence.request
            start = max(chunk.token_start, request.export_from)
            if request.run_until is RunUntil.FIRST_TOKEN and start < chunk.token_end:
                place = self._export_wire.at(chunk.sequence.block_table, start, chunk.token_end)
                ready.append((request.sequence_id, start, chunk.token_end, place))
        if listener is None or not ready:
            return None

        def hook(layer: int) -> None:
            for sequence_id, start, end, place in ready:
                listener.on_layer(sequence_id, layer, start, end, place.pack(layer))

        return hook

    def cached_names(self) -> tuple[BlockHash, ...]:
        """The full blocks that a prefix lookup finds."""
        return self._pool.names()

    def take_cache_changes(self) -> CacheChanges:
        """What changed of `cached_names` since the last call."""
        return self._pool.take_changes()

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


def _sampled_rows(chunks: Rows[Chunk]) -> list[int]:
    """The last row of each chunk that samples, once for each sample."""
    rows: list[int] = []
    end = 0
    for chunk in chunks:
        end += chunk.num_tokens
        if chunk.samples:
            rows += [end - 1] * chunk.sequence.num_samples
    return rows
