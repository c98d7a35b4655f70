import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.row_groups import group_rows


@pytest.mark.parametrize(
    ("context_lens", "groups"),
    [
        ([10], [[0]]),
        ([10, 200, 30], [[0], [1, 2]]),
        ([100, 90, 80], [[0, 1, 2]]),
        ([2000, 5, 1990], [[0, 2], [1]]),
        ([9000], [[0]]),
        ([2048, 2048, 2048], [[0, 1], [2]]),
    ],
)
def test_rows_of_like_length_attend_together(context_lens: list[int], groups: list[list[int]]):
    assert sorted(group_rows(context_lens, 4096)) == groups


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=50), st.integers(1, 8192))
def test_every_row_is_in_one_group_of_bounded_size(context_lens: list[int], max_group_tokens: int):
    groups = group_rows(context_lens, max_group_tokens)
    assert sorted(row for group in groups for row in group) == list(range(len(context_lens)))
    for group in groups:
        longest = max(context_lens[row] for row in group)
        assert len(group) == 1 or len(group) * longest <= max_group_tokens
