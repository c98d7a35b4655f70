"""Placement as tables: who is chosen, what it costs, and when no KV is handed over."""

from random import Random

import pytest

from router.cluster_view import Role, WorkerSnapshot
from router.link_rates import START_BYTES_PER_S, LinkRates
from router.placement import Alone, Decision, Pair, Placement, PlacementInputs, PlacementRules, decide
from router.placement_cost import DISTURBANCE, Cost, Need, alone_cost, decode_s, has_room, pair_cost


def worker(worker_id: str, **changes: object) -> WorkerSnapshot:
    """p... prefills, d... decodes; idle unless said."""
    defaults: dict[str, object] = {
        "address": f"{worker_id}:1",
        "worker_id": worker_id,
        "epoch": 1,
        "session": f"session-{worker_id}",
        "role": Role.PREFILL if worker_id.startswith("p") else Role.DECODE,
        "fingerprint": "model",
        "wire_dtype": "bfloat16",
        "accepted_dtypes": frozenset({"bfloat16"}),
        "block_size": 16,
        "capacity_tokens": 4096,
        "token_bytes": 1000,
        "num_blocks": 100,
        "free_blocks": 100,
        "num_running": 0,
        "num_waiting": 0,
        "waiting_prompt_tokens": 0,
        "step_s": 0.02,
        "prefill_tokens_per_s": 1000.0,
        "draining": False,
    }
    return WorkerSnapshot(**{**defaults, **changes})


def decided(
    workers: tuple[WorkerSnapshot, ...],
    *,
    num_tokens: int = 50,
    max_new_tokens: int = 10,
    cached: dict[str, int] | None = None,
    rates: dict[tuple[str, str], float] | None = None,
    chance: int = 0,
    mover: WorkerSnapshot | None = None,
    **rules: float,
) -> Decision | None:
    """
    Args:
        cached: tokens, by the worker's id.
        rates: bytes a second, by the workers' ids. Links that are not in it are infinitely fast.
    """

    def bytes_per_s(prefill: str, decode: str) -> float:
        return (rates or {}).get((prefill, decode), float("inf"))

    tokens = {f"session-{name}": count for name, count in (cached or {}).items()}
    inputs = PlacementInputs(tokens, bytes_per_s, Random(chance))
    return decide(Need(num_tokens, max_new_tokens), workers, inputs, PlacementRules(**rules), mover)


def name(placement: Placement) -> str:
    match placement:
        case Pair(prefill, decode):
            return f"{prefill.worker_id} {decode.worker_id}"
        case Alone(alone):
            return alone.worker_id


def names(decision: Decision | None) -> str | None:
    return None if decision is None else name(decision.chosen.placement)


IDLE = (worker("p0"), worker("p1"), worker("d0"), worker("d1"))


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        pytest.param((), None, id="nobody"),
        pytest.param(IDLE, "p0 d0", id="equals-as-they-are-listed"),
        pytest.param((worker("p0"),), "p0", id="no-decode-worker"),
        pytest.param((worker("d0"),), "d0", id="no-prefill-worker"),
        pytest.param(
            (worker("p0", waiting_prompt_tokens=10), *IDLE[1:]), "p1 d0", id="fewest-waiting-prompt-tokens"
        ),
        pytest.param(
            (worker("p0", prefill_tokens_per_s=900.0), *IDLE[1:]), "p1 d0", id="the-faster-prefill-worker"
        ),
        pytest.param((worker("p0", num_waiting=1), *IDLE[1:]), "p1 d0", id="then-fewest-sequences"),
        pytest.param((*IDLE[:2], worker("d0", free_blocks=90), IDLE[3]), "p0 d1", id="most-free-blocks"),
        pytest.param((*IDLE[:2], worker("d0", step_s=0.03), IDLE[3]), "p0 d1", id="the-faster-decode-worker"),
        pytest.param((*IDLE[:2], worker("d0", num_running=1), IDLE[3]), "p0 d1", id="then-least-running"),
        pytest.param(
            (*IDLE[:2], worker("d0", free_blocks=3, num_blocks=10_000), worker("d1", free_blocks=20)),
            "p0 d1",
            id="a-full-one-is-out",
        ),
        pytest.param(
            (*IDLE[:2], worker("d0", free_blocks=0), worker("d1", free_blocks=2)),
            "p0 d1",
            id="all-full-the-soonest",
        ),
        pytest.param(
            (*IDLE[:2], worker("d0", free_blocks=0, num_waiting=5), worker("d1", free_blocks=0)),
            "p0 d1",
            id="all-full-the-shorter-queue",
        ),
        pytest.param((worker("p0", draining=True), *IDLE[1:]), "p1 d0", id="draining-prefill"),
        pytest.param((*IDLE[:2], worker("d0", draining=True), IDLE[3]), "p0 d1", id="draining-decode"),
        pytest.param((worker("p0", draining=True), worker("d0")), "d0", id="only-prefill-drains"),
        pytest.param((worker("p0"), worker("d0", draining=True)), "p0", id="only-decode-drains"),
        pytest.param((worker("p0", draining=True), worker("d0", draining=True)), None, id="all-drain"),
        pytest.param((worker("p0", fingerprint="old"), worker("d0")), "d0", id="unequal-models-never-pair"),
        pytest.param((worker("p0", wire_dtype="int8"), worker("d0")), "d0", id="a-dtype-that-is-not-taken"),
        pytest.param(
            (
                worker("p0", wire_dtype="int8"),
                worker("d0", accepted_dtypes=frozenset({"bfloat16", "int8"})),
            ),
            "p0 d0",
            id="a-dtype-that-is-converted",
        ),
        pytest.param(
            (worker("p0", fingerprint="old"), worker("p1", waiting_prompt_tokens=9), worker("d0")),
            "p1 d0",
            id="the-pair-that-can-is-found",
        ),
        pytest.param(
            (worker("p0"), worker("d0", fingerprint="old", num_blocks=999, free_blocks=999), worker("d1")),
            "p0 d1",
            id="the-partner-that-can-is-found",
        ),
    ],
)
def test_by_load(workers: tuple[WorkerSnapshot, ...], expected: str | None) -> None:
    assert names(decided(workers)) == expected


