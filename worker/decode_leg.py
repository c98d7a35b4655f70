"""Take a hand-off, then decode: the receiving leg of an attempt, and the door that a Push comes to."""

import asyncio
import hmac
from collections.abc import Callable, Mapping, Sequence

from engine.engine import Engine
from engine.kv_layout import KVLayout
from engine.kv_wire import KVWire
from engine.request import EngineRequest, InvalidRequest, KVSource
from engine.step_result import EndedSequence
from kv_transfer.frame import KVSlice
from kv_transfer.messages import Drop, DropCause, Open
from kv_transfer.sink import (
    HandoffDropped,
    HandoffRefused,
    NumberOver,
    UnknownSession,
    WrongEpoch,
    WrongSecret,
)
from protos import worker_pb2
from worker.drop_causes import dropped_leg
from worker.engine_thread import EngineThread
from worker.grammars import RequestGrammars
from worker.leg import Assignment, Leg, LegTable, sequence_id
from worker.load_monitor import LoadMonitor
from worker.session import RouterSession, SessionEnded
from worker.submission import engine_request


class DecodeLeg(Leg):
    """A request whose KV comes by hand-off: its place at this worker (kv_transfer's HandoffSink)."""

    def __init__(
        self,
        assignment: Assignment,
        engine: EngineThread,
        wire: Callable[[KVLayout], KVWire],
        monitor: LoadMonitor,
        grammars: RequestGrammars,
    ) -> None:
        super().__init__(assignment)
        loop = asyncio.get_running_loop()
        self.dropped: asyncio.Future[Drop] = loop.create_future()
        # How its KV comes into the cache, once a Push has it.
        self._wire: KVWire | None = None
        self._make_wire = wire
        # From then on the engine is asked for nothing: what it got would stay there.
        self._is_freed = False
        self._request = engine_request(assignment, kv_source=KVSource.HANDOFF)
        self._engine = engine
        self._monitor = monitor
        self._grammars = grammars
        # The request with its grammar.
        self._complete: asyncio.Future[EngineRequest] = loop.create_future()
        self._granted: asyncio.Future[int] = loop.create_future()
        # None: the sequence has its end.
        self._over: asyncio.Future[Drop | None] = loop.create_future()

    async def run(self) -> None:
        self._complete.set_result(await self._grammars.complete(self._request, self.assignment.submit))
        drop = await asyncio.shield(self._over)
        if drop is not None:
            raise dropped_leg(drop)

    def close(self) -> None:
        if not self.dropped.done():
            self.dropped.set_result(Drop(DropCause.CANCELLED, "the attempt is over here"))
        self._free()

    def _free(self) -> None:
        self._is_freed = True
        self._engine.post(lambda engine: engine.remove(self._request.sequence_id))

    @property
    def is_claimed(self) -> bool:
        """A Push has it."""
        return self._wire is not None

    def claim(self, layout: KVLayout) -> None:
        """For a Push by which KV comes in `layout`."""
        self._wire = self._make_wire(layout)

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV comes."""
        return len(self._request.prompt) + len(self._request.generated)

    async def reserve(self) -> int:
        try:
            request = await asyncio.shield(self._complete)
            if self._is_freed:
                raise HandoffDropped(Drop(DropCause.CANCELLED, "the attempt is over here"))
            await self._engine.call(lambda engine: engine.submit(request))
        except InvalidRequest as error:
            raise HandoffDropped(Drop(DropCause.INVALID, str(error))) from error
        return await asyncio.shield(self._granted)

    def on_granted(self, cached_tokens: int) -> None:
        self._granted.set_result(cached_tokens)

    async def scatter(self, slices: Sequence[KVSlice]) -> None:
        if not await self._engine.call(lambda engine: self._import(engine, slices)):
            raise HandoffDropped(Drop(DropCause.CANCELLED, "the sequence is gone"))

    def _import(self, engine: Engine, slices: Sequence[KVSlice]) -> bool:
        assert self._wire is not None, "a scatter without a Push"
        try:
            return all(engine.import_kv(self._request.sequence_id, self._wire, *piece) for piece in slices)
        finally:
            # Then the slices' memory is read no more.
            engine.wait_for_device()

    async def admit(self, first_tokens: tuple[int, ...], kv_bytes: int) -> None:
        key = self._request.sequence_id
        try:
            await self._engine.call(
                lambda engine: engine.begin_decode(key, first_tokens),
                lambda ended: self._report_admitted(first_tokens, kv_bytes, ended),
            )
        except KeyError as error:
            raise HandoffDropped(Drop(DropCause.CANCELLED, "the sequence is gone")) from error

    def _report_admitted(
        self, first_tokens: tuple[int, ...], kv_bytes: int, ended: list[EndedSequence]
    ) -> None:
        self._monitor.on_kv_received(kv_bytes)
        submit, event = self.assignment.submit, self.assignment.session.event()
        event.admitted.append(worker_pb2.Admitted(attempt=submit.attempt, kv_bytes=kv_bytes))
        for sample, token in enumerate(first_tokens, start=submit.sample):
            event.tokens.append(
                worker_pb2.SequenceTokens(
                    attempt=submit.attempt,
                    sample=sample,
                    index=len(self._request.generated),
                    token_ids=[token],
                )
            )
        for each in ended:
            self.on_ended(each)

    def release(self, drop: Drop) -> None:
        # The engine may have been asked for the blocks after `close`.
        self._free()
        self._end(drop)

    def on_ended(self, ended: EndedSequence) -> None:
        self.report_finished(ended)
        if ended.is_last:
            self._end(None)

    def _end(self, drop: Drop | None) -> None:
        if not self._over.done():
            self._over.set_result(drop)


class DecodeDoor:
    """Knows which attempts a hand-off may come for (kv_transfer's HandoffDoor)."""

    def __init__(self, epoch: int, sessions: Mapping[str, RouterSession], legs: LegTable) -> None:
        self._epoch = epoch
        self._sessions = sessions
        self._legs = legs

    async def authorize(self, opening: Open, layout: KVLayout) -> DecodeLeg:
        if opening.receiver_epoch != self._epoch:
            raise WrongEpoch(
                f"epoch: this worker's is {self._epoch}, the Push is for {opening.receiver_epoch}"
            )
        transfer = opening.transfer
        session = self._sessions.get(transfer.session)
        if session is None:
            raise UnknownSession(f"session {transfer.session} is not connected")
        try:
            await session.wait_for(transfer.number)
        except SessionEnded as error:
            raise UnknownSession(f"session {transfer.session} ended") from error
        leg = self._legs.get(sequence_id(transfer.session, transfer.number))
        if not isinstance(leg, DecodeLeg) or leg.is_claimed:
            raise NumberOver(f"attempt {transfer.number} is over, takes no hand-off, or has one already")
        if opening.num_tokens != leg.num_tokens:
            raise HandoffRefused(
                f"num_tokens: the Push has {opening.num_tokens}, the attempt {leg.num_tokens}"
            )
        if not hmac.compare_digest(opening.secret, leg.assignment.submit.secret):
            raise WrongSecret("the secret is not the attempt's")
        leg.claim(layout)
        return leg
