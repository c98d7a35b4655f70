"""The tokens of one sample, from whoever says them first."""

from collections.abc import Sequence


class TokenMerge:
    """Orders and de-duplicates tokens by their index.

    Two workers may say the same token, and the second worker's tokens may come before the first
    worker's token 0. Invariant: what `take` returned so far is a gapless run from `first_index`, and the
    tokens ahead of it wait. At most `end_index - first_index` tokens are held, whatever a worker says.
    """

    def __init__(self, first_index: int, end_index: int) -> None:
        self._next = first_index
        self._end = end_index
        self._ready: list[int] = []
        self._ahead: dict[int, int] = {}

    def add(self, index: int, token_ids: Sequence[int]) -> None:
        """`index` is the place of token_ids[0]."""
        for at, token_id in enumerate(token_ids, start=index):
            if self._next <= at < self._end:
                self._ahead.setdefault(at, token_id)
        while self._next in self._ahead:
            self._ready.append(self._ahead.pop(self._next))
            self._next += 1

    @property
    def has_ready(self) -> bool:
        return bool(self._ready)

    @property
    def has_gap(self) -> bool:
        """Tokens wait for one before them."""
        return bool(self._ahead)

    @property
    def next_index(self) -> int:
        """One past the last gapless token."""
        return self._next

    def take(self) -> tuple[int, tuple[int, ...]]:
        """The tokens that are ready, and the index of the first."""
        taken, self._ready = tuple(self._ready), []
        return self._next - len(taken), taken
