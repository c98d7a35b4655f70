"""Conformance 22 at the router: a bounded queue, a refusal at once with a hint, an order in what waits."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import openai
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from protos.inference_pb2_grpc import InferenceStub
from protos.worker_pb2 import LoadReport
from router.router_server import RouterServer
from tests.cluster.router_bench import Reply, generate, running_router, token_request, until
from tests.cluster.scripted_worker import DEADLINE_S, ScriptedWorker, SubmittedLeg

# Of three-token prompts four are let to the worker, and four may wait.
RULES = {"max_inflight_prompt_tokens": 16, "max_queued_requests": 4}
NUM_INFLIGHT, NUM_QUEUED = 4, 4


@dataclass(frozen=True)
class Small:
    """A router of which little is enough to fill it."""

    router: RouterServer
    worker: ScriptedWorker
    http: httpx.AsyncClient

    async def queued(self, count: int) -> None:
        """Waits until so many requests wait in the router."""
        async with asyncio.timeout(DEADLINE_S):
            while (await self.metrics())["baton_num_requests_waiting"] != count:
                pass

    async def metrics(self) -> dict[str, float]:
        lines = (await self.http.get("/metrics")).text.splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in samples}

    async def legs(self, count: int) -> list[SubmittedLeg]:
        return [await self.worker.next_leg() for _ in range(count)]

    def ask(self, *, priority: int = 0, name: str = "") -> asyncio.Task[Reply]:
        request = token_request(max_tokens=2)
        request.priority, request.request_id = priority, name
        return asyncio.create_task(generate(self.router, request))


@pytest.fixture
async def small(tiny_model: Path, scripted_decode: ScriptedWorker) -> AsyncIterator[Small]:
    async with (
        running_router(tiny_model, decode=[scripted_decode], **RULES) as router,
        httpx.AsyncClient(base_url=f"http://{router.http_address}", timeout=DEADLINE_S) as http,
    ):
        yield Small(router, scripted_decode, http)


def answer(leg: SubmittedLeg) -> None:
    leg.say_tokens(0, [5])
    leg.say_tokens(1, [6])
    leg.say_finished()


async def finish(small: Small, tasks: list[asyncio.Task[Reply]]) -> None:
    """Answers whatever comes until all have their replies."""

    async def answer_all() -> None:
        while True:
            answer(await small.worker.submitted.get())

    answering = asyncio.create_task(answer_all())
    try:
        replies = await asyncio.gather(*tasks)
    finally:
        answering.cancel()
    assert all(reply.token_ids == [5, 6] for reply in replies)


async def fill(small: Small) -> tuple[list[asyncio.Task[Reply]], list[SubmittedLeg]]:
    """All that the worker and the queue take; of those at the worker, the legs."""
    tasks = [small.ask() for _ in range(NUM_INFLIGHT + NUM_QUEUED)]
    legs = await small.legs(NUM_INFLIGHT)
    await small.queued(NUM_QUEUED)
    return tasks, legs


async def test_beyond_the_queue_requests_are_refused_at_once_with_a_hint(small: Small) -> None:
    tasks, legs = await fill(small)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await small.ask()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    status = rpc_status.from_call(caught.value)
    hint = error_details_pb2.RetryInfo()
    assert status is not None and any(detail.Unpack(hint) for detail in status.details)
    assert 1 <= hint.retry_delay.seconds <= 60
    for leg in legs:
        answer(leg)
    await finish(small, tasks)


async def test_over_http_it_is_a_429_that_openais_client_knows(small: Small) -> None:
    tasks, legs = await fill(small)
    client = openai.AsyncOpenAI(
        base_url=f"http://{small.router.http_address}/v1", api_key="none", max_retries=0
    )
    with pytest.raises(openai.RateLimitError) as caught:
        await client.completions.create(model="tiny", prompt=[5, 6, 7])
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
    assert caught.value.type == "rate_limit_error"
    for leg in legs:
        answer(leg)
    await finish(small, tasks)


async def test_a_flood_leaves_the_queue_bounded_and_then_all_is_as_before(small: Small) -> None:
    tasks = [small.ask() for _ in range(500)]
    legs = await small.legs(NUM_INFLIGHT)
    done, pending = set(tasks), set()
    while len(pending) != NUM_INFLIGHT + NUM_QUEUED:
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        tasks = [*pending]
        assert (await small.metrics())["baton_num_requests_waiting"] <= NUM_QUEUED
    assert all(task.exception().code() is grpc.StatusCode.RESOURCE_EXHAUSTED for task in done)
    for leg in legs:
        answer(leg)
    await finish(small, tasks)
    figures = await small.metrics()
    assert figures["baton_num_requests_waiting"] == figures["baton_num_requests_running"] == 0
    assert figures['baton_admission_refusals_total{reason="queue_full"}'] == 500 - NUM_INFLIGHT - NUM_QUEUED
    await finish(small, [small.ask()])


async def test_what_waits_goes_by_priority_then_by_arrival(small: Small) -> None:
    first = [small.ask() for _ in range(NUM_INFLIGHT)]
    legs = await small.legs(NUM_INFLIGHT)
    waiting = []
    for count, (name, priority) in enumerate((("a", 0), ("b", 0), ("low", 1), ("high", -1)), start=1):
        waiting.append(small.ask(priority=priority, name=name))
        await small.queued(count)
    order = []
    for leg in legs:
        answer(leg)
        follower = await small.worker.next_leg()
        order.append(follower.submit.request_id)
        answer(follower)
    await asyncio.gather(*first, *waiting)
    assert order == ["high", "a", "b", "low"]


async def test_priority_is_a_field_of_the_http_door_too(small: Small) -> None:
    tasks, legs = await fill(small)
    body = {"prompt": [5, 6, 7], "max_tokens": 2, "priority": -1}
    urgent = asyncio.create_task(small.http.post("/v1/completions", json=body))
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    assert [task.exception().code() for task in done] == [grpc.StatusCode.RESOURCE_EXHAUSTED]
    for leg in legs:
        answer(leg)
    await finish(small, [task for task in tasks if task not in done])
    assert (await urgent).status_code == 200


async def test_a_client_that_hangs_up_leaves_the_queue(small: Small) -> None:
    tasks, legs = await fill(small)
    tasks[-1].cancel()
    await small.queued(NUM_QUEUED - 1)
    for leg in legs:
        answer(leg)
    await finish(small, tasks[:-1])
    assert small.worker.submitted.empty()


async def test_a_deadline_ends_the_wait(small: Small) -> None:
    tasks, legs = await fill(small)
    tasks[-1].cancel()
    await small.queued(NUM_QUEUED - 1)
    async with grpc.aio.insecure_channel(small.router.grpc_address) as channel:
        call = InferenceStub(channel).Generate(token_request(max_tokens=2), timeout=0.5)
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await small.queued(NUM_QUEUED - 1)
    for leg in legs:
        answer(leg)
    await finish(small, tasks[:-1])


async def test_a_request_whose_first_token_would_come_too_late_is_refused(small: Small) -> None:
    small.worker.report(
        LoadReport(num_blocks=9, free_blocks=9, waiting_prompt_tokens=50_000, prefill_tokens_per_s=500)
    )
    await until(small.router, lambda workers: workers[0].waiting_prompt_tokens == 50_000)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await small.ask()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    small.worker.report(LoadReport(num_blocks=9, free_blocks=9, prefill_tokens_per_s=500))
    await until(small.router, lambda workers: workers[0].waiting_prompt_tokens == 0)
    await finish(small, [small.ask()])


async def test_a_dead_worker_frees_what_waits_for_it(small: Small) -> None:
    tasks, _ = await fill(small)
    await small.worker.die()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert Counter(type(outcome) for outcome in outcomes) == {grpc.aio.AioRpcError: len(tasks)}
    assert {outcome.code() for outcome in outcomes} == {grpc.StatusCode.UNAVAILABLE}
