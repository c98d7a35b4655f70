"""Prefill, sample one token, hand off: the sending leg of an attempt."""

import asyncio
import time
from dataclasses import replace

from engine.request import InvalidRequest, RunUntil
from engine.step_result import EndedSequence, HeldSequence
from kv_transfer.messages import Accepted, CloseReason, Drop, TransferId
from kv_transfer.outbound import HandoffEnded, HandoffOutbound, HandoffTicket
from kv_transfer.peers import PeerAddress, PeerPool
from kv_transfer.sender import Closed
from protos import worker_pb2
from worker.drop_causes import dropped_leg
from worker.engine_thread import EngineThread
from worker.grammars import RequestGrammars
from worker.grant_window import GrantWindow, Turn
from worker.kv_export import KVExport
from worker.leg import Assignment, Leg, LegDropped
from worker.load_monitor import LoadMonitor
from worker.submission import engine_request


class PrefillLeg(Leg):
    """First the receiver's grant, then blocks of this engine: none is held here to wait for some there."""

    def __init__(
        self,
        assignment: Assignment,
        engine: EngineThread,
        peers: PeerPool,
        window: GrantWindow,
        export: KVExport,
        monitor: LoadMonitor,
        grammars: RequestGrammars,
    ) -> None:
        super().__init__(assignment)
        self._request = engine_request(assignment, run_until=RunUntil.FIRST_TOKEN)
        self._engine = engine
        self._window = window
        self._export = export
        self._monitor = monitor
        self._grammars = grammars
        self._handoff = HandoffOutbound(peers, self._ticket())
        self._computed = asyncio.Event()
        self._held: HeldSequence | None = None

    def _ticket(self) -> HandoffTicket:
        submit = self.assignment.submit
        leg = submit.prefill
        return HandoffTicket(
            receiver=PeerAddress(leg.decode_address, leg.decode_epoch),
            transfer=TransferId(leg.decode_session, submit.attempt.number),
            secret=submit.secret,
            num_tokens=len(self._request.prompt) + len(self._request.generated),
        )

    async def run(self) -> None:
        try:
            await self._compute()
            if self._held is None:
                self._handoff.close(CloseReason.ENDED_AT_FIRST_TOKEN)
                return
            self._report(self._held, await asyncio.shield(self._handoff.outcome))
        except HandoffEnded as ended:
            raise _dropped(ended.outcome) from ended
        except InvalidRequest as error:
            raise LegDropped(worker_pb2.DROP_CAUSE_INVALID, str(error)) from error

    def close(self) -> None:
        self._export.detach(self._request.sequence_id)
        self._handoff.cancel()
        # The frames are copies: nothing reads the blocks any more.
        self._engine.post(lambda engine: engine.remove(self._request.sequence_id))

    async def _compute(self) -> None:
        """Returns when the first token is there; raises HandoffEnded when the receiver is lost before."""
        submit = self.assignment.submit
        num_tokens = len(self._request.prompt) + len(self._request.generated)
        turn = Turn(
            peer=submit.prefill.decode_worker_id,
            num_tokens=max(1, num_tokens - submit.expected_cached_tokens),
        )
        complete = await self._grammars.complete(self._request, submit)
        async with self._window.turn(turn):
            cached_tokens = await self._handoff.open()
            self._window.granted(turn)
            request = replace(complete, export_from=cached_tokens)
            self._export.attach(self._request.sequence_id, self._handoff.offer, self._handoff.memory)
            await self._engine.call(lambda engine: engine.submit(request))
            computed = asyncio.create_task(self._computed.wait())
            try:
                await asyncio.wait({computed, self._handoff.outcome}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                computed.cancel()
        if not self._computed.is_set():
            raise HandoffEnded(self._handoff.outcome.result())

    def on_held(self, held: HeldSequence) -> None:
        self._held = held
        self._export.when_delivered(self._commit)

    def _commit(self) -> None:
        if self._held is not None:
            self._handoff.commit(self._held.first_tokens)
        self._computed.set()

    def on_ended(self, ended: EndedSequence) -> None:
        self.report_finished(ended)
        if ended.is_last:
            self._computed.set()

    def _report(self, held: HeldSequence, outcome: Accepted | Drop | Closed) -> None:
        if not isinstance(outcome, Accepted):
            raise _dropped(outcome)
        self._monitor.on_kv_sent(outcome.kv_bytes, self._handoff.transport)
        marks = held.marks
        self.assignment.session.event().prefilled.append(
            worker_pb2.Prefilled(
                attempt=self.assignment.submit.attempt,
                queue_s=marks.first_chunk - self.assignment.received,
                prefill_s=marks.first_token - marks.first_chunk,
                transfer_s=time.monotonic() - marks.first_token,
                kv_bytes=outcome.kv_bytes,
                cached_tokens=held.cached_tokens,
            )
        )


def _dropped(outcome: Accepted | Drop | Closed) -> LegDropped:
    if isinstance(outcome, Drop):
        return dropped_leg(outcome)
    return LegDropped(worker_pb2.DROP_CAUSE_INTERNAL, f"the hand-off ended with {outcome}")
