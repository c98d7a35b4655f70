"""What has arrived, against a plain set of (layer, token)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.coverage import BadRegion, Coverage, Region

LAYERS, TOKENS = 3, 8
REGIONS = st.builds(Region, st.integers(0, 3), st.integers(0, 3), st.integers(0, 8), st.integers(0, 8))


@given(st.lists(REGIONS, max_size=30))
def test_it_takes_what_is_inside_and_new_and_nothing_else(regions: list[Region]) -> None:
    coverage, there = Coverage(LAYERS, TOKENS), set()
    for region in regions:
        cells = {(layer, t) for layer in region.layers for t in range(region.token_start, region.token_end)}
        inside = all(layer < LAYERS and token < TOKENS for layer, token in cells)
        if cells and inside and not cells & there:
            coverage.add(region)
            there |= cells
        else:
            with pytest.raises(BadRegion):
                coverage.add(region)
        assert coverage.complete == (len(there) == LAYERS * TOKENS)


@given(st.permutations([(layer, token) for layer in range(LAYERS) for token in range(TOKENS)]))
def test_it_is_complete_with_the_last_cell_in_any_order(cells: list[tuple[int, int]]) -> None:
    coverage = Coverage(LAYERS, TOKENS)
    for layer, token in cells:
        assert not coverage.complete
        coverage.add(Region(layer, 1, token, 1))
    assert coverage.complete
