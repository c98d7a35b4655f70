"""Admission: who waits, who goes, who is refused, on a clock that the test sets."""

import asyncio
import math
from collections import Counter

import pytest

from router.admission import Admission, AdmissionRules, Capacity, Claim, Ticket
from router.errors import ErrorCode, RequestError
from router.service_rate import ServiceRate


class Bench:
    """Admission before workers that the test invents."""

    def __init__(self, **rules: float) -> None:
        self.now_s = 0.0
        self.capacity = Capacity(num_workers=1, tokens_per_s=1000.0, waiting_tokens=0)
        self.refusals: Counter[str] = Counter()
        defaults = {"max_inflight_prompt_tokens": 1600}
        self.admission = Admission(
            AdmissionRules(**{**defaults, **rules}),
            lambda: self.capacity,
            lambda reason: self.refusals.update([reason]),
            lambda: self.now_s,
        )

    async def ask(self, tokens: int = 50, *, key: str = "a", priority: int = 0) -> asyncio.Task[Ticket]:
        """The request as a task, done if it was let in or refused at once."""
        task = asyncio.create_task(self.admission.enter(Claim(key, priority, tokens)))
        await settled()
        return task

    async def ask_many(self, count: int, tokens: int = 50) -> list[asyncio.Task[Ticket]]:
        return [await self.ask(tokens) for _ in range(count)]


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def num_in(tasks: list[asyncio.Task[Ticket]]) -> int:
    return sum(task.done() and task.exception() is None for task in tasks)


def refused(task: asyncio.Task[Ticket]) -> RequestError:
    error = task.exception()
    assert isinstance(error, RequestError) and error.code is ErrorCode.RESOURCE_EXHAUSTED
    assert error.retry_after_s is not None and 1 <= error.retry_after_s <= 60
    return error


@pytest.mark.parametrize("tokens", [1, 50, 1600, 100_000])
async def test_nothing_waits_while_nothing_runs(tokens: int) -> None:
    bench = Bench(max_expected_ttft_s=1)
    assert (await bench.ask(tokens)).result()


@pytest.mark.parametrize(
    ("tokens", "num_workers", "expected"),
    [
        # Prompts under 100 tokens have 400 tokens of each worker, longer ones 1200, and count 400 at most.
        (50, 1, 8),
        (50, 2, 16),
        (200, 1, 6),
        (5000, 1, 3),
        (5000, 3, 9),
    ],
)
async def test_as_many_go_as_the_workers_have_room_for(tokens: int, num_workers: int, expected: int) -> None:
    bench = Bench(max_expected_ttft_s=1e9)
    bench.capacity = Capacity(num_workers, 1000.0, 0)
    tasks = await bench.ask_many(20, tokens)
    assert num_in(tasks) == expected
    assert bench.admission.num_queued == 20 - expected


async def test_a_first_token_makes_room_for_the_next() -> None:
    bench = Bench()
    tasks = await bench.ask_many(10)
    tasks[0].result().generated(1)
    await settled()
    assert num_in(tasks) == 9
    tasks[0].result().generated(1)
    tasks[0].result().leave()
    await settled()
    assert num_in(tasks) == 9


async def test_a_request_that_ends_without_a_token_makes_room_once() -> None:
    bench = Bench()
    tasks = await bench.ask_many(11)
    tasks[0].result().leave()
    tasks[0].result().leave()
    await settled()
    assert num_in(tasks) == 9


async def test_a_short_prompt_does_not_wait_behind_long_ones() -> None:
    bench = Bench(max_expected_ttft_s=1e9)
    await bench.ask_many(20, 5000)
    assert (await bench.ask(50)).result()


async def test_long_prompts_do_not_wait_behind_short_ones() -> None:
    bench = Bench()
    await bench.ask_many(20, 50)
    assert (await bench.ask(5000)).result()


async def test_a_request_that_is_cancelled_leaves_the_queue() -> None:
    bench = Bench()
    tasks = await bench.ask_many(10)
    tasks[8].cancel()
    await settled()
    assert bench.admission.num_queued == 1
    tasks[0].result().generated(1)
    await settled()
    assert num_in([tasks[9]]) == 1


async def test_a_request_that_is_cancelled_in_the_moment_it_is_let_in_gives_its_room_back() -> None:
    bench = Bench()
    tasks = await bench.ask_many(10)
    tasks[0].result().generated(1)
    tasks[8].cancel()
    await settled()
    assert tasks[8].cancelled() and num_in([tasks[9]]) == 1


