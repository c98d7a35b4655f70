"""The worker that prefills and hands off."""

import asyncio
from collections.abc import Mapping

import grpc

from engine.batch import KVListener
from kv_transfer.peers import PeerPool
from prefill_worker.grant_window import GrantWindow
from prefill_worker.kv_export import KVExport
from prefill_worker.prefill_leg import PrefillLeg
from protos import worker_pb2
from worker.config import WorkerConfig
from worker.leg import Assignment, LegFactory
from worker.server import WorkerServer


class PrefillWorker(WorkerServer):
    role = worker_pb2.ROLE_PREFILL
    role_name = "prefill"

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        self._export = KVExport(asyncio.get_running_loop())
        # Two steps' worth: one that runs, and one that is ready when it ends.
        self._window = GrantWindow(2 * config.step_tokens, lambda: self.monitor.prefill_rate)

    def _listener(self) -> KVListener:
        return self._export

    def _leg_factories(self) -> Mapping[str, LegFactory]:
        self._peers = PeerPool(self.layout, self.worker_id, self.epoch)
        return {"prefill": self._prefill_leg}

    def _prefill_leg(self, assignment: Assignment) -> PrefillLeg:
        return PrefillLeg(
            assignment, self.engine, self._peers, self._window, self._export, self.monitor, self.grammars
        )

    def _add_services(self, server: grpc.aio.Server) -> None:
        """It takes no hand-offs."""

    def legs_before_engine(self) -> int:
        return self._window.num_waiting

    def tokens_before_engine(self) -> int:
        return self._window.waiting_tokens

    async def stop(self) -> None:
        await self._peers.close()
        await super().stop()
