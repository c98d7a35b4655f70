"""The worker that takes hand-offs and decodes."""

from collections.abc import Mapping

import grpc

from decode_worker.decode_leg import DecodeDoor, DecodeLeg
from kv_transfer.messages import Grant
from kv_transfer.servicer import KvTransferService
from protos import worker_pb2
from worker.leg import Assignment, LegFactory
from worker.server import WorkerServer


class DecodeWorker(WorkerServer):
    role = worker_pb2.ROLE_DECODE
    role_name = "decode"

    def _leg_factories(self) -> Mapping[str, LegFactory]:
        return {"decode": self._decode_leg}

    def _decode_leg(self, assignment: Assignment) -> DecodeLeg:
        return DecodeLeg(assignment, self.engine, self.layout, self.monitor, self.grammars)

    def _add_services(self, server: grpc.aio.Server) -> None:
        door = DecodeDoor(self.epoch, self.service.sessions, self.legs)
        terms = Grant(self.config.frame_credits, self.config.max_frame_bytes)
        self._transfers = KvTransferService(
            door, self.layout, terms, worker_id=self.worker_id, epoch=self.epoch
        )
        self._transfers.add_to(server)

    async def stop(self) -> None:
        await self._transfers.close()
        await super().stop()
