"""Who holds each KV block of a device."""

from collections.abc import Iterable
from typing import NewType

BlockId = NewType("BlockId", int)


class OutOfBlocks(RuntimeError):
    """Fewer blocks are free than were asked for. Nothing was taken."""


class IntegrityError(AssertionError):
    """An invariant of the engine's books does not hold. The message says which."""


class BlockPool:
    """The KV blocks of one device: who holds each, and which are free.

    A block is in exactly one state: free (ref_count == 0) or held (ref_count >= 1).
    Invariant, checked by `check_integrity`: free + held == num_blocks.

    The block that was freed last is taken first: a pool that is mostly idle touches little memory.
    """

    def __init__(self, num_blocks: int) -> None:
        self._ref_counts = [0] * num_blocks
        self._free = [BlockId(block) for block in reversed(range(num_blocks))]

    @property
    def num_blocks(self) -> int:
        return len(self._ref_counts)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num_blocks: int) -> list[BlockId]:
        """Takes free blocks, each with one reference.

        Raises:
            OutOfBlocks: fewer than `num_blocks` are free; nothing was taken.
        """
        if num_blocks > len(self._free):
            raise OutOfBlocks(f"{num_blocks} blocks wanted, {len(self._free)} of {self.num_blocks} are free")
        blocks = [self._free.pop() for _ in range(num_blocks)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def share(self, blocks: Iterable[BlockId]) -> None:
        """Adds a reference to each of `blocks`, which are held."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                raise IntegrityError(f"block {block} is shared though nobody holds it")
            self._ref_counts[block] += 1

    def release(self, blocks: Iterable[BlockId]) -> None:
        """Gives one reference of each of `blocks` back; a block without references is free."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                raise IntegrityError(f"block {block} is released though nobody holds it")
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free.append(block)

    def check_integrity(self, holders: Iterable[Iterable[BlockId]]) -> None:
        """Compares the books with `holders`, the block table of everyone who holds blocks.

        Raises:
            IntegrityError: a block leaked, is held by one who has no reference, or is free twice.
        """
        counts = [0] * self.num_blocks
        for table in holders:
            for block in table:
                counts[block] += 1
        for block, (counted, booked) in enumerate(zip(counts, self._ref_counts, strict=True)):
            if counted != booked:
                raise IntegrityError(f"block {block} has {counted} holders and {booked} references")
        free = sorted(self._free)
        if free != [block for block, count in enumerate(self._ref_counts) if count == 0]:
            raise IntegrityError("the free list is not the blocks without references")
