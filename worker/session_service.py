"""Serves `baton.v1.Worker`: sessions with routers."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping

import grpc
from grpc.aio import ServicerContext

from engine.block_pool import CacheChanges
from engine.engine import Engine
from protos import PROTOCOL_VERSION, worker_pb2, worker_pb2_grpc
from worker.engine_thread import EngineThread
from worker.leg import Assignment, LegDropped, LegFactory, LegTable, sequence_id
from worker.session import OutboxFull, RouterSession

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.25


class SessionService(worker_pb2_grpc.WorkerServicer):
    """The routers' sessions. The end of one cancels every leg that it submitted.

    Args:
        factories: by the name of the Submit's leg.
        load_report: called at every heartbeat.
    """

    def __init__(
        self,
        description: worker_pb2.WorkerDescription,
        engine: EngineThread,
        legs: LegTable,
        factories: Mapping[str, LegFactory],
        load_report: Callable[[], worker_pb2.LoadReport],
    ) -> None:
        self.sessions: dict[str, RouterSession] = {}
        self.draining = False
        # What was given back may be fetched: as hand-offs from here.
        self.lets_move = False
        self._description = description
        self._engine = engine
        self._legs = legs
        self._factories = factories
        self._load_report = load_report

    async def Describe(
        self, request: worker_pb2.DescribeRequest, context: ServicerContext
    ) -> worker_pb2.WorkerDescription:
        return self._description

    async def Connect(
        self, request_iterator: AsyncIterator[worker_pb2.RouterMessage], context: ServicerContext
    ) -> None:
        session = await self._open(request_iterator, context)
        log.info("session %s begins", session.session_id)
        tasks = [
            asyncio.create_task(session.write_all(context.write)),
            asyncio.create_task(self._read_all(session, request_iterator)),
            asyncio.create_task(self._beat(session)),
            asyncio.ensure_future(session.failed),
        ]
        error: BaseException | None = None
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            error = session.failed.result() if session.failed.done() else next(iter(done)).exception()
        finally:
            for task in tasks:
                task.cancel()
            self._close(session)
            log.info("session %s ended: %s", session.session_id, error or "closed by the router")
        if isinstance(error, OutboxFull):
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        if isinstance(error, ValueError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    def tell_cache_changes(self, changes: CacheChanges) -> None:
        """For every engine report, in order."""
        if not changes.stored and not changes.removed:
            return
        for session in self.sessions.values():
            if session.follows_cache:
                session.tell_cache_changes(changes.stored, changes.removed)

    async def _open(
        self, messages: AsyncIterator[worker_pb2.RouterMessage], context: ServicerContext
    ) -> RouterSession:
        first = await anext(aiter(messages), worker_pb2.RouterMessage())
        hello = first.hello
        if not hello.session or hello.session in self.sessions:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "the first message is a Hello with a session of its own"
            )
        if abs(hello.protocol_version - PROTOCOL_VERSION) > 1:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"protocol version: the router has {hello.protocol_version}, the worker {PROTOCOL_VERSION}",
            )
        if self.draining:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the worker is leaving")
        session = RouterSession(hello.session)
        self.sessions[hello.session] = session
        session.tell(worker_pb2.WorkerMessage(description=self._description))
        return session

    async def _read_all(
        self, session: RouterSession, messages: AsyncIterator[worker_pb2.RouterMessage]
    ) -> None:
        # Changes are told from the report on that follows the snapshot.
        await self._engine.call(Engine.cached_names, session.tell_cache)
        async for message in messages:
            match message.WhichOneof("message"):
                case "submit":
                    self._submit(session, message.submit)
                case "cancel":
                    self._legs.cancel(sequence_id(session.session_id, message.cancel.attempt.number))
                case "cache_query":
                    await self._engine.call(Engine.cached_names, session.tell_cache)
                case other:
                    raise ValueError(f"a router does not send {other} in a session")

    def _submit(self, session: RouterSession, submit: worker_pb2.Submit) -> None:
        session.begin(submit.attempt.number)
        try:
            kind = submit.WhichOneof("leg") or "none"
            if self.draining and not (self.lets_move and kind == "prefill"):
                raise LegDropped(worker_pb2.DROP_CAUSE_DRAINING, "the worker is leaving")
            factory = self._factories.get(kind)
            if factory is None:
                raise LegDropped(worker_pb2.DROP_CAUSE_INVALID, f"this worker takes no {kind} leg")
            self._legs.start(factory(Assignment(session, submit)))
        except LegDropped as dropped:
            session.forget(submit.attempt.number)
            session.event().dropped.append(
                worker_pb2.Dropped(attempt=submit.attempt, cause=dropped.cause, detail=dropped.detail)
            )

    async def _beat(self, session: RouterSession) -> None:
        while True:
            session.tell(worker_pb2.WorkerMessage(load=self._load_report()))
            await asyncio.sleep(HEARTBEAT_S)

    def _close(self, session: RouterSession) -> None:
        del self.sessions[session.session_id]
        for number in session.end():
            self._legs.cancel(sequence_id(session.session_id, number))
