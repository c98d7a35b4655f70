from dataclasses import replace

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
        arrival_s=age,
        **{"sampling": SamplingParams(max_tokens=output), **fields},
    )
    return Sequence.of(request, now=0.0)


def scheduler(
    num_blocks: int = 100,
    step_tokens: int = 16,
    max_running: int = 100,
    local_prefill_step_tokens: int = 1000,
) -> Scheduler:
    return Scheduler(
        BlockPool(num_blocks),
        block_size=BLOCK_SIZE,
        step_tokens=step_tokens,
        max_running=max_running,
        local_prefill_step_tokens=local_prefill_step_tokens,
    )


def take_step(scheduler: Scheduler) -> list[tuple[str, int, int]]:
    """Computes the next step's tokens; a sequence that samples gets token 0."""
    chunks = scheduler.next_chunks(now=0.0)
    for chunk in chunks:
        samples = chunk.samples
        scheduler.book_computed(chunk.sequence, chunk.token_end)
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


def test_prompts_beside_streams_have_a_budget_of_their_own():
    s = scheduler(step_tokens=16, local_prefill_step_tokens=6)
    s.add(sequence("stream", prompt=1, output=4))
    s.add(sequence("prompt", prompt=60, age=1))
    s.admit()
    # The stream's first token is its prompt's.
    assert take_step(s) == [("stream", 0, 1), ("prompt", 0, 15)]
    assert take_step(s) == [("stream", 1, 2), ("prompt", 15, 21)]
    s.remove(next(c.sequence for c in s.next_chunks(now=0.0) if c.sequence.sequence_id == "stream"))
    assert take_step(s) == [("prompt", 21, 37)]


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


def test_a_sequence_gets_a_block_when_it_has_filled_the_last():
    s = scheduler()
    growing = sequence("a", prompt=4, output=9)
    s.add(growing)
    s.admit()
    lengths = []
    for _ in range(9):
        take_step(s)
        lengths.append(len(growing.blocks))
    assert lengths == [1, 2, 2, 2, 2, 3, 3, 3, 3]


def test_the_youngest_gives_its_blocks_to_an_older_one_and_comes_back_first():
    s = scheduler(num_blocks=5)
    old, young, new = sequence("old", 8, 9, age=1), sequence("young", 4, 9, age=2), sequence("new", 4, 9)
    s.add(old)
    s.add(young)
    s.admit()
    for _ in range(5):
        take_step(s)
    assert (len(old.blocks), len(young.blocks)) == (3, 2)
    take_step(s)
    assert (len(old.blocks), young.blocks, young.state) == (4, [], SequenceState.WAITING)
    assert young.num_uncomputed == len(young.tokens) > 4
    s.add(new)
    s.remove(old)
    assert s.admit()[0] is young
    assert s.num_preemptions == 1


def test_the_oldest_never_gives_its_blocks_up():
    s = scheduler(num_blocks=3)
    oldest, importing = sequence("a", 4, 9), sequence("b", 4, 9, age=1, kv_source=KVSource.HANDOFF)
    s.add(oldest)
    s.add(importing)
    s.admit()
    for _ in range(5):
        take_step(s)
    assert take_step(s) == []
    assert oldest.state is SequenceState.RUNNING
    s.remove(importing)
    assert take_step(s) == [("a", 8, 9)]


def test_newcomers_leave_a_block_for_everyone_that_runs():
    s = scheduler(num_blocks=3)
    s.add(sequence("a", prompt=4, output=9))
    s.add(sequence("b", prompt=4, output=9, age=1))
    s.add(sequence("c", prompt=4, output=9, age=2))
    assert [x.sequence_id for x in s.admit()] == ["a", "b"]


def test_a_short_prompt_goes_before_a_long_one_that_came_earlier():
    """Conformance 21."""
    s = scheduler(step_tokens=8)
    s.add(sequence("long", prompt=40))
    s.add(sequence("short", prompt=6, age=1))
    s.admit()
    assert [c.sequence.sequence_id for c in s.next_chunks(now=0.01)] == ["short", "long"]


@pytest.mark.parametrize(("short_came", "first"), [(0.0, "short"), (99.0, "long")])
def test_a_long_prompt_that_has_waited_goes_before_a_short_newcomer(short_came, first):
    s = scheduler(num_blocks=1000, step_tokens=8)
    long, short = sequence("long", prompt=400), sequence("short", prompt=6, age=1)
    short.queued = short_came
    s.add(long)
    s.add(short)
    s.admit()
    assert s.next_chunks(now=100.0)[0].sequence.sequence_id == first


def run_to_end(s: Scheduler, *sequences: Sequence) -> None:
    for each in sequences:
        s.add(each)
    s.admit()
    while any(each.num_generated < each.request.sampling.max_tokens for each in sequences):
        for chunk in s.next_chunks(now=0.0):
            samples = chunk.samples
            s.book_computed(chunk.sequence, chunk.token_end)
            if samples:
                chunk.sequence.tokens.append(0)
    for each in sequences:
        s.remove(each)


def test_a_prefix_that_was_computed_before_is_shared():
    s = scheduler()
    run_to_end(s, sequence("first", prompt=10))
    again = sequence("again", prompt=10)
    s.add(again)
    s.admit()
    assert (again.num_cached, again.num_computed) == (8, 8)
    assert take_step(s) == [("again", 8, 10)]
    assert (s.prefix_query_tokens, s.prefix_hit_tokens) == (20, 8)


def test_two_that_run_share_the_blocks_of_their_prefix():
    s = scheduler(num_blocks=6)
    run_to_end(s, sequence("first", prompt=12))
    one, two = sequence("one", prompt=11), sequence("two", prompt=11, age=1)
    s.add(one)
    s.add(two)
    s.admit()
    assert one.blocks[:2] == two.blocks[:2]
    assert one.blocks[2] != two.blocks[2]
    s.check_integrity()


