"""Which tokens of which layers are there."""

from bisect import bisect_right, insort
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Region:
    """A rectangle of layers and tokens."""

    layer_start: int
    layer_count: int
    token_start: int
    token_count: int

    @property
    def layers(self) -> range:
        return range(self.layer_start, self.layer_start + self.layer_count)

    @property
    def token_end(self) -> int:
        return self.token_start + self.token_count


class BadRegion(ValueError):
    """Empty, outside what is expected, or there already."""


class Coverage:
    """The regions of one hand-off that are there, in whatever order they came.

    Of each layer it keeps disjoint token intervals, sorted; neighbours are merged, so that a prompt that
    comes in order costs one interval a layer.
    """

    def __init__(self, num_layers: int, num_tokens: int, first_token: int = 0) -> None:
        """Tokens [first_token, num_tokens) of every layer are expected."""
        self._first_token = first_token
        self._num_tokens = num_tokens
        self._intervals: list[list[tuple[int, int]]] = [[] for _ in range(num_layers)]
        self._missing = num_layers * (num_tokens - first_token)

    @property
    def complete(self) -> bool:
        return self._missing == 0

    def add(self, region: Region) -> None:
        """Takes all of a region.

        Raises:
            BadRegion: nothing was taken.
        """
        inside = (
            region.layer_count > 0
            and region.token_count > 0
            and region.layer_start >= 0
            and region.token_start >= self._first_token
            and region.layers.stop <= len(self._intervals)
            and region.token_end <= self._num_tokens
        )
        if not inside:
            raise BadRegion(
                f"{region} is not inside {len(self._intervals)} layers, "
                f"tokens {self._first_token} to {self._num_tokens}"
            )
        if any(self._overlaps(layer, region) for layer in region.layers):
            raise BadRegion(f"{region} is there already, or a part of it")
        for layer in region.layers:
            self._insert(layer, region)
        self._missing -= region.layer_count * region.token_count

    def _overlaps(self, layer: int, region: Region) -> bool:
        intervals = self._intervals[layer]
        after = bisect_right(intervals, region.token_start, key=lambda interval: interval[0])
        if after > 0 and intervals[after - 1][1] > region.token_start:
            return True
        return after < len(intervals) and intervals[after][0] < region.token_end

    def _insert(self, layer: int, region: Region) -> None:
        intervals = self._intervals[layer]
        start, end = region.token_start, region.token_end
        after = bisect_right(intervals, start, key=lambda interval: interval[0])
        if after < len(intervals) and intervals[after][0] == end:
            end = intervals.pop(after)[1]
        if after > 0 and intervals[after - 1][1] == start:
            start = intervals.pop(after - 1)[0]
        insort(intervals, (start, end))
