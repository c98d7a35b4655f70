"""Placement as a table."""

import pytest

from router.cluster_view import Role, WorkerSnapshot
from router.placement import Alone, Pair, place


def worker(worker_id: str, **changes: object) -> WorkerSnapshot:
    """p... prefills, d... decodes; idle unless said."""
    defaults: dict[str, object] = {
        "address": f"{worker_id}:1",
        "worker_id": worker_id,
        "epoch": 1,
        "session": f"session-{worker_id}",
        "role": Role.PREFILL if worker_id.startswith("p") else Role.DECODE,
        "fingerprint": "model",
        "pairing": "model",
        "block_size": 16,
        "capacity_tokens": 4096,
        "free_blocks": 100,
        "num_running": 0,
        "num_waiting": 0,
        "waiting_prompt_tokens": 0,
        "draining": False,
    }
    return WorkerSnapshot(**{**defaults, **changes})


IDLE = (worker("p0"), worker("p1"), worker("d0"), worker("d1"))


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        pytest.param((), None, id="nobody"),
        pytest.param(IDLE, "p0 d0", id="equals-by-name"),
        pytest.param((worker("p0"),), "p0", id="no-decode-worker"),
        pytest.param((worker("d0"),), "d0", id="no-prefill-worker"),
        pytest.param(
            (worker("p0", waiting_prompt_tokens=10), *IDLE[1:]), "p1 d0", id="fewest-waiting-prompt-tokens"
        ),
        pytest.param((worker("p0", num_waiting=1), *IDLE[1:]), "p1 d0", id="then-fewest-sequences"),
        pytest.param((*IDLE[:2], worker("d0", free_blocks=99), IDLE[3]), "p0 d1", id="most-free-blocks"),
        pytest.param((*IDLE[:2], worker("d0", num_running=1), IDLE[3]), "p0 d1", id="then-least-running"),
        pytest.param((worker("p0", draining=True), *IDLE[1:]), "p1 d0", id="draining-prefill"),
        pytest.param((*IDLE[:2], worker("d0", draining=True), IDLE[3]), "p0 d1", id="draining-decode"),
        pytest.param((worker("p0", draining=True), worker("d0")), "d0", id="only-prefill-drains"),
        pytest.param((worker("p0"), worker("d0", draining=True)), "p0", id="only-decode-drains"),
        pytest.param((worker("p0", draining=True), worker("d0", draining=True)), None, id="all-drain"),
        pytest.param((worker("p0", pairing="old"), worker("d0")), "d0", id="unequal-models-never-pair"),
        pytest.param(
            (worker("p0", pairing="old"), worker("p1", waiting_prompt_tokens=9), worker("d0")),
            "p1 d0",
            id="the-pair-that-can-is-found",
        ),
        pytest.param(
            (worker("p0"), worker("d0", pairing="old", free_blocks=999), worker("d1")),
            "p0 d1",
            id="the-partner-that-can-is-found",
        ),
    ],
)
def test_placement(workers: tuple[WorkerSnapshot, ...], expected: str | None) -> None:
    placed = place(workers, num_prompt_tokens=50, max_tokens=10, local_prefill_tokens=0)
    assert names(placed) == expected


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "expected"),
    [(21, 2, "p0 d0"), (20, 2, "d0"), (21, 1, "p0"), (20, 1, "p0")],
)
def test_short_work_is_not_handed_off(num_prompt_tokens: int, max_tokens: int, expected: str) -> None:
    placed = place(IDLE, num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens, local_prefill_tokens=20)
    assert names(placed) == expected


def test_one_token_is_decoded_by_the_decode_worker_when_there_is_no_other() -> None:
    placed = place([worker("d0")], num_prompt_tokens=50, max_tokens=1, local_prefill_tokens=0)
    assert names(placed) == "d0"


def names(placed: Pair | Alone | None) -> str | None:
    match placed:
        case Pair(prefill, decode):
            return f"{prefill.worker_id} {decode.worker_id}"
        case Alone(alone):
            return alone.worker_id
        case None:
            return None
