"""The prefix index against a model of it, and the names of blocks against the engine's."""

from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.block_hash import BlockHash, extend_hashes
from protos.worker_pb2 import CacheEvent
from router.block_names import block_names
from router.prefix_index import PrefixIndex

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=100)


@given(tokens=tokens, block_size=st.integers(1, 32), salt=st.text(max_size=100))
def test_names_are_those_of_the_engine(tokens: list[int], block_size: int, salt: str) -> None:
    expected: list[BlockHash] = []
    extend_hashes(expected, tokens, block_size, salt)
    assert list(block_names(tokens, block_size, salt)) == expected


def snapshot(number: int, *names: bytes) -> CacheEvent:
    return CacheEvent(number=number, is_snapshot=True, stored=names)


@pytest.fixture
def index() -> PrefixIndex:
    """a has 1 2 3, b has 1 2, c has 2 3."""
    index = PrefixIndex()
    index.hear("a", snapshot(0, b"1", b"2", b"3"))
    index.hear("b", snapshot(0, b"1", b"2"))
    index.hear("c", snapshot(0, b"2", b"3"))
    return index


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([b"1", b"2", b"3"], {"a": 3, "b": 2}),
        ([b"1", b"2", b"3", b"4"], {"a": 3, "b": 2}),
        ([b"1", b"4", b"2"], {"a": 1, "b": 1}),
        ([b"2"], {"a": 1, "b": 1, "c": 1}),
        ([b"4"], {}),
        ([], {}),
    ],
)
def test_the_longest_prefix_of_each_worker(
    index: PrefixIndex, names: list[bytes], expected: dict[str, int]
) -> None:
    assert index.longest(names) == expected


def test_no_name_is_made_after_the_first_that_nobody_has(index: PrefixIndex) -> None:
    names = iter([b"1", b"2", b"3", b"4", b"5"])
    index.longest(names)
    assert list(names) == [b"5"]


def test_a_gap_makes_all_that_is_known_void_until_a_snapshot(index: PrefixIndex) -> None:
    assert index.hear("a", CacheEvent(number=1, removed=[b"3"]))
    assert not index.hear("a", CacheEvent(number=3, stored=[b"5"]))
    assert index.longest([b"1"]) == {"b": 1}
    assert index.hear("a", CacheEvent(number=4, stored=[b"1"]))
    assert index.longest([b"1"]) == {"b": 1}
    assert index.hear("a", snapshot(5, b"1", b"6"))
    assert index.hear("a", CacheEvent(number=6, stored=[b"7"]))
    assert index.longest([b"1", b"7"]) == {"a": 2, "b": 1}


def test_a_session_that_ended_is_forgotten_and_a_later_one_starts_with_nothing(index: PrefixIndex) -> None:
    index.forget("a")
    index.hear("d", snapshot(0, b"9"))
    assert index.longest([b"1", b"2"]) == {"b": 2}
    assert index.longest([b"9"]) == {"d": 1}


def test_nothing_is_left_of_sessions_that_ended(index: PrefixIndex) -> None:
    for session in ("a", "b", "c", "c"):
        index.forget(session)
    assert index.num_names == 0


NAMES = [bytes([name]) for name in range(6)]
some_names = st.sets(st.sampled_from(NAMES))
sessions = st.sampled_from(["a", "b", "c", "d"])


class RandomEvents(RuleBasedStateMachine):
    """Workers tell changes, begin anew, leave, and lose events; the index against a set for each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.caches: dict[str, set[bytes]] = {}
        self.numbers: dict[str, int] = {}
        self.is_void: dict[str, bool] = {}

    def tell(self, session: str, **event: object) -> bool:
        number = self.numbers.get(session, 0)
        self.numbers[session] = number + 1
        return self.index.hear(session, CacheEvent(number=number, **event))

    @rule(session=sessions, names=some_names)
    def tells_all(self, session: str, names: set[bytes]) -> None:
        assert self.tell(session, is_snapshot=True, stored=names)
        self.caches[session], self.is_void[session] = set(names), False

    @rule(session=sessions, stored=some_names, removed=some_names)
    def tells_changes(self, session: str, stored: set[bytes], removed: set[bytes]) -> None:
        assert self.tell(session, stored=stored, removed=removed - stored)
        if not self.is_void.get(session, True):
            self.caches[session] = (self.caches[session] | stored) - (removed - stored)

    @rule(session=sessions, stored=some_names)
    def loses_an_event(self, session: str, stored: set[bytes]) -> None:
        self.numbers[session] = self.numbers.get(session, 0) + 1
        was_void = self.is_void.get(session, True)
        assert self.tell(session, stored=stored) == was_void
        self.caches[session], self.is_void[session] = set(), True

    @rule(session=sessions)
    def leaves(self, session: str) -> None:
        self.index.forget(session)
        for known in (self.caches, self.numbers, self.is_void):
            known.pop(session, None)

    @invariant()
    def finds_what_each_worker_has(self) -> None:
        for first in range(len(NAMES)):
            wanted = NAMES[first:]
            expected = {
                session: len(list(takewhile(cache.__contains__, wanted)))
                for session, cache in self.caches.items()
            }
            found = self.index.longest(wanted)
            assert found == {session: count for session, count in expected.items() if count}

    @invariant()
    def knows_no_other_name(self) -> None:
        assert self.index.num_names == len(set().union(*self.caches.values()))


TestRandomEvents = RandomEvents.TestCase
