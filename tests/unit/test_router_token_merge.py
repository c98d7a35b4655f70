"""Tokens from two mouths, in order and once."""

from hypothesis import given
from hypothesis import strategies as st

from router.token_merge import TokenMerge


@given(
    end=st.integers(1, 12),
    says=st.lists(st.tuples(st.integers(0, 14), st.integers(1, 6)), max_size=30),
)
def test_what_is_taken_is_a_gapless_run_without_repeats(end: int, says: list[tuple[int, int]]) -> None:
    merge = TokenMerge(0, end)
    taken: list[int] = []
    for index, length in says:
        merge.add(index, range(index, index + length))
        first, token_ids = merge.take()
        assert first == len(taken)
        taken += token_ids
    said = {at for index, length in says for at in range(index, index + length) if at < end}
    gapless = next(at for at in range(16) if at not in said)
    assert taken == list(range(gapless))
    known = min(end, max((index + length for index, length in says), default=0))
    assert merge.has_gap == (len(taken) < known)


def test_the_first_word_for_an_index_counts() -> None:
    merge = TokenMerge(0, 4)
    merge.add(1, [11])
    merge.add(0, [10, 99])
    assert merge.take() == (0, [10, 11])


def test_tokens_of_earlier_attempts_are_not_taken_again() -> None:
    merge = TokenMerge(3, 8)
    merge.add(1, [1, 2, 3, 4])
    assert merge.take() == (3, [3, 4])


def test_an_announced_token_is_missing_until_it_is_said() -> None:
    merge = TokenMerge(0, 4)
    merge.announce(1)
    assert merge.has_gap and merge.take() == (0, [])
    merge.add(0, [10])
    assert not merge.has_gap and merge.take() == (0, [10])
