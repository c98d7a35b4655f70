"""Placement over real workers: requests go where their prefixes are known; too many are refused."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest

from router.block_names import block_names
from tests.cluster.local_cluster import LocalCluster, local_cluster, together, token_request
from tests.engine.engines import prompt_of
from tests.reference import NearTies, Reference
from worker.server import WorkerServer

BLOCK_SIZE = 16
# As a user has it: what costs least, prompts of which little is new with the decode worker too.
BY_COST = {"decode_prefill_tokens": 128, "loaded_prefill_s": 1e9}


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Reference:
    return Reference(tiny_model)


async def router_knows(cluster: LocalCluster, worker: WorkerServer, tokens: Sequence[int]) -> None:
    """Returns when the router has heard that the worker has all full blocks of `tokens`."""
    names = list(block_names(tokens, BLOCK_SIZE, ""))
    fleet = cluster.router.fleet
    seen = 0
    while True:
        sessions = {each.worker_id: each.session for each in fleet.snapshot()}
        found = fleet.observations.prefixes.longest(names)
        if found.get(sessions[worker.worker_id]) == len(names):
            return
        seen = await fleet.next_change(seen)


def worker_of(cluster: LocalCluster, worker_id: str) -> WorkerServer:
    return next(worker for worker in cluster.workers if worker.worker_id == worker_id)


@pytest.mark.parametrize("router_options", [{}, BY_COST], ids=["always-handed-off", "by-cost"])
async def test_the_next_turn_goes_to_the_decode_worker_that_has_the_conversation(
    tiny_model: Path, reference: Reference, router_options: dict
) -> None:
    async with local_cluster(
        tiny_model, prefill=2, decode=2, block_size=BLOCK_SIZE, router_options=router_options
    ) as cluster:
        firsts = [prompt_of(200, seed=seed) for seed in range(1, 7)]
        answers = await together(cluster, [token_request(first, 20, ignore_eos=True) for first in firsts])
        holders = [answer.last.served_by.decode_worker for answer in answers]
        assert set(holders) == {"decode-0", "decode-1"}
        ties = NearTies(1)
        for first, answer, holder in zip(firsts, answers, holders, strict=True):
            said = (*first, *answer.token_ids)
            await router_knows(cluster, worker_of(cluster, holder), said[:-1])
            turn = (*said, *prompt_of(12, seed=99))
            second = await cluster.generate(token_request(turn, 10, ignore_eos=True))
            assert second.last.served_by.decode_worker == holder
            ties.check(second.token_ids, reference.greedy(turn, 10, ignore_eos=True))


async def test_a_long_shared_prefix_is_computed_once(tiny_model: Path) -> None:
    async with local_cluster(tiny_model, prefill=2, decode=2, block_size=BLOCK_SIZE) as cluster:
        shared = prompt_of(448)
        first = await cluster.generate(token_request(shared, 2, ignore_eos=True))
        prefill = worker_of(cluster, first.last.served_by.prefill_worker)
        await router_knows(cluster, prefill, shared)
        requests = [token_request((*shared, *prompt_of(9, seed=seed)), 4) for seed in range(10)]
        answers = await together(cluster, requests)
        assert {answer.last.served_by.prefill_worker for answer in answers} == {prefill.worker_id}
        loads = await cluster.loads()
        assert sum(load.computed_prompt_tokens for load in loads) == 448 + 10 * 9


async def test_more_than_fits_is_refused_and_the_rest_is_right(
    tiny_model: Path, reference: Reference
) -> None:
    """Conformance 22 with real workers."""
    limits = {"max_queued_requests": 8, "max_inflight_prompt_tokens": 128}
    async with local_cluster(tiny_model, block_size=BLOCK_SIZE, router_options=limits) as cluster:
        prompts = [prompt_of(100 + n, seed=n) for n in range(60)]
        outcomes = await asyncio.gather(
            *(cluster.generate(token_request(prompt, 8)) for prompt in prompts), return_exceptions=True
        )
        ties = NearTies(2)
        num_refused = 0
        for prompt, outcome in zip(prompts, outcomes, strict=True):
            if isinstance(outcome, grpc.aio.AioRpcError):
                assert outcome.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                num_refused += 1
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                ties.check(outcome.token_ids, reference.greedy(prompt, 8))
        assert 0 < num_refused < len(prompts)
        again = await cluster.generate(token_request(prompts[0], 8))
        ties.check(again.token_ids, reference.greedy(prompts[0], 8))


async def test_short_prompts_do_not_wait_behind_long_ones(tiny_model: Path) -> None:
    """Conformance 21, on one prefill worker, which begins when all of them are there."""
    async with local_cluster(tiny_model, block_size=BLOCK_SIZE, step_tokens=32) as cluster:
        # The session's own questions to the engine are answered before it is held; all five are let in at
        # once.
        await cluster.generate(token_request(prompt_of(20, seed=60), 2, ignore_eos=True))
        worker = cluster.prefill[0]
        began = threading.Event()
        worker.engine.post(lambda _: began.wait())
        computed: list[int] = []

        async def first_token(num_tokens: int, seed: int) -> None:
            request = token_request(prompt_of(num_tokens, seed=seed), 2, ignore_eos=True)
            stream = cluster.client.Generate(request, timeout=120)
            await anext(aiter(stream))
            computed.append(num_tokens)
            async for _ in stream:
                pass

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(first_token(480, seed)) for seed in range(4)]
            tasks.append(group.create_task(first_token(20, seed=50)))
            while len(worker.legs) < len(tasks):
                await asyncio.wait(tasks, timeout=0.01)
            began.set()
        assert computed.index(20) < len(computed) / 2
