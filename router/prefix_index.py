"""Which worker has which prefixes in its KV cache."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from protos import worker_pb2


@dataclass(slots=True)
class _Holder:
    """One worker's cache, as its session tells it.

    Attributes:
        bit: stands for it in the index.
        next_number: of the event that continues what is known. None: nothing is known until a snapshot.
    """

    bit: int
    names: set[bytes] = field(default_factory=set)
    next_number: int | None = None


class PrefixIndex:
    """The block names of every worker's cache, by the session with it.

    Invariant: `_bits` has, under every name, the bits of exactly the holders whose `names` have it.
    """

    def __init__(self) -> None:
        self._holders: dict[str, _Holder] = {}
        self._bits: dict[bytes, int] = {}
        self._free_bits: list[int] = []

    def hear(self, session: str, event: worker_pb2.CacheEvent) -> bool:
        """Takes up what a worker tells.

        Returns:
            False: events are missing before this one. What was known is forgotten; ask for a snapshot.
        """
        holder = self._holders.get(session)
        if holder is None:
            holder = self._holders[session] = _Holder(self._take_bit())
        if event.is_snapshot:
            self._remove(holder, holder.names - set(event.stored))
        elif holder.next_number is None:
            return True
        elif event.number != holder.next_number:
            self._remove(holder, set(holder.names))
            holder.next_number = None
            return False
        holder.next_number = event.number + 1
        self._add(holder, event.stored)
        self._remove(holder, event.removed)
        return True

    def forget(self, session: str) -> None:
        """The session is over."""
        holder = self._holders.pop(session, None)
        if holder is not None:
            self._remove(holder, set(holder.names))
            self._free_bits.append(holder.bit)

    def longest(self, names: Iterable[bytes]) -> Mapping[str, int]:
        """How many of the first `names` each session's worker has, of those that have any.

        Asks for no name after the first that nobody has: O(blocks that are found + workers).
        """
        alive = (1 << len(self._holders) + len(self._free_bits)) - 1
        dropped_at: list[tuple[int, int]] = []
        num_blocks = 0
        for name in names:
            still = alive & self._bits.get(name, 0)
            if still != alive:
                dropped_at.append((alive & ~still, num_blocks))
                alive = still
            if not alive:
                break
            num_blocks += 1
        dropped_at.append((alive, num_blocks))
        return {
            session: count
            for session, holder in self._holders.items()
            for bits, count in dropped_at
            if bits & holder.bit and count
        }

    @property
    def num_names(self) -> int:
        return len(self._bits)

    def _take_bit(self) -> int:
        return self._free_bits.pop() if self._free_bits else 1 << len(self._holders)

    def _add(self, holder: _Holder, names: Iterable[bytes]) -> None:
        for name in names:
            holder.names.add(name)
            self._bits[name] = self._bits.get(name, 0) | holder.bit

    def _remove(self, holder: _Holder, names: Iterable[bytes]) -> None:
        for name in names:
            if name not in holder.names:
                continue
            holder.names.remove(name)
            left = self._bits[name] & ~holder.bit
            if left:
                self._bits[name] = left
            else:
                del self._bits[name]