async def test_a_request_that_is_let_in_in_the_moment_it_is_cancelled_takes_no_room() -> None:
    bench = Bench()
    tasks = await bench.ask_many(10)
    tasks[8].cancel()
    tasks[0].result().generated(1)
    await settled()
    assert tasks[8].cancelled() and num_in([tasks[9]]) == 1


async def test_a_better_priority_goes_first_and_takes_a_place_in_a_full_queue() -> None:
    bench = Bench(max_queued_requests=2)
    tasks = await bench.ask_many(10)
    urgent = await bench.ask(priority=-1)
    refused(tasks[9])
    tasks[0].result().generated(1)
    await settled()
    assert urgent.result() and not tasks[8].done()


async def test_a_full_queue_refuses_at_once_and_lets_in_again_when_it_is_not() -> None:
    bench = Bench(max_queued_requests=2)
    tasks = await bench.ask_many(11)
    assert "2 requests wait" in refused(tasks[10]).message
    assert bench.refusals == {"queue_full": 1}
    for task in tasks[:8]:
        task.result().generated(1)
    await settled()
    assert num_in([*tasks[8:10], await bench.ask()]) == 3


@pytest.mark.parametrize(
    ("waiting_tokens", "tokens", "is_in"),
    [(0, 100, True), (0, 9000, True), (900, 100, True), (901, 100, False), (100, 9000, False)],
)
async def test_who_would_wait_too_long_is_refused(waiting_tokens: int, tokens: int, is_in: bool) -> None:
    """Unless nothing is before it."""
    bench = Bench(max_expected_ttft_s=1)
    bench.capacity = Capacity(1, 1000.0, waiting_tokens)
    task = await bench.ask(tokens)
    if is_in:
        assert task.result()
    else:
        refused(task)
        assert bench.refusals == {"expected_ttft": 1}


async def test_the_hint_is_when_the_wait_will_be_short_enough() -> None:
    bench = Bench(max_expected_ttft_s=10)
    bench.capacity = Capacity(1, 1000.0, 24_000)
    assert refused(await bench.ask(100)).retry_after_s == 15


async def test_one_key_that_floods_the_queue_does_not_get_another_refused() -> None:
    bench = Bench(max_expected_ttft_s=2, max_queued_requests=1000)
    flood = await bench.ask_many(200)
    assert bench.refusals["expected_ttft"] > 0
    assert not (await bench.ask(key="b")).done()
    flood[0].result().generated(1)
    await settled()
    assert bench.refusals["queue_full"] == 0


async def test_workers_that_stand_still_make_the_wait_longer() -> None:
    bench = Bench(max_expected_ttft_s=5)
    await bench.ask_many(20)
    assert bench.admission.expected_ttft_s(Claim("a", 0, 50)) < 5
    bench.now_s = 20.0
    refused(await bench.ask())


async def test_without_a_worker_nobody_waits() -> None:
    bench = Bench()
    tasks = await bench.ask_many(10)
    bench.capacity = Capacity(0, 0.0, 0)
    bench.admission.advance()
    await settled()
    assert num_in([*tasks, await bench.ask()]) == 11
    assert math.isinf(bench.admission.expected_ttft_s(Claim("a", 0, 1)))


async def test_a_worker_that_joins_makes_room() -> None:
    bench = Bench()
    tasks = await bench.ask_many(20)
    bench.capacity = Capacity(2, 2000.0, 0)
    bench.admission.advance()
    await settled()
    assert num_in(tasks) == 16


def test_a_service_rate_follows_what_is_served_and_forgets() -> None:
    rate = ServiceRate()
    assert rate.tokens_per_s(0.0, 7.0) == 7.0
    rate.follow(0.0, 1000.0, num_waiting=1)
    assert rate.tokens_per_s(0.0, 7.0) == 1000.0
    for second in range(1, 61):
        rate.served(float(second), 100)
        rate.follow(float(second), 1000.0, num_waiting=1)
    assert rate.tokens_per_s(60.0, 7.0) == pytest.approx(100, rel=0.1)
    rate.follow(61.0, 1000.0, num_waiting=0)
    assert rate.tokens_per_s(61.0, 7.0) == 7.0
