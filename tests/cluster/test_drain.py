"""A worker that leaves gets nothing new, finishes what it has, and gives back what takes too long."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx
import pytest

from engine.engine import Engine
from protos.inference_pb2 import GenerateRequest
from tests.cluster.failures import Role
from tests.cluster.local_cluster import LocalCluster, local_cluster, together, token_request
from tests.engine.engines import prompt_of
from worker.server import WorkerServer

REQUESTS = [
    token_request(prompt_of(300, seed=n), 120, temperature=1.0, seed=n, ignore_eos=True) for n in range(8)
]


@pytest.fixture
async def cluster(tiny_model: Path) -> AsyncIterator[LocalCluster]:
    async with local_cluster(tiny_model, prefill=2, decode=2, step_tokens=64) as running:
        yield running
        await running.wait_clean()


def first_of(cluster: LocalCluster, role: Role) -> WorkerServer:
    return cluster.prefill[0] if role is Role.PREFILL else cluster.decode[0]


async def until_busy(worker: WorkerServer) -> None:
    """It has some requests, and its engine computes for them."""
    while not (await worker.engine.call(Engine.load)).num_running:
        pass


def uncached(requests: Sequence[GenerateRequest]) -> list[GenerateRequest]:
    """The same, of which no worker has a prefix."""
    return [
        GenerateRequest(token_ids=each.token_ids, sampling=each.sampling, cache_salt="fresh")
        for each in requests
    ]


async def retries(cluster: LocalCluster, cause: str) -> float:
    async with httpx.AsyncClient(base_url=f"http://{cluster.router.http_address}") as client:
        lines = (await client.get("/metrics")).text.splitlines()
    name = f'baton_request_retries_total{{cause="{cause}"}}'
    return sum(float(line.split()[1]) for line in lines if line.startswith(name))


@pytest.mark.parametrize("role", Role, ids=lambda role: role.value)
async def test_what_is_not_finished_at_the_limit_goes_on_elsewhere_and_the_client_sees_nothing(
    cluster: LocalCluster, role: Role
) -> None:
    undisturbed = await together(cluster, REQUESTS)
    worker = first_of(cluster, role)
    running = asyncio.create_task(together(cluster, uncached(REQUESTS)))
    await until_busy(worker)
    await worker.drain(0)
    assert len(worker.legs) == 0
    answers = await running
    for answer, expected in zip(answers, undisturbed, strict=True):
        assert (answer.token_ids, answer.text) == (expected.token_ids, expected.text)
    assert await retries(cluster, "draining") > 0


async def test_a_decode_worker_that_leaves_hands_its_sequences_on(cluster: LocalCluster) -> None:
    undisturbed = await together(cluster, REQUESTS)
    leaving, successor = cluster.decode
    generated = (await leaving.engine.call(Engine.load)).generated_tokens
    running = asyncio.create_task(together(cluster, uncached(REQUESTS)))
    # Several streams are under way there, and nobody else has their KV.
    while (await leaving.engine.call(Engine.load)).generated_tokens < generated + 100:
        pass
    await leaving.drain(0)
    answers = await running
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in undisturbed]
    sent = leaving.monitor.registry.get_sample_value(
        "baton_kv_sent_bytes_total", {"role": "decode", "transport": "shm"}
    )
    assert sent
    moved = [answer for answer in answers if answer.last.served_by.prefill_worker == leaving.worker_id]
    assert moved
    assert {answer.last.served_by.decode_worker for answer in moved} == {successor.worker_id}


@pytest.mark.parametrize("role", Role, ids=lambda role: role.value)
async def test_what_runs_finishes_where_it_is_and_nothing_new_comes(
    cluster: LocalCluster, role: Role
) -> None:
    worker = first_of(cluster, role)
    running = asyncio.create_task(together(cluster, uncached(REQUESTS)))
    await until_busy(worker)
    mine = set(worker.legs._legs)
    draining = asyncio.create_task(worker.drain(60))
    after = await together(cluster, REQUESTS)
    served = [getattr(answer.last.served_by, f"{role.value}_worker") for answer in after]
    assert worker.worker_id not in served
    assert set(worker.legs._legs) <= mine
    await running
    await draining


async def test_a_draining_worker_is_no_place_for_what_another_gives_back(cluster: LocalCluster) -> None:
    undisturbed = await together(cluster, REQUESTS)
    running = asyncio.create_task(together(cluster, uncached(REQUESTS)))
    await until_busy(cluster.decode[0])
    await until_busy(cluster.decode[1])
    await asyncio.gather(*(worker.drain(0) for worker in (*cluster.decode, cluster.prefill[0])))
    answers = await running
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in undisturbed]
    assert {answer.last.served_by.decode_worker for answer in answers} == {"prefill-1"}
