import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_pool import BlockPool
from engine.request import EngineRequest, KVSource, RunUntil, SamplingParams, SequenceId
from engine.scheduler import Scheduler
from engine.sequence import Sequence, SequenceState

BLOCK_SIZE = 4


def sequence(name: str, prompt: int, output: int = 1, age: float = 0, **fields) -> Sequence:
    request = EngineRequest(
        sequence_id=SequenceId(name),
        prompt=tuple(range(prompt)),
        sampling=SamplingParams(max_tokens=output),
        arrival_s=age,
        **fields,
    )
    return Sequence.of(request)


def scheduler(num_blocks: int = 100, step_tokens: int = 16, max_running: int = 100) -> Scheduler:
    return Scheduler(
        BlockPool(num_blocks), block_size=BLOCK_SIZE, step_tokens=step_tokens, max_running=max_running
    )


def take_step(scheduler: Scheduler) -> list[tuple[str, int, int]]:
    """Computes the next step's tokens; a sequence that samples gets token 0."""
    chunks = scheduler.next_chunks()
    for chunk in chunks:
        samples = chunk.samples
        chunk.sequence.num_computed = chunk.token_end
        if samples:
            chunk.sequence.tokens.append(0)
    return [(c.sequence.sequence_id, c.token_start, c.token_end) for c in chunks]


def test_a_prompt_is_computed_in_chunks_of_the_budget():
    s = scheduler(step_tokens=16)
    s.add(sequence("a", prompt=40, output=3))
    s.admit()
    assert take_step(s) == [("a", 0, 16)]
    assert take_step(s) == [("a", 16, 32)]
    assert take_step(s) == [("a", 32, 40)]
    assert take_step(s) == [("a", 40, 41)]


def test_running_sequences_take_part_in_every_step_before_prompts():
    s = scheduler(step_tokens=8)
    s.add(sequence("stream", prompt=1, output=9))
    s.add(sequence("prompt", prompt=20, age=1))
    s.admit()
    assert take_step(s) == [("stream", 0, 1), ("prompt", 0, 7)]
    assert take_step(s) == [("stream", 1, 2), ("prompt", 7, 14)]


def test_several_prompts_share_a_step():
    s = scheduler(step_tokens=16)
    for name in "abc":
        s.add(sequence(name, prompt=6, age=ord(name)))
    s.admit()
    assert take_step(s) == [("a", 0, 6), ("b", 0, 6), ("c", 0, 4)]


def test_no_stream_is_skipped_when_there_are_more_than_the_budget():
    s = scheduler(step_tokens=2)
    for name in "abcd":
        s.add(sequence(name, prompt=1, output=4))
    s.admit()
    assert len(take_step(s)) == 4


def test_rows_of_one_token_come_first_whatever_their_kind():
    s = scheduler(step_tokens=9)
    s.add(sequence("long", prompt=8, output=3))
    s.add(sequence("short", prompt=1, output=3, age=1))
    s.admit()
    assert take_step(s) == [("short", 0, 1), ("long", 0, 8)]


def test_the_oldest_is_admitted_first_and_not_overtaken_when_it_does_not_fit():
    s = scheduler(num_blocks=4)
    s.add(sequence("young", prompt=4, age=3))
    s.add(sequence("large", prompt=12, age=2))
    s.add(sequence("old", prompt=8, age=1))
    assert [x.sequence_id for x in s.admit()] == ["old"]
    assert s.admit() == []


def test_a_removed_sequence_makes_room_for_the_next():
    s = scheduler(num_blocks=3)
    first, second = sequence("a", prompt=12), sequence("b", prompt=12, age=1)
    s.add(first)
    s.add(second)
    s.admit()
    s.remove(first)
    assert s.admit() == [second]


def test_blocks_cover_prompt_and_output_but_the_last_token():
    assert scheduler().blocks_needed(sequence("a", prompt=4, output=1)) == 1
    assert scheduler().blocks_needed(sequence("a", prompt=4, output=2)) == 2
    assert scheduler().blocks_needed(sequence("a", prompt=4, output=100, run_until=RunUntil.FIRST_TOKEN)) == 1


def test_an_importing_sequence_is_in_no_step_until_it_runs():
    s = scheduler()
    imported = sequence("a", prompt=8, output=5, kv_source=KVSource.HANDOFF)
    s.add(imported)
    assert s.admit() == [imported]
    assert imported.state is SequenceState.IMPORTING
    assert s.next_chunks() == []
    imported.num_computed = 8
    imported.tokens.append(1)
    s.run(imported)
    assert take_step(s) == [("a", 8, 9)]


@pytest.mark.parametrize("limit", [1, 3])
def test_no_more_sequences_hold_blocks_than_the_limit(limit):
    s = scheduler(max_running=limit)
    for name in "abcdef":
        s.add(sequence(name, prompt=4))
    assert len(s.admit()) == limit


class AnyHistory(RuleBasedStateMachine):
    """Arrivals, steps, hand-offs, holds and cancels in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = scheduler(num_blocks=12, step_tokens=7, max_running=4)
        self.live: list[Sequence] = []
        self.count = 0

    @rule(
        prompt=st.integers(1, 20),
        output=st.integers(1, 12),
        part=st.sampled_from(
            [
                {},
                {"kv_source": KVSource.HANDOFF},
                {"run_until": RunUntil.FIRST_TOKEN},
            ]
        ),
    )
    def arrive(self, prompt, output, part):
        new = sequence(f"s{self.count}", prompt, output, age=self.count, **part)
        self.count += 1
        self.scheduler.add(new)
        self.live.append(new)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 100))
    def cancel(self, which):
        self.scheduler.remove(self.live.pop(which % len(self.live)))

    @rule()
    def complete_imports(self):
        for s in [s for s in self.live if s.state is SequenceState.IMPORTING]:
            s.num_computed = len(s.tokens)
            s.tokens.append(0)
            if s.request.sampling.max_tokens == 1:
                self.scheduler.remove(s)
                self.live.remove(s)
            else:
                self.scheduler.run(s)

    @rule()
    def step(self):
        self.scheduler.admit()
        streams = [s for s in self.live if s.state is SequenceState.RUNNING and s.num_uncomputed == 1]
        chunks = self.scheduler.next_chunks()
        assert {id(s) for s in streams} <= {id(c.sequence) for c in chunks}
        assert sum(c.num_tokens for c in chunks) <= max(7, len(streams))
        for chunk in chunks:
            s, samples = chunk.sequence, chunk.samples
            assert len(s.blocks) * BLOCK_SIZE >= chunk.token_end
            s.num_computed = chunk.token_end
            if not samples:
                continue
            s.tokens.append(0)
            if s.num_generated >= s.request.sampling.max_tokens:
                self.scheduler.remove(s)
                self.live.remove(s)
            elif s.request.run_until is RunUntil.FIRST_TOKEN:
                self.scheduler.pause(s)

    @invariant()
    def books_agree(self):
        self.scheduler.check_integrity()

    @invariant()
    def something_runs_when_it_could(self):
        self.scheduler.admit()
        if self.live and self.scheduler.num_admitted == 0:
            raise AssertionError("sequences wait though no other holds a block")


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
