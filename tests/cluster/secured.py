"""A cluster whose every connection is encrypted, and clients that come in with a key."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx

from decode_worker.server import DecodeWorker
from engine.engine import Engine
from prefill_worker.server import PrefillWorker
from protos import inference_pb2, inference_pb2_grpc
from router.config import RouterConfig
from router.router_server import RouterServer
from router.worker_directory import StaticDirectory
from security.development_ca import make_certificates
from security.tls_config import TlsConfig
from tests.device import DEVICE
from worker.config import WorkerConfig
from worker.server import WorkerServer

KEY = "a-good-key"
BEARER = {"authorization": f"Bearer {KEY}"}


@dataclass(frozen=True, slots=True)
class Certificates:
    """A folder that `baton certs` makes."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> "Certificates":
        make_certificates(folder)
        return cls(folder)

    def tls(self, name: str, **options: str) -> TlsConfig:
        """Of `router` or `worker`."""
        folder = self.folder
        return TlsConfig(
            cert=folder / f"{name}.pem", key=folder / f"{name}.key", ca=folder / "ca.pem", **options
        )

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def client_credentials(self, name: str | None = None) -> grpc.ChannelCredentials:
        """name: whose certificate the client shows. None: nobody's."""
        if name is None:
            return grpc.ssl_channel_credentials(self.read("ca.pem"))
        return grpc.ssl_channel_credentials(
            self.read("ca.pem"), self.read(f"{name}.key"), self.read(f"{name}.pem")
        )


@dataclass(frozen=True, slots=True)
class SecuredCluster:
    """One prefill and one decode worker, and a router that asks for `KEY`."""

    router: RouterServer
    prefill: PrefillWorker
    decode: DecodeWorker
    certificates: Certificates

    def http(self) -> httpx.AsyncClient:
        """Knows the CA and has no key yet."""
        context = ssl.create_default_context(cafile=self.certificates.folder / "ca.pem")
        return httpx.AsyncClient(base_url=f"https://{self.router.http_address}", verify=context, timeout=60)

    def channel(self) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(self.router.grpc_address, self.certificates.client_credentials())

    async def generate(self, request: inference_pb2.GenerateRequest) -> list[inference_pb2.GenerateResponse]:
        async with self.channel() as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            return [each async for each in stub.Generate(request, metadata=tuple(BEARER.items()), timeout=60)]


async def computed_tokens(*workers: WorkerServer) -> int:
    """Prompt tokens and generated ones, of the workers' whole lives."""
    loads = [await worker.engine.call(Engine.load) for worker in workers]
    return sum(load.computed_prompt_tokens + load.generated_tokens for load in loads)


@asynccontextmanager
async def secured_cluster(model: Path, folder: Path) -> AsyncIterator[SecuredCluster]:
    """Certificates and keys lie in `folder`."""
    certificates = Certificates.make(folder / "certificates")
    keys = folder / "keys"
    keys.write_text(f"{KEY}\n")
    options = {"dtype": "float32", "device": str(DEVICE), "kv_cache_bytes": 64 << 20, "model_name": "tiny"}
    config = WorkerConfig(model_path=model, tls=certificates.tls("worker"), **options)
    async with AsyncExitStack() as stack:
        prefill = await PrefillWorker.start(config)
        stack.push_async_callback(prefill.stop)
        decode = await DecodeWorker.start(config)
        stack.push_async_callback(decode.stop)
        router = await RouterServer.start(
            RouterConfig(
                model_path=model, model_name="tiny", tls=certificates.tls("router"), api_keys_file=keys
            ),
            StaticDirectory(prefill=[prefill.address], decode=[decode.address]),
        )
        stack.push_async_callback(router.stop)
        async with asyncio.timeout(60):
            seen = 0
            while len(router.fleet.snapshot()) < 2:
                seen = await router.fleet.next_change(seen)
        yield SecuredCluster(router, prefill, decode, certificates)
