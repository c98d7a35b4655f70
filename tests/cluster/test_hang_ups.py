"""Clients that go away, at any moment, by any door."""

import asyncio
import random
from pathlib import Path

import httpx
import pytest

from protos import inference_pb2
from tests.cluster.local_cluster import LocalCluster, local_cluster, token_request
from tests.engine.engines import prompt_of
from tests.reference import NearTies, Reference

CLIENTS = 100


@pytest.fixture
async def cluster(tiny_model: Path):
    # Blocks for a few of the requests only: many are cancelled while they wait for a grant.
    async with local_cluster(tiny_model, step_tokens=64, kv_cache_bytes=2 << 20) as running:
        yield running


async def hang_up_after(
    cluster: LocalCluster, request: inference_pb2.GenerateRequest, num_tokens: int
) -> None:
    """Reads that many tokens, then cancels the call; 0 cancels before the first."""
    call = cluster.client.Generate(request)
    received = 0
    while received < num_tokens:
        received += len((await call.read()).token_ids)
    call.cancel()


async def test_a_hundred_clients_that_hang_up_leave_both_workers_clean(
    cluster: LocalCluster, tiny_model: Path
):
    """Conformance 2 and 16."""
    chance = random.Random(0)
    for start in range(0, CLIENTS, 20):
        await asyncio.gather(
            *(
                hang_up_after(
                    cluster,
                    token_request(prompt_of(chance.randint(1, 400), seed=n), 200, ignore_eos=True),
                    chance.choice((0, 0, 1, 2, 5, 20)),
                )
                for n in range(start, start + 20)
            )
        )
    # The sessions are ordered: with this answer the workers have heard every cancel.
    answer = await cluster.generate(token_request(prompt_of(70), 20))
    NearTies(0).check(answer.token_ids, Reference(tiny_model).greedy(prompt_of(70), 20))
    await cluster.wait_clean()


async def test_calls_cancelled_in_the_same_moment_as_they_are_made(cluster: LocalCluster):
    for turns in range(40):
        call = asyncio.create_task(cluster.generate(token_request(prompt_of(90), 50)))
        for _ in range(turns):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
    await cluster.generate(token_request(prompt_of(5), 5))
    await cluster.wait_clean()


@pytest.mark.parametrize("stream", [True, False])
async def test_an_http_client_that_hangs_up_frees_both_workers(cluster: LocalCluster, stream: bool):
    body = {"model": "tiny", "prompt": list(prompt_of(50)), "max_tokens": 2000, "stream": stream}
    async with httpx.AsyncClient(base_url=f"http://{cluster.router.http_address}") as client:
        request = client.build_request("POST", "/v1/completions", json=body | {"ignore_eos": True})
        sending = asyncio.create_task(client.send(request, stream=True))
        while not any(load.num_running for load in await cluster.loads()):
            pass
        sending.cancel()
        await asyncio.wait([sending])
    await cluster.wait_clean()


async def test_a_deadline_ends_the_request_on_both_workers(cluster: LocalCluster):
    call = cluster.client.Generate(token_request(prompt_of(50), 2500, ignore_eos=True), timeout=0.3)
    with pytest.raises(Exception, match="DEADLINE_EXCEEDED"):
        async for _ in call:
            pass
    await cluster.wait_clean()
