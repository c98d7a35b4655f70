"""The tokens of one sample, from whoever says them first."""

from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class TokenMerge(Generic[T]):
    """Orders and de-duplicates tokens by their index.

    Two workers may say the same token, and the second worker's tokens may come before the first
    worker's token 0. Invariant: what `take` returned so far is a gapless run from `first_index`, and the
    tokens ahead of it wait. At most `end_index - first_index` tokens are held, whatever a worker says.
    """

    def __init__(self, first_index: int, end_index: int) -> None:
        self._next = first_index
        self._end = end_index
        self._announced = first_index
        self._ready: list[T] = []
        self._ahead: dict[int, T] = {}

    def add(self, index: int, tokens: Sequence[T]) -> None:
        """`index` is the place of tokens[0]."""
        self.announce(index + len(tokens))
        for at, token in enumerate(tokens, start=index):
            if self._next <= at < self._end:
                self._ahead.setdefault(at, token)
        while self._next in self._ahead:
            self._ready.append(self._ahead.pop(self._next))
            self._next += 1

    def announce(self, end_index: int) -> None:
        """There are tokens up to `end_index`; somebody will say what is wanted of them."""
        self._announced = max(self._announced, min(end_index, self._end))

    @property
    def has_ready(self) -> bool:
        return bool(self._ready)

    @property
    def has_gap(self) -> bool:
        """A token is missing that was announced, or before one that was said."""
        return self._next < self._announced

    @property
    def next_index(self) -> int:
        """One past the last gapless token."""
        return self._next

    def take(self) -> tuple[int, tuple[T, ...]]:
        """The tokens that are ready, and the index of the first."""
        taken, self._ready = tuple(self._ready), []
        return self._next - len(taken), taken