@pytest.mark.parametrize(
    ("cached", "changes", "expected"),
    [
        pytest.param({"p1": 480}, {}, "p1 d0", id="the-prefill-worker-that-has-it"),
        pytest.param({"p1": 480}, {"p1": {"waiting_prompt_tokens": 470}}, "p1 d0", id="worth-a-shorter-wait"),
        pytest.param({"p1": 480}, {"p1": {"waiting_prompt_tokens": 490}}, "p0 d0", id="not-worth-a-longer"),
        pytest.param({"p0": 160, "p1": 320}, {}, "p1 d0", id="the-longer-prefix"),
        pytest.param({"d1": 160}, {}, "p0 d1", id="the-decode-worker-that-has-it"),
        pytest.param({"d1": 160}, {"d1": {"free_blocks": 90}}, "p0 d1", id="though-it-is-fuller"),
        pytest.param({"d1": 160}, {"d1": {"free_blocks": 3}}, "p0 d0", id="but-not-though-it-is-full"),
        pytest.param({"p1": 480, "d1": 160}, {}, "p1 d1", id="both"),
        pytest.param({"p1": 480}, {"p1": {"draining": True}}, "p0 d0", id="not-one-that-leaves"),
    ],
)
def test_by_prefix(cached: dict[str, int], changes: dict[str, dict], expected: str) -> None:
    """500 tokens at 1000 a second; 500 kB at 1 MB/s."""
    workers = tuple(worker(each.worker_id, **changes.get(each.worker_id, {})) for each in IDLE)
    rates = {(p, d): 1e6 for p in ("p0", "p1") for d in ("d0", "d1")}
    assert names(decided(workers, num_tokens=500, cached=cached, rates=rates)) == expected


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({("p0", "d0"): 1e6}, "p0 d1"),
        ({("p0", "d0"): 1e6, ("p0", "d1"): 2e6, ("p1", "d0"): 3e6, ("p1", "d1"): 1e6}, "p1 d0"),
    ],
)
def test_by_link(rates: dict[tuple[str, str], float], expected: str) -> None:
    assert names(decided(IDLE, rates=rates)) == expected


@pytest.mark.parametrize(
    ("num_tokens", "max_new_tokens", "cached", "expected"),
    [
        (21, 2, {}, "p0 d0"),
        (20, 2, {}, "d0"),
        (21, 1, {}, "p0"),
        (20, 1, {}, "p0"),
        (520, 2, {"d1": 496}, "p0 d1"),
        (516, 2, {"d1": 496}, "d1"),
        (516, 1, {"p1": 496}, "p1"),
    ],
)
def test_short_work_is_never_handed_off(
    num_tokens: int, max_new_tokens: int, cached: dict[str, int], expected: str
) -> None:
    decision = decided(
        IDLE,
        num_tokens=num_tokens,
        max_new_tokens=max_new_tokens,
        cached=cached,
        rates={(p, d): 1e6 for p in ("p0", "p1") for d in ("d0", "d1")},
        local_prefill_tokens=20,
        decode_prefill_tokens=0,
    )
    assert names(decision) == expected


