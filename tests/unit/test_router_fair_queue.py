"""Who goes first, and who has no place."""

import random
from collections import Counter

import pytest

from router.fair_queue import MAX_IDLE_KEYS, OUTPUT_WEIGHT, Entry, FairQueue


def entry(
    name: str,
    *,
    key: str = "a",
    priority: int = 0,
    tokens: int = 100,
    long: bool = False,
    came_s: float = 0.0,
) -> Entry[str]:
    return Entry(key, priority, tokens, long, came_s, name)


def queue_of(*entries: Entry[str], max_entries: int = 100) -> FairQueue[str]:
    queue: FairQueue[str] = FairQueue(max_entries)
    for each in entries:
        assert queue.push(each) is None
    return queue


def drain(queue: FairQueue[str], *, now_s: float = 10.0) -> str:
    """The names, in the order in which they come out."""
    names = []
    while (popped := queue.pop(lambda _: True, now_s, 1000.0)) is not None:
        names.append(popped.item)
    assert len(queue) == 0
    return " ".join(names)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        pytest.param([entry("1"), entry("2", came_s=1), entry("3", came_s=2)], "1 2 3", id="by-arrival"),
        pytest.param(
            [entry("1", priority=5), entry("2", priority=-1), entry("3")], "2 3 1", id="by-priority"
        ),
        pytest.param(
            [entry("1"), entry("2", came_s=1), entry("3", came_s=2), entry("b", key="b", came_s=3)],
            "1 b 2 3",
            id="keys-take-turns",
        ),
        pytest.param(
            [
                *(entry(f"{n}", tokens=10) for n in range(3)),
                *(entry(f"b{n}", key="b", tokens=30) for n in range(2)),
            ],
            "0 b0 1 2 b1",
            id="by-tokens-not-by-requests",
        ),
        pytest.param(
            [entry("long", tokens=9000, long=True), entry("short", tokens=10, came_s=9.0)],
            "short long",
            id="a-short-one-overtakes-a-long-one",
        ),
        pytest.param(
            [entry("long", tokens=9000, long=True), entry("short", tokens=10, came_s=9.999)],
            "long short",
            id="but-one-that-just-came-does-not",
        ),
        pytest.param(
            [entry("low", priority=1, key="b"), entry("1"), entry("2", came_s=1)],
            "1 2 low",
            id="priority-before-fairness",
        ),
    ],
)
def test_order(entries: list[Entry[str]], expected: str) -> None:
    assert drain(queue_of(*entries)) == expected


def test_answers_count_against_their_key() -> None:
    queue = queue_of(entry("a1"), entry("a2", came_s=1), entry("b1", key="b", tokens=50, came_s=2))
    queue.charge("b", OUTPUT_WEIGHT * 60)
    assert drain(queue) == "a1 a2 b1"


def test_what_a_key_did_not_use_is_not_saved_up() -> None:
    queue = queue_of(*(entry(f"a{n}", came_s=n) for n in range(4)))
    queue.pop(lambda _: True, 10.0, 1000.0)
    queue.pop(lambda _: True, 10.0, 1000.0)
    for n in range(3):
        queue.push(entry(f"b{n}", key="b", came_s=10 + n))
    assert drain(queue, now_s=20.0) == "a2 b0 a3 b1 b2"


@pytest.mark.parametrize(("is_long", "expected"), [(True, "long"), (False, "short")])
def test_neither_length_is_held_up_by_the_other(is_long: bool, expected: str) -> None:
    queue = queue_of(entry("long", long=True, tokens=5000), entry("short"))
    popped = queue.pop(lambda asked: asked is is_long, 10.0, 1000.0)
    assert popped is not None and popped.item == expected
    assert queue.pop(lambda asked: asked is is_long, 10.0, 1000.0) is None


def test_one_that_left_does_not_come_out() -> None:
    gone = entry("1")
    queue = queue_of(gone, entry("2"))
    queue.remove(gone)
    queue.remove(gone)
    assert drain(queue) == "2"


@pytest.mark.parametrize(
    ("newcomer", "expected"),
    [
        pytest.param(entry("new"), "new", id="the-key-with-most-entries-gets-no-more"),
        pytest.param(entry("new", key="b"), "a3", id="another-key-takes-its-newest-place"),
        pytest.param(entry("new", priority=1), "new", id="worse-than-all"),
        pytest.param(entry("new", priority=-1), "a3", id="better-than-all"),
    ],
)
def test_who_has_no_place_in_a_full_queue(newcomer: Entry[str], expected: str) -> None:
    queue = queue_of(*(entry(f"a{n}", came_s=n) for n in range(4)), max_entries=4)
    displaced = queue.push(newcomer)
    assert displaced is not None and displaced.item == expected
    assert len(queue) == 4


def test_a_full_queue_holds_every_key_to_its_share() -> None:
    queue: FairQueue[str] = FairQueue(12)
    for n in range(300):
        queue.push(entry(str(n), key="abc"[n % 3] if n % 100 == 0 else "a", came_s=n))
    for n in range(50):
        for key in "bc":
            queue.push(entry(f"{key}{n}", key=key, came_s=300 + n))
    kept = Counter()
    while (popped := queue.pop(lambda _: True, 1000.0, 1000.0)) is not None:
        kept[popped.key] += 1
    assert kept.total() == 12 and min(kept.values()) >= 3


@pytest.mark.parametrize(
    ("key", "priority", "expected"),
    [
        # a: 300 of priority 0; b: 100 of priority 0 and 50 of priority 1.
        ("a", 0, 300 + 100),
        ("b", 0, 100 + 110),
        ("c", 0, 10 + 10),
        ("c", 1, 400 + 10),
        ("c", -1, 0),
    ],
)
def test_what_is_ahead_of_a_newcomer(key: str, priority: int, expected: int) -> None:
    queue = queue_of(entry("1", tokens=300), entry("2", key="b"), entry("3", key="b", priority=1, tokens=50))
    assert queue.tokens_ahead(key, priority, 10) == expected


def test_idle_keys_are_forgotten() -> None:
    queue: FairQueue[str] = FairQueue(10)
    for n in range(3 * MAX_IDLE_KEYS):
        queue.charge(f"key{n}", 1)
    assert len(queue._accounts) <= MAX_IDLE_KEYS


def test_shares_are_equal_whatever_the_keys_send() -> None:
    """Two keys that always wait get the same tokens, though one sends far more and longer requests."""
    chance = random.Random(1)
    queue: FairQueue[str] = FairQueue(1000)
    served: Counter[str] = Counter()
    for n in range(4000):
        queue.push(entry("", key="greedy", tokens=chance.randrange(500, 1500), came_s=n))
        if n % 5 == 0:
            queue.push(entry("", key="modest", tokens=chance.randrange(100, 300), came_s=n))
        if n % 10 == 9:
            popped = queue.pop(lambda _: True, float(n), 1000.0)
            assert popped is not None
            served[popped.key] += popped.tokens
    assert served["greedy"] == pytest.approx(served["modest"], rel=0.1)
