"""A worker: an engine, the sessions of its routers, and both ends of hand-offs."""

import asyncio
import logging
import secrets
from typing import ClassVar, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from engine.engine import Engine
from engine.grammar import GrammarCompiler
from engine.kv_layout import CACHED_DTYPES
from engine.loading import load_engine
from kv_transfer.bulk import SlotTerms
from kv_transfer.compatibility import layout_to_proto
from kv_transfer.messages import Grant
from kv_transfer.peers import PeerPool
from kv_transfer.servicer import KvTransferService
from kv_transfer.transport_choice import check_frame_limit, check_slots, transports_for
from protos import PROTOCOL_VERSION, kv_pb2, worker_pb2, worker_pb2_grpc
from security.channel_security import channel_security
from worker.config import WorkerConfig
from worker.decode_leg import DecodeDoor, DecodeLeg
from worker.ended_leg import EndedLeg
from worker.engine_thread import EngineReport, EngineThread
from worker.grammars import RequestGrammars
from worker.grant_window import GrantWindow
from worker.kv_export import CudaDevice, KVExport
from worker.leg import Assignment, Leg, LegDropped, LegFactory, LegTable
from worker.load_monitor import LoadMonitor
from worker.local_leg import LocalLeg
from worker.metrics_server import MetricsServer
from worker.prefill_leg import PrefillLeg
from worker.session_service import SessionService
from worker.submission import end_so_far, engine_request

log = logging.getLogger(__name__)

# How long calls that are under way may take to end after `stop`.
_STOP_GRACE_S = 1.0
# How soon a router begins to move what a leaving worker gave back, and how long all moves may take.
_MOVE_GRACE_S = 0.5
_MOVE_LIMIT_S = 5.0