@pytest.mark.parametrize(
    ("cached", "changes", "rules", "expected"),
    [
        pytest.param({"d1": 480}, {}, {}, "d1", id="it-lacks-little"),
        pytest.param({"d1": 400}, {}, {}, "d1", id="at-most-128-tokens"),
        pytest.param({"d1": 368}, {}, {}, "p0 d1", id="not-more"),
        pytest.param({"d1": 480}, {}, {"decode_prefill_tokens": 19}, "p0 d1", id="not-more-than-the-rule"),
        pytest.param({"d1": 480, "p1": 496}, {}, {}, "p1 d1", id="unless-a-pair-costs-less"),
        pytest.param({"d1": 480}, {"d1": {"num_running": 3}}, {}, "d1", id="beside-some-streams"),
        pytest.param(
            {"d1": 480, "p1": 480}, {"d1": {"num_running": 30}}, {}, "p1 d1", id="not-beside-many-streams"
        ),
    ],
)
def test_a_decode_worker_that_lacks_little_prefills(
    cached: dict[str, int], changes: dict[str, dict], rules: dict[str, int], expected: str
) -> None:
    """500 tokens; 500 kB at 10 MB/s."""
    workers = tuple(worker(each.worker_id, **changes.get(each.worker_id, {})) for each in IDLE)
    rates = {(p, d): 1e7 for p in ("p0", "p1") for d in ("d0", "d1")}
    assert names(decided(workers, num_tokens=500, cached=cached, rates=rates, **rules)) == expected


@pytest.mark.parametrize(
    ("waiting", "num_running", "expected"),
    [
        pytest.param(1999, 0, "p0 d0", id="a-wait-that-is-not-too-long"),
        pytest.param(2001, 0, "d0", id="a-loaded-prefill-pool"),
        pytest.param(2001, 24, "p0 d0", id="but-not-beside-many-streams"),
        pytest.param(9000, 24, "d0", id="unless-the-wait-is-worse"),
    ],
)
def test_decode_workers_help_a_loaded_prefill_pool(waiting: int, num_running: int, expected: str) -> None:
    workers = (
        worker("p0", waiting_prompt_tokens=waiting),
        worker("d0", num_running=num_running),
    )
    assert names(decided(workers, num_tokens=500)) == expected


def test_one_token_is_decoded_by_the_decode_worker_when_there_is_no_other() -> None:
    assert names(decided((worker("d0"),), max_new_tokens=1)) == "d0"


LARGE = tuple(worker(f"{role}{n:02}") for role in "pd" for n in range(20))


def test_of_a_large_pool_only_some_are_compared() -> None:
    decision = decided(LARGE)
    assert decision is not None and len(decision.candidates) <= 9


def test_large_pools_are_drawn_from_evenly() -> None:
    drawn = {names(decided(LARGE, chance=chance)) for chance in range(200)}
    assert len({pair.split()[0] for pair in drawn if pair}) == 20
    assert len({pair.split()[1] for pair in drawn if pair}) == 20


@pytest.mark.parametrize("chance", range(20))
def test_the_longest_prefix_of_a_large_pool_is_always_compared(chance: int) -> None:
    cached = {"p07": 480, "d11": 320}
    rates = {(p.worker_id, d.worker_id): 1e6 for p in LARGE[:20] for d in LARGE[20:]}
    assert names(decided(LARGE, num_tokens=500, cached=cached, rates=rates, chance=chance)) == "p07 d11"


def test_what_was_weighed_is_told_the_cheapest_first() -> None:
    decision = decided((worker("p0", waiting_prompt_tokens=100), worker("p1"), worker("d0")))
    assert decision is not None
    assert [name(candidate.placement) for candidate in decision.candidates] == ["p1 d0", "p0 d0"]
    costs = [candidate.cost.total_s for candidate in decision.candidates]
    assert costs[1] - costs[0] == pytest.approx(0.1)


def test_the_cost_of_a_pair() -> None:
    cost = pair_cost(
        Need(500, 100),
        worker("p0", waiting_prompt_tokens=300),
        worker("d0", free_blocks=68),
        cached_prefill=200,
        cached_decode=100,
        bytes_per_s=1e6,
    )
    # 32 blocks beside 32 of 100, for 16 tokens.
    assert cost == pytest.approx(Cost(0.3, 0.3, 0.4, 0.64 * 16 * 0.02, 0.0))


def test_the_cost_of_one_worker_counts_the_streams_beside() -> None:
    cost = alone_cost(Need(500, 100), worker("d0", num_running=4), 400)
    assert cost.prefill_s == pytest.approx(0.1)
    assert cost.disturbance_s == pytest.approx(DISTURBANCE * 4 * 0.1)


