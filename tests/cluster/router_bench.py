"""A router in this process before scripted workers, and a client of its gRPC door."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from protos import inference_pb2, inference_pb2_grpc
from router.cluster_view import WorkerSnapshot
from router.config import RouterConfig
from router.router_server import RouterServer
from router.worker_directory import StaticDirectory, WorkerDirectory
from tests.cluster.scripted_worker import DEADLINE_S, ScriptedWorker, SubmittedLeg

PROMPT = (5, 6, 7)


async def until(router: RouterServer, condition: Callable[[tuple[WorkerSnapshot, ...]], bool]) -> None:
    """Waits for the router to see its workers so."""
    async with asyncio.timeout(DEADLINE_S):
        seen = 0
        while not condition(router.fleet.snapshot()):
            seen = await router.fleet.next_change(seen)


@asynccontextmanager
async def running_router(
    model: Path,
    *,
    prefill: Sequence[ScriptedWorker] = (),
    decode: Sequence[ScriptedWorker] = (),
    stall_limit_s: float = 300.0,
    rejoin_limit_s: float = 0.0,
    **settings: float,
) -> AsyncIterator[RouterServer]:
    """Connected to all of the workers. Its model is called "tiny"."""
    settings |= {"stall_limit_s": stall_limit_s, "rejoin_limit_s": rejoin_limit_s}
    directory = StaticDirectory(
        prefill=[worker.address for worker in prefill], decode=[worker.address for worker in decode]
    )
    async with started_router(model, directory, **settings) as router:
        expected = len(prefill) + len(decode)
        await until(router, lambda workers: len(workers) == expected)
        yield router


@asynccontextmanager
async def started_router(
    model: Path, directory: WorkerDirectory, **settings: float
) -> AsyncIterator[RouterServer]:
    """Listening; its workers may be connected or not."""
    config = RouterConfig(model_path=model, model_name="tiny", **settings)
    router = await RouterServer.start(config, directory)
    try:
        yield router
    finally:
        await router.stop()


@dataclass
class Reply:
    """What a Generate call brought."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    last: inference_pb2.GenerateResponse = field(default_factory=inference_pb2.GenerateResponse)

    def add(self, response: inference_pb2.GenerateResponse) -> None:
        assert response.index == len(self.token_ids), "a token is lost or doubled"
        self.token_ids += response.token_ids
        self.text += response.text
        self.last = response


@asynccontextmanager
async def inference_stub(router: RouterServer) -> AsyncIterator[inference_pb2_grpc.InferenceStub]:
    async with grpc.aio.insecure_channel(
        router.grpc_address, options=[("grpc.use_local_subchannel_pool", 1)]
    ) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def token_request(
    prompt: Sequence[int] = PROMPT, *, stop: Sequence[str] = (), **sampling: object
) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=prompt),
        stop=stop,
        sampling=inference_pb2.SamplingParams(**{"max_tokens": 8, **sampling}),
    )


async def generate(router: RouterServer, request: inference_pb2.GenerateRequest) -> Reply:
    """The whole reply; raises grpc.aio.AioRpcError as the client would get it."""
    reply = Reply()
    async with inference_stub(router) as stub:
        async for response in stub.Generate(request, timeout=DEADLINE_S):
            reply.add(response)
    return reply


@asynccontextmanager
async def generating(
    router: RouterServer, request: inference_pb2.GenerateRequest
) -> AsyncIterator[asyncio.Task[Reply]]:
    """The reply as a task, while the test plays the workers."""
    task = asyncio.create_task(generate(router, request))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


async def both_legs(prefill: ScriptedWorker, decode: ScriptedWorker) -> tuple[SubmittedLeg, SubmittedLeg]:
    return await prefill.next_leg(), await decode.next_leg()
