"""Which waiting request goes to the workers next."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

# A generated token's weight beside a prompt token's (Sheng et al., "Fairness in Serving Large Language
# Models", OSDI 2024).
OUTPUT_WEIGHT = 2
# Keys without a waiting request whose counters are remembered.
MAX_IDLE_KEYS = 1024


@dataclass(eq=False, slots=True)
class Entry(Generic[T]):
    """A request in the queue.

    Attributes:
        key: whose it is: the unit of fairness.
        priority: lower is earlier.
        tokens: of the prompt, that will be computed; at least 1.
        is_long: long and short ones wait for a room each.
        came_s: on any clock.
        item: the caller's.
    """

    key: str
    priority: int
    tokens: int
    is_long: bool
    came_s: float
    item: T


@dataclass(eq=False, slots=True)
class _Lane(Generic[T]):
    """Entries of one key, priority and length, in order of arrival."""

    entries: dict[Entry[T], None] = field(default_factory=dict)
    tokens: int = 0


@dataclass(eq=False, slots=True)
class _Account(Generic[T]):
    """What a key has used, and what of it waits.

    Attributes:
        served: tokens, those of answers counted `OUTPUT_WEIGHT` times.
        lanes: by priority and length; none is empty.
    """

    served: float = 0.0
    lanes: dict[tuple[int, bool], _Lane[T]] = field(default_factory=dict)

    def num_waiting(self, priority: int) -> int:
        return sum(len(lane.entries) for (level, _), lane in self.lanes.items() if level == priority)

    def newest(self, priority: int) -> Entry[T]:
        lanes = (lane for (level, _), lane in self.lanes.items() if level == priority)
        return max((next(reversed(lane.entries)) for lane in lanes), key=lambda entry: entry.came_s)


class FairQueue(Generic[T]):
    """Priority first; within it the key that was served least; within that the highest response ratio.

    A key's counter is the virtual token counter of Sheng et al.: a key that comes back from idleness is
    lifted to the least served of those that wait, so that nobody saves up what he did not use.

    Bounded: when it is full, a newcomer takes the place of the newest entry that is worse off, or is refused
    itself. Worse off is a worse priority; among equals, the key with the most entries.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._num_entries = 0
        self._accounts: OrderedDict[str, _Account[T]] = OrderedDict()
        # Of those, the ones with entries.
        self._waiting: dict[str, _Account[T]] = {}
        # The counter of the key that was served last: where a newcomer to an empty queue begins.
        self._level = 0.0

    def __len__(self) -> int:
        return self._num_entries

    def push(self, entry: Entry[T]) -> Entry[T] | None:
        """Adds it. Returns whoever has no place now: nobody, another one, or `entry` itself."""
        displaced = None
        if self._num_entries >= self._max_entries:
            displaced = self._worst_beside(entry)
            if displaced is entry:
                return entry
            self.remove(displaced)
        self._add(entry)
        return displaced

    def pop(self, has_room: Callable[[bool], bool], now_s: float, tokens_per_s: float) -> Entry[T] | None:
        """Takes the next one out and charges its prompt to its key. None: nothing waits that has room.

        Args:
            has_room: for a long one (True) or for a short one: neither kind is held up by the other.
            tokens_per_s: what prompts are computed at.
        """
        room = {is_long: has_room(is_long) for is_long in (False, True)}

        def order(head: tuple[_Account[T], Entry[T]]) -> tuple[int, float, float]:
            account, entry = head
            # As on the workers: Brinch Hansen's highest response ratio.
            service_s = entry.tokens / tokens_per_s
            return entry.priority, account.served, -(now_s - entry.came_s) / service_s

        heads = (head for head in self._heads() if room[head[1].is_long])
        best = min(heads, key=order, default=None)
        if best is None:
            return None
        account, entry = best
        self.remove(entry)
        account.served += entry.tokens
        self._level = account.served
        return entry

    def pass_by(self, key: str, tokens: float) -> None:
        """As pushing an entry of so many tokens and popping it, while nothing waits."""
        account = self._account(key)
        account.served = max(account.served, self._level) + tokens
        self._level = account.served

    def charge(self, key: str, tokens: float) -> None:
        """The key was served so many more."""
        account = self._accounts.get(key)
        if account is None:
            account = self._account(key)
        account.served += tokens

    def remove(self, entry: Entry[T]) -> None:
        """Takes out one that does not wait any longer. May be called again."""
        account = self._waiting.get(entry.key)
        place = (entry.priority, entry.is_long)
        lane = account and account.lanes.get(place)
        if account is None or lane is None or entry not in lane.entries:
            return
        del lane.entries[entry]
        lane.tokens -= entry.tokens
        self._num_entries -= 1
        if not lane.entries:
            del account.lanes[place]
        if not account.lanes:
            del self._waiting[entry.key]

    def tokens_ahead(self, key: str, priority: int, tokens: int) -> int:
        """About how many prompt tokens go before a newcomer's `tokens`.

        All of better priority. Of equal priority all of its own key, and of every other key no more than of
        its own with the newcomer: they take turns.
        """
        better = equal_own = 0
        equal_others: list[int] = []
        for other, account in self._waiting.items():
            better += sum(lane.tokens for (level, _), lane in account.lanes.items() if level < priority)
            equal = sum(lane.tokens for (level, _), lane in account.lanes.items() if level == priority)
            if other == key:
                equal_own = equal
            else:
                equal_others.append(equal)
        turn = equal_own + tokens
        return better + equal_own + sum(min(each, turn) for each in equal_others)

    def _heads(self) -> Iterator[tuple[_Account[T], Entry[T]]]:
        """Who could be next: the first of every lane."""
        for account in self._waiting.values():
            for lane in account.lanes.values():
                yield account, next(iter(lane.entries))

    def _worst_beside(self, newcomer: Entry[T]) -> Entry[T]:
        worst = max(level for account in self._waiting.values() for level, _ in account.lanes)
        if worst < newcomer.priority:
            return newcomer
        largest = max(self._waiting.values(), key=lambda account: account.num_waiting(worst))
        own = self._waiting.get(newcomer.key)
        num_own = 0 if own is None else own.num_waiting(worst)
        if worst == newcomer.priority and largest.num_waiting(worst) <= num_own + 1:
            return newcomer
        return largest.newest(worst)

    def _add(self, entry: Entry[T]) -> None:
        account = self._account(entry.key)
        if entry.key not in self._waiting:
            least = min((other.served for other in self._waiting.values()), default=self._level)
            account.served = max(account.served, least)
            self._waiting[entry.key] = account
        lane = account.lanes.setdefault((entry.priority, entry.is_long), _Lane())
        lane.entries[entry] = None
        lane.tokens += entry.tokens
        self._num_entries += 1

    def _account(self, key: str) -> _Account[T]:
        """Made if it is not there. Forgets what was idle longest."""
        account = self._accounts.setdefault(key, _Account())
        self._accounts.move_to_end(key)
        if len(self._accounts) > MAX_IDLE_KEYS + len(self._waiting):
            self._forget_oldest()
        return account

    def _forget_oldest(self) -> None:
        oldest = next(key for key in self._accounts if key not in self._waiting)
        del self._accounts[oldest]
