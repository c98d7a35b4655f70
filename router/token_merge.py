"""The tokens of one sample, from whoever says them first."""

from collections.abc import Sequence


class TokenMerge:
    """Orders and de-duplicates tokens by their index.

    Two workers may say the same token, and the second worker's tokens may come before the first
    worker's token 0. Invariant: what `take` returned so far is a gapless run from `first_index`, and the
    tokens ahead of it wait. At most `end_index - first_index` tokens are held, whatever a worker says.

    Attributes:
        has_gap: a token is missing that was announced, or before one that was said.
    """

    __slots__ = ("_ahead", "_announced", "_end", "_next", "_ready", "has_gap")

    def __init__(self, first_index: int, end_index: int) -> None:
        self._next = first_index
        self._end = end_index
        self._announced = first_index
        self.has_gap = False
        self._ready: list[int] = []
        self._ahead: dict[int, int] = {}

    def add(self, index: int, token_ids: Sequence[int]) -> bool:
        """`index` is the place of token_ids[0]. Whether the gapless run is longer now."""
        end = index + len(token_ids)
        if index == self._next and not self._ahead and end <= self._end:
            # As nearly all tokens come.
            self._ready += token_ids
            self._next = end
            if self.has_gap:
                self.has_gap = end < self._announced
            return bool(token_ids)
        return self._add_out_of_turn(index, token_ids)

    def _add_out_of_turn(self, index: int, token_ids: Sequence[int]) -> bool:
        first = self._next
        self.announce(index + len(token_ids))
        for at, token_id in enumerate(token_ids, start=index):
            if self.wants(at):
                self._ahead.setdefault(at, token_id)
        while self._next in self._ahead:
            self._ready.append(self._ahead.pop(self._next))
            self._next += 1
        self.has_gap = self._next < self._announced
        return self._next > first

    def wants(self, at: int) -> bool:
        """A token there would be new, or one that waits already."""
        return self._next <= at < self._end

    def announce(self, end_index: int) -> None:
        """There are tokens up to `end_index`; somebody will say what is wanted of them."""
        self._announced = max(self._announced, min(end_index, self._end))
        self.has_gap = self._next < self._announced

    @property
    def next_index(self) -> int:
        """One past the last gapless token."""
        return self._next

    def take(self) -> tuple[int, list[int]]:
        """The tokens that are ready, and the index of the first."""
        taken, self._ready = self._ready, []
        return self._next - len(taken), taken
