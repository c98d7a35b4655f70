"""Which sequences hold blocks, and which tokens the next step computes."""

from bisect import insort
from typing import NamedTuple

from engine.block_pool import BlockPool, IntegrityError
from engine.request import KVSource, SequenceId
from engine.sequence import Sequence, SequenceState


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


def _age(sequence: Sequence) -> tuple[float, SequenceId]:
    return sequence.request.arrival_s, sequence.sequence_id


class Scheduler:
    """One rule for every step: a token of each running sequence, then chunks of prompts, oldest first.

    A sequence is admitted with room for all it can ever need, so nothing that runs is ever short of
    blocks. The oldest waiting one is admitted first and none overtakes it: a large one is not starved.
    """

    def __init__(self, pool: BlockPool, *, block_size: int, step_tokens: int, max_running: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._step_tokens = step_tokens
        self._max_running = max_running
        self._waiting: list[Sequence] = []
        self._admitted: dict[SequenceId, Sequence] = {}
        # Of the admitted ones, those with tokens to compute. Ordered by admission.
        self._running: dict[SequenceId, Sequence] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_admitted(self) -> int:
        return len(self._admitted)

    @property
    def has_running(self) -> bool:
        return bool(self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def blocks_needed(self, sequence: Sequence) -> int:
        return -(-sequence.max_kv_tokens // self._block_size)

    def add(self, sequence: Sequence) -> None:
        insort(self._waiting, sequence, key=_age)

    def admit(self) -> list[Sequence]:
        """Gives waiting sequences their blocks, oldest first, as long as there is room for the next."""
        admitted = []
        while self._waiting and len(self._admitted) < self._max_running:
            sequence = self._waiting[0]
            needed = self.blocks_needed(sequence)
            if needed > self._pool.num_free:
                break
            del self._waiting[0]
            sequence.hold(self._pool.allocate(needed))
            self._admitted[sequence.sequence_id] = sequence
            if sequence.request.kv_source is KVSource.HANDOFF:
                sequence.state = SequenceState.IMPORTING
            else:
                self.run(sequence)
            admitted.append(sequence)
        return admitted

    def run(self, sequence: Sequence) -> None:
        """Schedules an admitted sequence from the next step on."""
        sequence.state = SequenceState.RUNNING
        self._running[sequence.sequence_id] = sequence

    def pause(self, sequence: Sequence) -> None:
        """Takes a running sequence out of the steps; it keeps its blocks."""
        del self._running[sequence.sequence_id]
        sequence.state = SequenceState.HELD

    def remove(self, sequence: Sequence) -> None:
        """Forgets a sequence, in whatever state, and frees its blocks."""
        if sequence.state is SequenceState.WAITING:
            self._waiting.remove(sequence)
            return
        del self._admitted[sequence.sequence_id]
        self._running.pop(sequence.sequence_id, None)
        self._pool.release(sequence.blocks)
        sequence.hold([])

    def next_chunks(self) -> list[Chunk]:
        """The next step: rows of single tokens first, then chunks, within the token budget.

        Sequences that decode all take part, whatever the budget: a step never skips a stream.
        """
        singles: list[Chunk] = []
        prompts: list[Sequence] = []
        for sequence in self._running.values():
            if sequence.num_uncomputed == 1:
                singles.append(Chunk(sequence, sequence.num_computed, sequence.num_computed + 1))
            else:
                prompts.append(sequence)
        budget = self._step_tokens - len(singles)
        chunks = []
        for sequence in sorted(prompts, key=_age):
            num_tokens = min(budget, sequence.num_uncomputed)
            if num_tokens <= 0:
                break
            chunks.append(Chunk(sequence, sequence.num_computed, sequence.num_computed + num_tokens))
            budget -= num_tokens
        if not singles and not chunks and prompts:
            raise IntegrityError("sequences run, and a step takes none of them")
        return singles + [c for c in chunks if c.num_tokens == 1] + [c for c in chunks if c.num_tokens > 1]

    def waiting_prompt_tokens(self) -> int:
        """Tokens that are neither computed nor about to come by hand-off, over all sequences."""
        waiting = sum(s.num_uncomputed for s in self._waiting if s.request.kv_source is KVSource.COMPUTE)
        return waiting + sum(s.num_uncomputed for s in self._running.values() if s.num_uncomputed > 1)

    def check_integrity(self) -> None:
        """Raises:
        IntegrityError: a block or a sequence is not where the books say.
        """
        self._pool.check_integrity(sequence.blocks for sequence in self._admitted.values())
        for sequence in self._admitted.values():
            is_running = sequence.sequence_id in self._running
            if is_running != (sequence.state is SequenceState.RUNNING):
                raise IntegrityError(f"{sequence.sequence_id} is {sequence.state} and running: {is_running}")
            if len(sequence.blocks) < -(-sequence.num_computed // self._block_size):
                raise IntegrityError(f"{sequence.sequence_id} has more KV than blocks")
        if any(sequence.state is not SequenceState.WAITING or sequence.blocks for sequence in self._waiting):
            raise IntegrityError("a waiting sequence holds blocks")
