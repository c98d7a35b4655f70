"""Routers over the same workers know nothing of each other."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest

from protos import inference_pb2_grpc
from router.config import RouterConfig
from router.router_server import RouterServer
from router.worker_directory import StaticDirectory
from tests.cluster.local_cluster import LocalCluster, local_cluster, together, token_request
from tests.engine.engines import prompt_of

REQUESTS = [
    token_request(prompt_of(150, seed=n), 80, temperature=1.0, seed=n, ignore_eos=True) for n in range(8)
]


@pytest.fixture
async def cluster(tiny_model: Path) -> AsyncIterator[LocalCluster]:
    async with local_cluster(tiny_model, prefill=2, decode=2, step_tokens=64) as running:
        yield running
        await running.wait_clean()


@pytest.fixture
async def second(cluster: LocalCluster, tiny_model: Path) -> AsyncIterator[RouterServer]:
    """Over the same workers."""
    directory = StaticDirectory(
        prefill=[proxy.address for proxy in cluster.prefill_proxies],
        decode=[proxy.address for proxy in cluster.proxies],
    )
    router = await RouterServer.start(RouterConfig(model_path=tiny_model, model_name="tiny"), directory)
    seen = 0
    while len(router.fleet.snapshot()) < 4:
        seen = await router.fleet.next_change(seen)
    yield router
    await router.stop()


async def tokens_by(stub: inference_pb2_grpc.InferenceStub, number: int) -> list[int]:
    return [
        id_ async for response in stub.Generate(REQUESTS[number], timeout=60) for id_ in response.token_ids
    ]


async def test_two_routers_at_once_give_the_same_texts_as_one(
    cluster: LocalCluster, second: RouterServer
) -> None:
    expected = [list(answer.token_ids) for answer in await together(cluster, REQUESTS)]
    async with grpc.aio.insecure_channel(second.grpc_address) as channel:
        stubs = (cluster.client, inference_pb2_grpc.InferenceStub(channel))
        calls = [tokens_by(stub, number) for stub in stubs for number in range(len(REQUESTS))]
        assert await asyncio.gather(*calls) == expected * 2


async def test_the_end_of_one_router_drops_its_requests_and_no_others(
    cluster: LocalCluster, second: RouterServer
) -> None:
    expected = [list(answer.token_ids) for answer in await together(cluster, REQUESTS)]
    async with AsyncExitStack() as stack:
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(second.grpc_address))
        endless = token_request(prompt_of(10), 4000, ignore_eos=True)
        doomed = aiter(inference_pb2_grpc.InferenceStub(channel).Generate(endless, timeout=60))
        await anext(doomed)
        running = [asyncio.create_task(tokens_by(cluster.client, n)) for n in range(len(REQUESTS))]
        await second.stop()
        assert await asyncio.gather(*running) == expected
        with pytest.raises(grpc.aio.AioRpcError):
            _ = [response async for response in doomed]