def test_the_last_token_is_computed_even_if_all_is_cached():
    s = scheduler()
    run_to_end(s, sequence("first", prompt=8))
    again = sequence("again", prompt=8)
    s.add(again)
    s.admit()
    assert take_step(s) == [("again", 4, 8)]


def test_an_import_needs_none_of_what_is_cached():
    s = scheduler()
    run_to_end(s, sequence("first", prompt=8))
    imported = sequence("imported", prompt=8, kv_source=KVSource.HANDOFF)
    s.add(imported)
    s.admit()
    assert imported.num_cached == 8


@pytest.mark.parametrize(
    "other", [{"cache_salt": "tenant"}, {"sampling": SamplingParams(max_tokens=1, prompt_logprobs=0)}]
)
def test_another_salt_or_wanted_prompt_logprobs_find_nothing(other):
    s = scheduler()
    run_to_end(s, sequence("first", prompt=10))
    again = sequence("again", prompt=10, **other)
    s.add(again)
    s.admit()
    assert again.num_cached == 0


def test_generated_tokens_are_found_by_the_next_turn():
    s = scheduler()
    first = sequence("first", prompt=6, output=7)
    run_to_end(s, first)
    turn = Sequence.of(replace(first.request, sequence_id=SequenceId("t"), prompt=(*first.tokens, 5)), now=0)
    s.add(turn)
    s.admit()
    assert turn.num_cached == 12


def test_cached_blocks_are_evicted_oldest_and_from_the_end_when_blocks_are_short():
    s = scheduler(num_blocks=4)
    run_to_end(s, sequence("first", prompt=8))
    run_to_end(s, sequence("other", prompt=12, cache_salt="x"))
    again = sequence("again", prompt=9)
    s.add(again)
    s.admit()
    assert again.num_cached == 4


def test_an_importing_sequence_is_in_no_step_until_it_runs():
    s = scheduler()
    imported = sequence("a", prompt=8, output=5, kv_source=KVSource.HANDOFF)
    s.add(imported)
    assert s.admit() == [imported]
    assert imported.state is SequenceState.IMPORTING
    assert s.next_chunks(now=0.0) == []
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
    """Arrivals, steps, hand-offs, holds, forks and cancels in any order; all prompts share their prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.scheduler = Scheduler(
            self.pool, block_size=BLOCK_SIZE, step_tokens=7, max_running=6, local_prefill_step_tokens=5
        )
        self.live: list[Sequence] = []
        self.count = 0

    @rule(
        prompt=st.integers(1, 20),
        output=st.integers(1, 12),
        n=st.integers(1, 3),
        part=st.sampled_from([{}, {"kv_source": KVSource.HANDOFF}, {"run_until": RunUntil.FIRST_TOKEN}]),
    )
    def arrive(self, prompt, output, n, part):
        sampling = SamplingParams(max_tokens=output, n=n)
        new = sequence(f"s{self.count}", prompt, age=self.count, sampling=sampling, **part)
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
            self.scheduler.book_computed(s, len(s.tokens))
            self.scheduler.run(s)
            self.sample(s)

    def sample(self, s: Sequence) -> None:
        """Gives it its next token, or all its samples their first, each another one."""
        forks = [s.fork(offset) for offset in range(1, s.num_samples)]
        s.num_samples = 1
        for fork in forks:
            self.scheduler.share(s, fork)
            self.live.append(fork)
        for each in (s, *forks):
            each.tokens.append(100 + each.sample)
            if each.num_generated >= each.request.sampling.max_tokens:
                self.scheduler.remove(each)
                self.live.remove(each)

    @rule()
    def step(self):
        self.scheduler.admit()
        streams = [s for s in self.live if s.state is SequenceState.RUNNING and s.num_uncomputed == 1]
        chunks = self.scheduler.next_chunks(now=0.0)
        skipped = [s for s in streams if s not in [c.sequence for c in chunks]]
        for s in skipped:
            assert s.state is SequenceState.WAITING or self.pool.num_available == 0
        assert sum(c.num_tokens for c in chunks) <= max(7, len(streams))
        self.check_copies()
        for chunk in chunks:
            self.check_room(chunk)
        for chunk in chunks:
            s, samples = chunk.sequence, chunk.samples
            self.scheduler.book_computed(s, chunk.token_end)
            if samples and s.request.run_until is RunUntil.FIRST_TOKEN:
                self.scheduler.pause(s)
            elif samples:
                self.sample(s)

    def check_copies(self) -> None:
        """A copy goes into a block that one sequence alone holds."""
        for _, target in self.scheduler.take_copies():
            assert not self.pool.is_shared(target)

    def check_room(self, chunk) -> None:
        """Nobody else sees the blocks that the chunk writes."""
        s = chunk.sequence
        assert len(s.blocks) * BLOCK_SIZE >= chunk.token_end
        for block in s.blocks[chunk.token_start // BLOCK_SIZE :]:
            assert not self.pool.is_shared(block)

    @invariant()
    def books_agree(self):
        self.scheduler.check_integrity()

    @invariant()
    def something_runs_when_it_could(self):
        self.scheduler.admit()
        if self.live and self.scheduler.num_admitted == 0:
            raise AssertionError("sequences wait though no other holds a block")

    def teardown(self):
        """Every request ends once those that hold blocks for a hand-off let them go."""
        for _ in range(2000):
            self.complete_imports()
            for s in [s for s in self.live if s.state is SequenceState.HELD]:
                self.scheduler.remove(s)
                self.live.remove(s)
            self.step()
            if not self.live:
                break
        assert not self.live
        assert self.pool.num_available == self.pool.num_blocks


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=80, stateful_step_count=40)
