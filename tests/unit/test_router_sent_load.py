"""What a report of 1000 waiting tokens becomes by what was sent, computed and ended around it."""

import pytest

from router.sent_load import SentLoad


def after(*events: str) -> SentLoad:
    """s: submit (100 tokens, 7 blocks), t: a token came, e: it ended, each of an attempt; r: a report."""
    load = SentLoad()
    for event in events:
        match event[0], event[1:]:
            case "s", number:
                load.submitted(int(number), 100, 7)
            case "t", number:
                load.computed(int(number))
            case "e", number:
                load.ended(int(number))
            case _:
                load.reported()
    return load


@pytest.mark.parametrize(
    ("events", "waiting", "sequences"),
    [
        ("", 1000, 0),
        ("s1", 1100, 1),
        ("s1 s2", 1200, 2),
        ("s1 t1", 1000, 1),
        ("s1 t1 t1", 1000, 1),
        ("s1 e1", 1000, 0),
        ("s1 e1 e1", 1000, 0),
        ("s1 r", 1000, 0),
        ("s1 r t1", 900, 0),
        ("s1 r t1 t1", 900, 0),
        ("s1 r e1", 900, 0),
        ("s1 r t1 e1", 900, 0),
        ("s1 r t1 r", 1000, 0),
        ("s1 r s2", 1100, 1),
        ("s1 r s2 t1 t2", 900, 1),
    ],
)
def test_a_report_is_corrected(events: str, waiting: int, sequences: int) -> None:
    load = after(*events.split())
    assert load.waiting_prompt_tokens(1000) == waiting
    assert load.num_sequences == sequences
    assert load.blocks == 7 * sequences


def test_more_is_never_computed_than_waited() -> None:
    assert after("s1", "r", "t1").waiting_prompt_tokens(30) == 0


def test_nothing_is_kept_of_what_ended() -> None:
    load = after(*(f"{event}{number}" for number in range(100) for event in "se"))
    assert not load._uncomputed and not load._unreported
