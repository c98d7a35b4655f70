"""The router's process side: both doors on their ports, the fleet behind them, the drain."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator
from random import Random

import grpc
import uvicorn
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from protos import inference_pb2, inference_pb2_grpc
from router.admission import Admission, AdmissionRules, Capacity
from router.api_keys import KeyRing
from router.config import RouterConfig
from router.door_tls import DoorTls
from router.doorkeeper import Doorkeeper
from router.failover import RetryLimits
from router.fleet import Fleet, LinkSettings
from router.generation_service import GenerationService
from router.grpc_door import GrpcDoor
from router.grpc_keys import GrpcKeys
from router.http_connection import HttpConnection
from router.http_door import MAX_BODY_BYTES, make_http_door
from router.metrics import RouterMetrics
from router.model_card import ModelCard
from router.placement import PlacementRules
from router.placer import Placer
from router.tokenizer import Tokenizer
from router.tool_style import choose_tool_style
from router.worker_directory import WorkerDirectory
from security.channel_security import channel_security, listen

logger = logging.getLogger(__name__)

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
# How long doors may take to flush what they have sent, after the requests are over.
CLOSE_LIMIT_S = 2.0

_GRPC_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_BODY_BYTES),
    # A port that another process has is an error, not a share of its connections.
    ("grpc.so_reuseport", 0),
    # Who is refused in a burst of calls is ours to say: beyond 1000 that it has not taken up, gRPC would
    # cancel some at random.
    ("grpc.server.max_pending_requests", 1 << 20),
    ("grpc.server.max_pending_requests_hard_limit", 1 << 20),
]


class _HttpServer(uvicorn.Server):
    """uvicorn in our loop: signals are the process's business, and `listening` says when it serves."""

    def __init__(self, config: uvicorn.Config, tls: ssl.SSLContext | None) -> None:
        super().__init__(config)
        config.load()
        config.ssl = tls
        self.listening = asyncio.Event()
        self.closed = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().serve(sockets)
        finally:
            self.listening.set()
            self.closed.set()


class RouterServer:
    """A running router.

    Attributes:
        grpc_address, http_address: host:port of the doors.
        fleet: its sessions with the workers.
    """

    def __init__(self, config: RouterConfig, tokenizer: Tokenizer, directory: WorkerDirectory) -> None:
        card = ModelCard.read(config.model_path, config.model_name)
        self.fleet = Fleet(LinkSettings(card.name, config.stall_limit_s, channel_security(config.tls)))
        self.grpc_address = ""
        self.http_address = ""
        self._config = config
        self._tokenizer = tokenizer
        self._directory = directory
        metrics = RouterMetrics()
        placer = Placer(self.fleet, _placement_rules(config), metrics, Random())
        self._admission = Admission(
            _admission_rules(config), lambda: Capacity.of(self.fleet.snapshot()), metrics.refused
        )
        self._service = GenerationService(
            card,
            tokenizer,
            self.fleet,
            metrics,
            placer,
            self._admission,
            RetryLimits(config.max_attempts, config.rejoin_limit_s),
        )
        tool_style = choose_tool_style(config.tool_call_format, tokenizer.tool_template, tokenizer.has_token)
        keys = None if config.api_keys_file is None else KeyRing(config.api_keys_file)
        self._doorkeeper = Doorkeeper(keys)
        self._tls = DoorTls.of(config)
        self._health = HealthServicer()
        self._grpc = grpc.aio.server(
            interceptors=[] if keys is None else [GrpcKeys(self._doorkeeper)], options=_GRPC_OPTIONS
        )
        self._http = _HttpServer(
            uvicorn.Config(
                make_http_door(self._service, tool_style, self._doorkeeper),
                http=HttpConnection,
                log_config=None,
                log_level="warning",
                access_log=False,
                proxy_headers=False,
                lifespan="off",
                timeout_graceful_shutdown=int(CLOSE_LIMIT_S),
            ),
            self._tls.http,
        )
        self._main: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, config: RouterConfig, directory: WorkerDirectory) -> "RouterServer":
        """Listens when it returns; workers join as the directory names them.

        Raises:
            ValueError: the model's folder or the file of keys is damaged.
            OSError: a port cannot be had, or a certificate cannot be used.
        """
        tokenizer = await asyncio.to_thread(Tokenizer.load, config.model_path)
        server = cls(config, tokenizer, directory)
        http_socket = _listen(config.host, config.http_port)
        await server._open_grpc()
        server.http_address = f"{config.host}:{http_socket.getsockname()[1]}"
        server._main = asyncio.create_task(server._run(http_socket), name="router")
        await server._http.listening.wait()
        return server

    async def _open_grpc(self) -> None:
        door = GrpcDoor(self._service, self._doorkeeper)
        inference_pb2_grpc.add_InferenceServicer_to_server(door, self._grpc)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        names = (INFERENCE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
        reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), self._grpc)
        address = f"{self._config.host}:{self._config.grpc_port}"
        port = listen(self._grpc, address, self._tls.grpc)
        await self._report_health()
        await self._grpc.start()
        self.grpc_address = f"{self._config.host}:{port}"

    async def _run(self, http_socket: socket.socket) -> None:
        """Owns every task of the router until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.fleet.run(self._directory), name="fleet")
            group.create_task(self._watch_workers(), name="watch workers")
            group.create_task(self._http.serve(sockets=[http_socket]), name="http")

    async def _watch_workers(self) -> None:
        seen = 0
        while True:
            seen = await self.fleet.next_change(seen)
            self._admission.advance()
            await self._report_health()

    async def _report_health(self) -> None:
        ready = self._service.is_ready
        status = (
            health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in ("", INFERENCE):
            await self._health.set(name, status)

    async def failed(self) -> None:
        """Waits until the router ends by itself, and raises why."""
        assert self._main is not None
        await asyncio.shield(self._main)

    async def drain(self, limit_s: float) -> None:
        """Refuses new requests from now on; returns when the running ones are over or the time is up."""
        self._service.draining = True
        await self._report_health()
        try:
            async with asyncio.timeout(limit_s):
                await self._service.idle()
        except TimeoutError:
            logger.warning("drain limit of %g s is over; ending what still runs", limit_s)

    async def stop(self) -> None:
        """Closes both doors, ends what still runs, and leaves the workers."""
        self._service.draining = True
        self._http.should_exit = True
        await self._grpc.stop(CLOSE_LIMIT_S)
        if self._main is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2 * CLOSE_LIMIT_S):
                    await self._http.closed.wait()
            self._main.cancel()
            await asyncio.wait({self._main})
        self._tokenizer.close()


def _placement_rules(config: RouterConfig) -> PlacementRules:
    return PlacementRules(
        local_prefill_tokens=config.local_prefill_tokens,
        decode_prefill_tokens=config.decode_prefill_tokens,
        loaded_prefill_s=config.loaded_prefill_s,
    )


def _admission_rules(config: RouterConfig) -> AdmissionRules:
    return AdmissionRules(
        max_expected_ttft_s=config.max_expected_ttft_s,
        max_queued_requests=config.max_queued_requests,
        max_inflight_prompt_tokens=config.max_inflight_prompt_tokens,
    )


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)