class WorkerServer:
    """Starts with `start`; ends with `drain` (optional) and `stop`.

    A role is what the routers prefer it for: any worker prefills, hands off, takes hand-offs and decodes.

    Attributes:
        address: host:port of the gRPC server.
        metrics_address: host:port where Prometheus finds /metrics.
        security: of its gRPC server, and of its connections to other workers.
        epoch: another one for every life of a worker.
    """

    role: ClassVar[worker_pb2.Role]
    role_name: ClassVar[str]

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.worker_id = config.worker_id or f"{self.role_name}-{secrets.token_hex(4)}"
        self.epoch = secrets.randbits(64)
        self.security = channel_security(config.tls)
        self.address = ""
        self.metrics_address = ""
        self.legs = LegTable()
        self._export = KVExport(asyncio.get_running_loop())
        # Two steps' worth: one that runs, and one that is ready when it ends.
        self._window = GrantWindow(2 * config.step_tokens, lambda: self.monitor.prefill_rate)
        self.engine = EngineThread(self._build_engine, self._on_report)

    @classmethod
    async def start(cls, config: WorkerConfig) -> Self:
        """Loads the model, listens, and returns when requests can come.

        Raises:
            UnsupportedModel, CorruptCheckpoint: the model cannot be run.
            TransferConfigError: see there.
            OSError: the port is taken, or a certificate cannot be used.
        """
        worker = cls(config)
        await worker._start()
        return worker

    def _build_engine(self) -> Engine:
        return load_engine(self.config, self._export)

    async def _start(self) -> None:
        engine = await self.engine.start()
        self.layout = engine.layout
        self._wire = engine.wire
        if engine.device.type == "cuda":
            self._export.wait_for(CudaDevice(engine.device), self.config.kv_staging_bytes)
        self.limits = engine.limits
        compiler = GrammarCompiler(self.config.model_path, engine.vocab_size, engine.eos_token_ids)
        self.grammars = RequestGrammars(compiler)
        self.monitor = LoadMonitor(engine.load(), self.role_name)
        self.description = worker_pb2.WorkerDescription(
            protocol_version=PROTOCOL_VERSION,
            worker_id=self.worker_id,
            epoch=self.epoch,
            role=self.role,
            model=self.config.model_name or self.config.model_path.name,
            layout=layout_to_proto(engine.layout),
            wire_dtype=engine.wire_layout.dtype,
            wire_token_bytes=engine.wire_layout.token_bytes,
            accepted_dtypes=CACHED_DTYPES if self.config.kv_conversion else (engine.layout.dtype,),
            max_model_len=engine.limits.max_model_len,
            num_blocks=engine.load().num_blocks,
            tls=self.config.tls is not None,
            kv_trusted_network=self.config.kv_trusted_network,
        )
        check_frame_limit(engine.wire_layout, self.config.max_frame_bytes)
        check_slots(engine.wire_layout, self.config.kv_slot_bytes, self.config.kv_transport)
        transports = transports_for(
            self.config.kv_transport,
            SlotTerms(self.config.kv_slots, self.config.kv_slot_bytes),
            self.config.host,
            engine.device,
        )
        self._transports = transports if self.config.may_send_plain_kv else transports.encrypted
        self._peers = PeerPool(
            engine.wire_layout,
            self.worker_id,
            self.epoch,
            transports=self._transports,
            security=self.security,
        )
        self._eos_token_ids = engine.eos_token_ids
        factories = {
            "local": self._unless_ended(self._local_leg),
            "prefill": self._unless_ended(self._prefill_leg),
            "decode": self._unless_ended(self._decode_leg),
        }
        self.service = SessionService(self.description, self.engine, self.legs, factories, self._load_report)
        try:
            await self._listen()
        except BaseException:
            await self.engine.stop()
            raise

    async def _listen(self) -> None:
        server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
                # A prompt of a million tokens is a Submit of a few MB.
                ("grpc.max_receive_message_length", 64 << 20),
                # Every hand-off is a call: gRPC would cancel some at random beyond 1000 not taken up.
                ("grpc.server.max_pending_requests", 1 << 20),
                ("grpc.server.max_pending_requests_hard_limit", 1 << 20),
            ]
        )
        worker_pb2_grpc.add_WorkerServicer_to_server(self.service, server)
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        self._transfers = self._transfer_service()
        self._transfers.add_to(server)
        names = (
            worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name,
            kv_pb2.DESCRIPTOR.services_by_name["KvTransfer"].full_name,
            "grpc.health.v1.Health",
            reflection.SERVICE_NAME,
        )
        reflection.enable_server_reflection(names, server)
        port = self.security.listen(server, f"{self.config.host}:{self.config.port}")
        await server.start()
        self._server = server
        self.address = f"{self.config.host}:{port}"
        self._metrics_server = MetricsServer(
            self.config.host, self.config.metrics_port, self.config.tls, self.monitor.registry
        )
        self.metrics_address = self._metrics_server.address
        self._watches = [asyncio.create_task(self._watch_engine()), asyncio.create_task(self._watch_steps())]
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)

    def _transfer_service(self) -> KvTransferService:
        door = DecodeDoor(self.epoch, self.service.sessions, self.legs)
        terms = Grant(self.config.frame_credits, self.config.max_frame_bytes)
        return KvTransferService(
            door,
            self.layout,
            terms,
            worker_id=self.worker_id,
            epoch=self.epoch,
            transports=self._transports,
            converts=self.config.kv_conversion,
        )

    def _unless_ended(self, make: LegFactory) -> LegFactory:
        def make_leg(assignment: Assignment) -> Leg:
            reason = end_so_far(assignment, self._eos_token_ids)
            return make(assignment) if reason is None else EndedLeg(assignment, reason)

        return make_leg

    def _local_leg(self, assignment: Assignment) -> LocalLeg:
        return LocalLeg(assignment, engine_request(assignment), self.engine, self.grammars)

    def _prefill_leg(self, assignment: Assignment) -> PrefillLeg:
        return PrefillLeg(
            assignment, self.engine, self._peers, self._window, self._export, self.monitor, self.grammars
        )

    def _decode_leg(self, assignment: Assignment) -> DecodeLeg:
        return DecodeLeg(assignment, self.engine, self._wire, self.monitor, self.grammars)

    def _on_report(self, report: EngineReport) -> None:
        self.monitor.on_report(report)
        self.legs.dispatch(report)
        self.service.tell_cache_changes(report.cache_changes)

    def _load_report(self) -> worker_pb2.LoadReport:
        return self.monitor.report(
            legs_before_engine=self._window.num_waiting, tokens_before_engine=self._window.waiting_tokens
        )

    def check_health(self) -> None:
        """Raises:
        RuntimeError: the engine has ended; this worker must be replaced.
        """
        if self.engine.ended.done():
            raise RuntimeError(f"the engine ended: {self.engine.ended.result()!r}")

    async def wait_failed(self) -> Exception | None:
        """Returns when the engine has ended: None after `stop`, else its error."""
        return await asyncio.shield(self.engine.ended)

    async def _watch_engine(self) -> None:
        error = await self.wait_failed()
        if error is not None:
            log.error("the engine failed", exc_info=error)
            await self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
            await self._server.stop(0)

    async def _watch_steps(self) -> None:
        """A hung device does not say so."""
        limit_s = self.config.step_limit_s
        while not self.engine.ended.done():
            await asyncio.sleep(limit_s / 4)
            self.engine.give_up_after(limit_s)

    async def drain(self, limit_s: float) -> None:
        """Takes no new work and returns when nothing is left. What has not finished after `limit_s` is given
        back: its routers continue it on other workers, and may let these have its KV from here.
        """
        self.service.draining = self.monitor.draining = True
        await self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        try:
            await asyncio.wait_for(self.legs.wait_empty(), limit_s)
        except TimeoutError:
            await self._give_back(limit_s)

    async def _give_back(self, limit_s: float) -> None:
        leaving = LegDropped(worker_pb2.DROP_CAUSE_DRAINING, "the worker is leaving")
        if not len(self.legs):
            return
        log.warning("drain: %d requests are given back after %.0f s", len(self.legs), limit_s)
        self.service.lets_move = True
        self.legs.drop_all(leaving)
        try:
            async with asyncio.timeout(_MOVE_LIMIT_S):
                await self.legs.wait_empty()
                while await self._is_fetched():
                    await self.legs.wait_empty()
        except TimeoutError:
            self.legs.drop_all(leaving)
            await self.legs.wait_empty()
        self.service.lets_move = False

    async def _is_fetched(self) -> bool:
        """Whether a router begins to move something."""
        try:
            await asyncio.wait_for(self.legs.wait_busy(), _MOVE_GRACE_S)
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """Ends the sessions, then the engine. What still runs is dropped."""
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(self._peers.close(), self._transfers.close())
        await self._server.stop(_STOP_GRACE_S)
        self._export.close()
        self.grammars.close()
        await self.engine.stop()
        self._metrics_server.stop()
