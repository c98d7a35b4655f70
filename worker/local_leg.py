"""Prefill and decode on this one worker."""

import asyncio

from engine.request import EngineRequest, InvalidRequest
from engine.step_result import EndedSequence
from protos import worker_pb2
from worker.engine_thread import EngineThread
from worker.grammars import RequestGrammars
from worker.leg import Assignment, Leg, LegDropped


class LocalLeg(Leg):
    """A request that this worker answers alone."""

    def __init__(
        self,
        assignment: Assignment,
        request: EngineRequest,
        engine: EngineThread,
        grammars: RequestGrammars,
    ) -> None:
        super().__init__(assignment)
        self._request = request
        self._engine = engine
        self._grammars = grammars
        self._ended = asyncio.Event()

    async def run(self) -> None:
        request = await self._grammars.complete(self._request, self.assignment.submit)
        try:
            await self._engine.call(lambda engine: engine.submit(request))
            await self._ended.wait()
        except InvalidRequest as error:
            raise LegDropped(worker_pb2.DROP_CAUSE_INVALID, str(error)) from error

    def close(self) -> None:
        self._engine.post(lambda engine: engine.remove(self._request.sequence_id))

    def on_ended(self, ended: EndedSequence) -> None:
        self.report_finished(ended)
        if ended.is_last:
            self._ended.set()