def test_rates_that_nobody_has_measured_have_start_values() -> None:
    cost = alone_cost(Need(500, 100), worker("d0", step_s=0.0, prefill_tokens_per_s=0.0), 0)
    assert cost.prefill_s == 0.5 and cost.decode_s > 0


@pytest.mark.parametrize(
    ("free_blocks", "num_running", "expected"), [(4, 0, True), (3, 0, False), (6, 2, True), (5, 2, False)]
)
def test_room_is_for_the_tokens_the_next_one_and_a_block_for_each_stream(
    free_blocks: int, num_running: int, expected: bool
) -> None:
    full = worker("d0", free_blocks=free_blocks, num_running=num_running)
    assert has_room(Need(48, 10), full) is expected


def test_blocks_that_are_short_come_free_as_tokens_are_written() -> None:
    need = Need(159, 1)
    has_all, lacks_ten = (worker("d0", free_blocks=free, num_running=8) for free in (10, 0))
    # Ten blocks of 16 tokens, 8 tokens a step of 20 ms; and the share of the pool that is full.
    assert decode_s(need, lacks_ten) - decode_s(need, has_all) == pytest.approx(10 * 16 / 8 * 0.02)


def test_a_link_starts_with_a_guess_and_follows_what_is_measured() -> None:
    links = LinkRates()
    assert links.bytes_per_s("p", "d") == pytest.approx(START_BYTES_PER_S)
    for _ in range(50):
        links.measured("p", "d", 10_000_000, 0.1)
    assert links.bytes_per_s("p", "d") == pytest.approx(1e8, rel=0.05)
    for _ in range(50):
        links.measured("p", "d", 10_000_000, 0.01)
    assert links.bytes_per_s("p", "d") == pytest.approx(1e9, rel=0.05)


def test_a_pair_without_a_hand_off_is_taken_for_the_others() -> None:
    links = LinkRates()
    for _ in range(50):
        links.measured("p", "d", 10_000_000, 0.1)
    assert links.bytes_per_s("p", "other") == pytest.approx(1e8, rel=0.05)
    for _ in range(50):
        links.measured("p", "other", 10_000_000, 1.0)
    assert links.bytes_per_s("p", "d") == pytest.approx(1e8, rel=0.05)


def test_large_hand_offs_say_more_than_small_ones() -> None:
    links = LinkRates()
    for _ in range(50):
        links.measured("p", "d", 100_000_000, 0.2)
        links.measured("p", "d", 1_000, 0.005)
    assert links.bytes_per_s("p", "d") == pytest.approx(5e8, rel=0.05)


@pytest.mark.parametrize(("num_bytes", "seconds"), [(0, 0.01), (1000, 0.0)])
def test_a_hand_off_that_says_nothing_changes_nothing(num_bytes: int, seconds: float) -> None:
    links = LinkRates()
    links.measured("p", "d", num_bytes, seconds)
    assert links.bytes_per_s("p", "d") == pytest.approx(START_BYTES_PER_S)


LEAVING = worker("d9", draining=True)
SLOW = {("d9", "d0"): 1e6, ("d9", "d1"): 1e6}


@pytest.mark.parametrize(
    ("workers", "told", "expected"),
    [
        pytest.param(IDLE, {"cached": {"d9": 496}}, "d9 d0", id="cheaper-than-computing-again"),
        pytest.param(IDLE, {"cached": {"d9": 496}, "rates": SLOW}, "p0 d0", id="over-a-slow-link-it-is-not"),
        pytest.param(IDLE, {"cached": {"d9": 480}}, "p0 d0", id="it-computes-no-more-than-a-block"),
        pytest.param(IDLE, {"cached": {"d9": 496, "p0": 496}}, "p0 d0", id="others-have-it-too"),
        pytest.param(IDLE, {"cached": {"d9": 496}, "max_new_tokens": 1}, "p0", id="nothing-to-decode"),
        pytest.param((worker("d0"),), {"cached": {"d9": 496}}, "d9 d0", id="no-prefill-worker"),
        pytest.param((worker("p0"),), {"cached": {"d9": 496}}, "d9 p0", id="no-other-decode-worker"),
        pytest.param((), {"cached": {"d9": 496}}, None, id="nobody-takes-it"),
        pytest.param(
            (worker("p0"), worker("d0", fingerprint="other")),
            {"cached": {"d9": 496}},
            "d0",
            id="nobody-who-can-take-it",
        ),
    ],
)
def test_a_worker_that_leaves_hands_on_what_it_has_where_that_is_cheaper(
    workers: tuple[WorkerSnapshot, ...], told: dict, expected: str | None
) -> None:
    assert names(decided(workers, num_tokens=500, mover=LEAVING, **told)) == expected
