import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.block_pool import BlockPool, IntegrityError, OutOfBlocks


def test_allocates_distinct_blocks_until_none_is_free():
    pool = BlockPool(4)
    first, second = pool.allocate(3), pool.allocate(1)
    assert sorted(first + second) == [0, 1, 2, 3]
    assert pool.num_available == 0


def test_takes_nothing_when_it_cannot_give_all():
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(OutOfBlocks):
        pool.allocate(3)
    assert pool.num_available == 2


def test_frees_a_shared_block_with_its_last_reference():
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.hold(blocks)
    pool.release(blocks)
    assert pool.num_available == 0
    pool.release(blocks)
    assert pool.num_available == 1


@pytest.mark.parametrize("act", [BlockPool.release, BlockPool.hold])
def test_refuses_to_touch_a_block_that_nobody_holds(act):
    pool = BlockPool(2)
    with pytest.raises(IntegrityError):
        act(pool, [0])


def test_reuses_the_block_that_was_freed_last():
    pool = BlockPool(100)
    pool.release(pool.allocate(3))
    assert set(pool.allocate(3)) == {0, 1, 2}


def test_integrity_check_finds_a_leaked_block():
    pool = BlockPool(3)
    table = pool.allocate(2)
    pool.check_integrity([table])
    with pytest.raises(IntegrityError):
        pool.check_integrity([table[:1]])


@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "release"]), st.integers(0, 6)), max_size=60))
def test_books_agree_after_any_history(history):
    pool = BlockPool(16)
    tables: list[list[int]] = []
    for act, size in history:
        if act == "allocate" and size <= pool.num_available:
            tables.append(pool.allocate(size))
        elif act == "share" and size < len(tables):
            pool.hold(tables[size])
            tables.append(list(tables[size]))
        elif act == "release" and size < len(tables):
            pool.release(tables.pop(size))
        pool.check_integrity(tables)
