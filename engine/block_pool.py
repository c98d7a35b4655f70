"""Who holds each KV block of a device, and which blocks still answer a prefix lookup."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple, NewType

from engine.block_hash import BlockHash

BlockId = NewType("BlockId", int)


class CacheChanges(NamedTuple):
    """Names of full blocks that began to answer prefix lookups, and that ceased to."""

    stored: tuple[BlockHash, ...]
    removed: tuple[BlockHash, ...]


class OutOfBlocks(RuntimeError):
    """Fewer blocks are free or cached than were asked for. Nothing was taken."""


class IntegrityError(AssertionError):
    """An invariant of the engine's books does not hold. The message says which."""


class BlockPool:
    """The KV blocks of one device: who holds each, and which are free.

    A block is in exactly one state: free, held (ref_count >= 1), or cached (ref_count == 0
    but its content still answers a prefix lookup, oldest evicted first).
    Invariant, checked by `check_integrity`: free + held + cached == num_blocks.

    The block that was freed last is taken first: a pool that is mostly idle touches little memory.
    """

    def __init__(self, num_blocks: int) -> None:
        self._ref_counts = [0] * num_blocks
        self._free = [BlockId(block) for block in reversed(range(num_blocks))]
        # Least recently held first.
        self._cached: OrderedDict[BlockId, None] = OrderedDict()
        self._names: dict[BlockId, BlockHash] = {}
        self._named: dict[BlockHash, BlockId] = {}
        # Names that came or went since `take_changes`: whether they answer lookups now.
        self._changes: dict[BlockHash, bool] = {}

    @property
    def num_blocks(self) -> int:
        return len(self._ref_counts)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could give: the free and the cached ones."""
        return len(self._free) + len(self._cached)

    def allocate(self, num_blocks: int) -> list[BlockId]:
        """Takes blocks, each with one reference, evicting cached ones when the free list is short.

        Raises:
            OutOfBlocks: fewer than `num_blocks` are free or cached; nothing was taken.
        """
        if num_blocks > self.num_available:
            raise OutOfBlocks(
                f"{num_blocks} blocks wanted, {self.num_available} of {self.num_blocks} are left"
            )
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(num_blocks)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def _evict(self) -> BlockId:
        block, _ = self._cached.popitem(last=False)
        name = self._names.pop(block)
        del self._named[name]
        self._changes[name] = False
        return block

    def publish(self, block: BlockId, name: BlockHash) -> None:
        """Lets a held, full block answer lookups. If another block has the name already, that one does."""
        if self._ref_counts[block] == 0:
            raise IntegrityError(f"block {block} is published though nobody holds it")
        if name not in self._named and block not in self._names:
            self._named[name] = block
            self._names[block] = name
            self._changes[name] = True

    def names(self) -> tuple[BlockHash, ...]:
        """All that lookups find."""
        return tuple(self._named)

    def take_changes(self) -> CacheChanges:
        """What lookups find, or find no more, since the last call."""
        changes, self._changes = self._changes, {}
        return CacheChanges(
            tuple(name for name, is_there in changes.items() if is_there),
            tuple(name for name, is_there in changes.items() if not is_there),
        )

    def find(self, names: Sequence[BlockHash]) -> list[BlockId]:
        """The blocks of the longest prefix of `names` that is there. Takes no reference."""
        found = []
        for name in names:
            block = self._named.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def hold(self, blocks: Iterable[BlockId]) -> None:
        """Adds a reference to each of `blocks`, which are held or cached."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                if block not in self._cached:
                    raise IntegrityError(f"block {block} is shared though it is free")
                del self._cached[block]
            self._ref_counts[block] += 1

    def is_shared(self, block: BlockId) -> bool:
        return self._ref_counts[block] > 1

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Gives one reference of each of a sequence's `blocks` back.

        A block without references is cached if it is published, else free. The last ones of a sequence
        become the oldest: a prefix stays useful when its end is evicted, not the other way round.
        """
        for block in reversed(blocks):
            if self._ref_counts[block] == 0:
                raise IntegrityError(f"block {block} is released though nobody holds it")
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                if block in self._names:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def check_integrity(self, holders: Iterable[Iterable[BlockId]]) -> None:
        """Compares the books with `holders`, the block table of everyone who holds blocks.

        Raises:
            IntegrityError: a block leaked, is held by one who has no reference, or is in two states.
        """
        counts = [0] * self.num_blocks
        for table in holders:
            for block in table:
                counts[block] += 1
        for block, (counted, booked) in enumerate(zip(counts, self._ref_counts, strict=True)):
            if counted != booked:
                raise IntegrityError(f"block {block} has {counted} holders and {booked} references")
        unheld = [block for block, count in enumerate(self._ref_counts) if count == 0]
        if sorted([*self._free, *self._cached]) != unheld:
            raise IntegrityError("free and cached blocks are not those without references")
        if not self._cached.keys() <= self._names.keys():
            raise IntegrityError("a cached block answers no lookup")
        if self._named != {name: block for block, name in self._names.items()}:
            raise IntegrityError("names and blocks do not match")
