"""Real workers and a real router on one event loop: real gRPC between them, no process to wait for."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from decode_worker.server import DecodeWorker
from engine.engine import Engine
from engine.step_result import EngineLoad
from prefill_worker.server import PrefillWorker
from protos import inference_pb2, inference_pb2_grpc
from router.config import RouterConfig
from router.router_server import RouterServer
from router.worker_directory import StaticDirectory
from tests.device import DEVICE
from tests.transfer.proxy import Proxy
from worker.config import WorkerConfig
from worker.server import WorkerServer

# What a test says of hand-offs is not to depend on what costs less on the machine that runs it.
ALWAYS_HAND_OFF = {"decode_prefill_tokens": 0, "loaded_prefill_s": 1e9}


@dataclass(frozen=True, slots=True)
class Answer:
    """All that a client got of one request."""

    token_ids: tuple[int, ...]
    text: str
    last: inference_pb2.GenerateResponse


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """
    Attributes:
        proxies: one before each decode worker, in the way of its router and of its prefill workers.
        prefill_proxies: one before each prefill worker, in the way of its router.
    """

    router: RouterServer
    prefill: tuple[PrefillWorker, ...]
    decode: tuple[DecodeWorker, ...]
    proxies: tuple[Proxy, ...]
    prefill_proxies: tuple[Proxy, ...]
    client: inference_pb2_grpc.InferenceStub

    @property
    def workers(self) -> tuple[WorkerServer, ...]:
        return (*self.prefill, *self.decode)

    async def generate(self, request: inference_pb2.GenerateRequest) -> Answer:
        token_ids: list[int] = []
        text = ""
        last = inference_pb2.GenerateResponse()
        async for last in self.client.Generate(request, timeout=120):
            token_ids += last.token_ids
            text += last.text
        return Answer(tuple(token_ids), text, last)

    async def loads(self) -> list[EngineLoad]:
        return [await worker.engine.call(Engine.load) for worker in self.workers]

    async def wait_clean(self) -> None:
        """Returns when no worker has anything of any request; its books agree all the while.

        What is left for good keeps it waiting until the test's time is over.
        """
        for worker in self.workers:
            while not await self._is_clean(worker):
                await worker.legs.wait_empty()

    async def _is_clean(self, worker: WorkerServer) -> bool:
        await worker.engine.call(Engine.check_integrity)
        load = await worker.engine.call(Engine.load)
        is_idle = load.num_running == load.num_waiting == len(worker.legs) == 0
        return is_idle and load.free_blocks == load.num_blocks


def token_request(prompt: Sequence[int], max_tokens: int, **sampling) -> inference_pb2.GenerateRequest:
    """Greedy unless said."""
    params = inference_pb2.SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **sampling})
    return inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=list(prompt)), sampling=params)


@asynccontextmanager
async def local_cluster(
    model: Path,
    *,
    prefill: int = 1,
    decode: int = 1,
    router_options: dict | None = None,
    decode_options: dict | None = None,
    **worker_options,
) -> AsyncIterator[LocalCluster]:
    """`decode_options`: in which the decode workers differ from the prefill workers."""
    # A reference that computes on this loop is no stalled worker: hence the router's patience.
    options = {"dtype": "float32", "device": str(DEVICE), "kv_cache_bytes": 64 << 20, "model_name": "tiny"}
    async with AsyncExitStack() as stack:

        async def start(kind: type[WorkerServer], name: str, own_options: dict) -> WorkerServer:
            every = {**options, **worker_options, **own_options}
            config = WorkerConfig(model_path=model, worker_id=name, **every)
            worker = await kind.start(config)
            stack.push_async_callback(worker.stop)
            return worker

        prefill_workers = [await start(PrefillWorker, f"prefill-{i}", {}) for i in range(prefill)]
        decode_workers = [
            await start(DecodeWorker, f"decode-{i}", decode_options or {}) for i in range(decode)
        ]
        proxies = [Proxy(worker.address) for worker in decode_workers]
        prefill_proxies = [Proxy(worker.address) for worker in prefill_workers]
        for proxy in (*proxies, *prefill_proxies):
            await proxy.start()
            stack.push_async_callback(proxy.die)
        router = await RouterServer.start(
            RouterConfig(
                model_path=model,
                model_name="tiny",
                **{**ALWAYS_HAND_OFF, "stall_limit_s": 300.0, **(router_options or {})},
            ),
            StaticDirectory(
                prefill=[p.address for p in prefill_proxies], decode=[p.address for p in proxies]
            ),
        )
        stack.push_async_callback(router.stop)
        seen = 0
        while len(router.fleet.snapshot()) < prefill + decode:
            seen = await router.fleet.next_change(seen)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(router.grpc_address))
        yield LocalCluster(
            router,
            tuple(w for w in prefill_workers if isinstance(w, PrefillWorker)),
            tuple(w for w in decode_workers if isinstance(w, DecodeWorker)),
            tuple(proxies),
            tuple(prefill_proxies),
            inference_pb2_grpc.InferenceStub(channel),
        )


async def together(cluster: LocalCluster, requests: Sequence[inference_pb2.GenerateRequest]) -> list[Answer]:
    """All at once."""
    return list(await asyncio.gather(*(cluster.generate(request) for request in requests)))
