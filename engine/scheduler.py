"""Which sequences hold blocks, and which tokens the next step computes."""

from bisect import bisect_left, insort
from typing import NamedTuple

from engine.block_hash import BlockHash, extend_hashes
from engine.block_pool import BlockId, BlockPool, IntegrityError
from engine.prefill_order import response_ratio
from engine.request import KVSource
from engine.sequence import Sequence, SequenceState

# Prompt tokens a second, before a step has measured it, and the weight of the newest measurement.
_FIRST_PREFILL_RATE, _RATE_GAIN = 1000.0, 0.2


class Chunk(NamedTuple):
    """Tokens [token_start, token_end) of a sequence, to be computed in one step."""

    sequence: Sequence
    token_start: int
    token_end: int

    @property
    def num_tokens(self) -> int:
        return self.token_end - self.token_start

    @property
    def samples(self) -> bool:
        """Whether the step gives the sequence its next token."""
        return self.token_end == len(self.sequence.tokens)


class Scheduler:
    """One rule for every step: a token of each running sequence, then chunks of prompts.

    A sequence is admitted with blocks for the tokens that it has, and gets one more whenever the last is
    full. When none is left, the youngest gives its blocks up and waits to be continued from its tokens; the
    oldest never does, so somebody always finishes. What waits is admitted oldest first, those that gave
    up their blocks before all others, and none overtakes the next: a large one is not starved.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        step_tokens: int,
        max_running: int,
        local_prefill_step_tokens: int,
    ) -> None:
        """
        Args:
            step_tokens: the budget of a step.
            local_prefill_step_tokens: of it, for prompts in a step in which streams decode.
        """
        self.num_preemptions = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self._prefill_rate = _FIRST_PREFILL_RATE
        self._pool = pool
        self._block_size = block_size
        self._step_tokens = step_tokens
        self._local_prefill_step_tokens = local_prefill_step_tokens
        self._max_running = max_running
        self._waiting: list[Sequence] = []
        # All that hold blocks.
        self._admitted: set[Sequence] = set()
        # Of those, the ones with tokens to compute, oldest first.
        self._running: list[Sequence] = []
        self._copies: list[tuple[BlockId, BlockId]] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_admitted(self) -> int:
        return len(self._admitted)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def add(self, sequence: Sequence) -> None:
        insort(self._waiting, sequence, key=Sequence.admission_order)

    def admit(self) -> list[Sequence]:
        """Gives waiting sequences their blocks, in order, as long as there is room for the next."""
        admitted = []
        while self._waiting and len(self._admitted) < self._max_running:
            sequence = self._waiting[0]
            if not self._give_blocks(sequence):
                break
            del self._waiting[0]
            self._admitted.add(sequence)
            if sequence.kv_source is KVSource.HANDOFF:
                sequence.state = SequenceState.IMPORTING
            else:
                self.run(sequence)
            admitted.append(sequence)
        return admitted

    def _give_blocks(self, sequence: Sequence) -> bool:
        """Shares the blocks that hold its first tokens already, and takes the others. False: no room.

        What runs keeps a reserve of a block each to grow into: without it a newcomer would be the next to
        give its blocks up again.
        """
        hits = self._pool.find(self._names_to_find(sequence))
        self._pool.hold(hits)
        wanted = self.blocks_for(len(sequence.tokens)) - len(hits)
        if wanted + len(self._running) > self._pool.num_available:
            self._pool.release(hits)
            return False
        sequence.hold([*hits, *self._pool.allocate(wanted)])
        sequence.num_published = len(hits)
        sequence.num_computed = sequence.num_cached = len(hits) * self._block_size
        self.prefix_query_tokens += len(sequence.tokens)
        self.prefix_hit_tokens += sequence.num_cached
        return True

    def _names_to_find(self, sequence: Sequence) -> list[BlockHash]:
        """Not its last token's block, if it computes for itself: that token's logits are wanted."""
        if sequence.request.sampling.prompt_logprobs is not None:
            return []
        extend_hashes(sequence.hashes, sequence.tokens, self._block_size, sequence.request.cache_salt)
        may_be_found = len(sequence.tokens) - (sequence.kv_source is KVSource.COMPUTE)
        return sequence.hashes[: may_be_found // self._block_size]

    def run(self, sequence: Sequence) -> None:
        """Schedules an admitted sequence from the next step on."""
        sequence.state = SequenceState.RUNNING
        insort(self._running, sequence, key=Sequence.age)

    def share(self, sequence: Sequence, fork: Sequence) -> None:
        """Schedules a fork over the blocks of a running sequence. Whoever first writes into one copies it."""
        self._pool.hold(sequence.blocks)
        fork.hold([*sequence.blocks])
        self._admitted.add(fork)
        self.run(fork)

    def take_copies(self) -> list[tuple[BlockId, BlockId]]:
        """Blocks to copy, source and target, in order, before the step that `next_chunks` gave."""
        copies, self._copies = self._copies, []
        return copies

    def pause(self, sequence: Sequence) -> None:
        """Takes a running sequence out of the steps; it keeps its blocks."""
        self._stop_running(sequence)
        sequence.state = SequenceState.HELD

    def remove(self, sequence: Sequence) -> None:
        """Forgets a sequence, in whatever state, and frees its blocks."""
        if sequence.state is SequenceState.WAITING:
            self._waiting.remove(sequence)
        else:
            self._take_blocks(sequence)

    def _take_blocks(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.RUNNING:
            self._stop_running(sequence)
        self._admitted.remove(sequence)
        self._pool.release(sequence.blocks)
        sequence.hold([])
        sequence.num_computed = sequence.num_published = 0

    def _stop_running(self, sequence: Sequence) -> None:
        del self._running[bisect_left(self._running, sequence.age(), key=Sequence.age)]

    def book_computed(self, sequence: Sequence, num_computed: int) -> None:
        """The KV of that many tokens is there; the blocks that are full now answer prefix lookups."""
        sequence.num_computed = num_computed
        num_full = num_computed // self._block_size
        if num_full == sequence.num_published:
            return
        extend_hashes(sequence.hashes, sequence.tokens, self._block_size, sequence.request.cache_salt)
        for index in range(sequence.num_published, num_full):
            self._pool.publish(sequence.blocks[index], sequence.hashes[index])
        sequence.num_published = num_full

    def book_prefill(self, num_tokens: int, duration_s: float) -> None:
        """A step computed that many prompt tokens."""
        self._prefill_rate += _RATE_GAIN * (num_tokens / duration_s - self._prefill_rate)

    def next_chunks(self, now: float) -> list[Chunk]:
        """The next step: rows of single tokens first, then chunks, within the token budget.

        Sequences that decode all take part, whatever the budget: a step never skips a stream, unless
        there is no block for its next token and nobody younger can give one.

        Args:
            now: `time.monotonic()` seconds.
        """
        singles = self._single_tokens()
        prompts = [sequence for sequence in self._running if sequence.num_uncomputed > 1]
        prompts.sort(key=lambda s: -response_ratio(now - s.queued, s.num_uncomputed / self._prefill_rate))
        budget = self._prompt_budget(singles)
        chunks = []
        for sequence in prompts:
            num_tokens = min(budget, sequence.num_uncomputed)
            if num_tokens <= 0:
                break
            chunks.append(Chunk(sequence, sequence.num_computed, sequence.num_computed + num_tokens))
            budget -= num_tokens
        return singles + [c for c in chunks if c.num_tokens == 1] + [c for c in chunks if c.num_tokens > 1]

    def _prompt_budget(self, singles: list[Chunk]) -> int:
        """Streams wait for the prompts of their step: there are few tokens of these."""
        budget = self._step_tokens - len(singles)
        if any(chunk.sequence.num_generated > 0 for chunk in singles):
            return min(budget, self._local_prefill_step_tokens)
        return budget

    def _single_tokens(self) -> list[Chunk]:
        """Oldest first: whoever gives way to an older one is not in the step yet."""
        singles = []
        for sequence in list(self._running):
            if sequence.state is not SequenceState.RUNNING or sequence.num_uncomputed != 1:
                continue
            if self._has_room(sequence):
                singles.append(Chunk(sequence, sequence.num_computed, sequence.num_computed + 1))
        return singles

    def _has_room(self, sequence: Sequence) -> bool:
        """Gives a sequence a block of its own for its next token, if need be at the cost of the youngest."""
        index = sequence.num_computed // self._block_size
        if index < len(sequence.blocks) and not self._pool.is_shared(sequence.blocks[index]):
            return True
        while self._pool.num_available == 0:
            youngest = next((s for s in reversed(self._running) if s.may_give_way), sequence)
            if youngest is self._running[0]:
                # Hand-offs hold the rest, and will end.
                return False
            self._preempt(youngest)
            if youngest is sequence:
                return False
        (block,) = self._pool.allocate(1)
        if index < len(sequence.blocks):
            self._copies.append((sequence.blocks[index], block))
            self._pool.release(sequence.blocks[index : index + 1])
        sequence.hold([*sequence.blocks[:index], block])
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        self._take_blocks(sequence)
        sequence.num_preemptions += 1
        sequence.kv_source = KVSource.COMPUTE
        sequence.state = SequenceState.WAITING
        self.add(sequence)

    def waiting_prompt_tokens(self) -> int:
        """Tokens that are neither computed nor about to come by hand-off, over all sequences."""
        waiting = sum(s.num_uncomputed for s in self._waiting if s.kv_source is KVSource.COMPUTE)
        return waiting + sum(s.num_uncomputed for s in self._running if s.num_uncomputed > 1)

    def check_integrity(self) -> None:
        """
        Raises:
            IntegrityError: a block or a sequence is not where the books say.
        """
        self._pool.check_integrity(sequence.blocks for sequence in self._admitted)
        running = {s for s in self._admitted if s.state is SequenceState.RUNNING}
        if running != set(self._running) or len(running) != len(self._running):
            raise IntegrityError("what runs is not what is scheduled")
        if self._running != sorted(self._running, key=Sequence.age):
            raise IntegrityError("the running sequences are not in order of age")
        for sequence in self._admitted:
            if len(sequence.blocks) * self._block_size < sequence.num_computed:
                raise IntegrityError(f"{sequence.sequence_id} has more KV than blocks")
        if any(s.state is not SequenceState.WAITING or s.blocks for s in self._waiting):
            raise IntegrityError("a waiting sequence holds blocks")
