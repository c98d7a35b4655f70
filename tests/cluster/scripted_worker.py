"""A worker that does what a test says: a real gRPC server of baton.v1.Worker without an engine."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

import grpc

from protos import kv_pb2, worker_pb2, worker_pb2_grpc
from protos.inference_pb2 import FINISH_REASON_LENGTH, FinishReason, TokenLogprobs

DEADLINE_S = 20.0
BLOCK_SIZE = 16

Event = TypeVar("Event")


class SubmittedLeg:
    """One leg that the router submitted: the test answers it."""

    def __init__(self, session: "ScriptedSession", submit: worker_pb2.Submit) -> None:
        self.submit = submit
        self.session = session
        self.cancelled = asyncio.Event()

    @property
    def kind(self) -> str:
        return self.submit.WhichOneof("leg") or ""

    def say_tokens(
        self,
        index: int,
        token_ids: Sequence[int],
        *,
        sample: int = 0,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> None:
        tokens = worker_pb2.SequenceTokens(
            attempt=self.submit.attempt, sample=sample, index=index, token_ids=token_ids, logprobs=logprobs
        )
        self.session.say(worker_pb2.StepEvent(tokens=[tokens]))

    def say_prompt_logprobs(self, tokens: Sequence[TokenLogprobs]) -> None:
        told = worker_pb2.PromptLogprobs(attempt=self.submit.attempt, tokens=tokens)
        self.session.say(worker_pb2.StepEvent(prompt_logprobs=[told]))

    def say_admitted(self, kv_bytes: int = 0) -> None:
        admitted = worker_pb2.Admitted(attempt=self.submit.attempt, kv_bytes=kv_bytes)
        self.session.say(worker_pb2.StepEvent(admitted=[admitted]))

    def say_prefilled(self, **stages: float) -> None:
        prefilled = worker_pb2.Prefilled(attempt=self.submit.attempt, **stages)
        self.session.say(worker_pb2.StepEvent(prefilled=[prefilled]))

    def say_finished(
        self, reason: FinishReason = FINISH_REASON_LENGTH, *, sample: int = 0, **stages: float
    ) -> None:
        finished = worker_pb2.Finished(
            attempt=self.submit.attempt, sample=sample, finish_reason=reason, **stages
        )
        self.session.say(worker_pb2.StepEvent(finished=[finished]))

    def say_dropped(self, cause: worker_pb2.DropCause, detail: str = "") -> None:
        dropped = worker_pb2.Dropped(attempt=self.submit.attempt, cause=cause, detail=detail)
        self.session.say(worker_pb2.StepEvent(dropped=[dropped]))

    async def cancel_arrives(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await self.cancelled.wait()


class ScriptedSession:
    """One Connect stream."""

    def __init__(self, hello: worker_pb2.Hello) -> None:
        self.hello = hello
        self.legs: dict[int, SubmittedLeg] = {}
        self.numbers: list[int] = []
        self.outbox: asyncio.Queue[worker_pb2.WorkerMessage] = asyncio.Queue()
        self.cache_queries: asyncio.Queue[worker_pb2.CacheQuery] = asyncio.Queue()
        self._steps = itertools.count()

    def say(self, event: worker_pb2.StepEvent) -> None:
        event.step = next(self._steps)
        self.outbox.put_nowait(worker_pb2.WorkerMessage(step=event))

    def say_cache(self, number: int, stored: Sequence[bytes], *, is_snapshot: bool = False) -> None:
        event = worker_pb2.CacheEvent(number=number, stored=stored, is_snapshot=is_snapshot)
        self.outbox.put_nowait(worker_pb2.WorkerMessage(cache=event))

    async def cache_query_arrives(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await self.cache_queries.get()


class ScriptedWorker(worker_pb2_grpc.WorkerServicer):
    """Describes itself as told, reports a load once per session and whenever told, and queues what the
    router submits for the test to take.
    """

    def __init__(
        self,
        role: worker_pb2.Role,
        worker_id: str,
        *,
        model: str = "tiny",
        fingerprint: str = "f",
        epoch: int = 1,
        max_model_len: int = 4096,
        num_blocks: int = 1024,
        protocol_version: int = 1,
        address: str = "127.0.0.1:0",
    ) -> None:
        self.description = worker_pb2.WorkerDescription(
            protocol_version=protocol_version,
            worker_id=worker_id,
            epoch=epoch,
            role=role,
            model=model,
            layout=kv_pb2.KvLayout(model_fingerprint=fingerprint, dtype="float32", block_size=BLOCK_SIZE),
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            wire_dtype="float32",
            accepted_dtypes=["float32"],
        )
        self.load = worker_pb2.LoadReport(num_blocks=num_blocks, free_blocks=num_blocks)
        self.address = address
        self.sessions: asyncio.Queue[ScriptedSession] = asyncio.Queue()
        self.submitted: asyncio.Queue[SubmittedLeg] = asyncio.Queue()
        self.open_sessions: list[ScriptedSession] = []
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])

    async def __aenter__(self) -> "ScriptedWorker":
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(self.address)
        await self._server.start()
        self.address = f"127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()

    async def die(self) -> None:
        """Closes every connection at once, and the port."""
        await self._server.stop(None)

    async def next_leg(self) -> SubmittedLeg:
        """The next leg that the router submits."""
        async with asyncio.timeout(DEADLINE_S):
            return await self.submitted.get()

    async def next_session(self) -> ScriptedSession:
        async with asyncio.timeout(DEADLINE_S):
            return await self.sessions.get()

    def report(self, load: worker_pb2.LoadReport) -> None:
        self.load = load
        for session in self.open_sessions:
            session.outbox.put_nowait(worker_pb2.WorkerMessage(load=load))

    async def Describe(self, request: worker_pb2.DescribeRequest, context: grpc.aio.ServicerContext):
        return self.description

    async def Connect(
        self, request_iterator: AsyncIterator[worker_pb2.RouterMessage], context: grpc.aio.ServicerContext
    ) -> None:
        session = ScriptedSession((await anext(request_iterator)).hello)
        session.outbox.put_nowait(worker_pb2.WorkerMessage(description=self.description))
        session.outbox.put_nowait(worker_pb2.WorkerMessage(load=self.load))
        self.open_sessions.append(session)
        self.sessions.put_nowait(session)
        try:
            async with asyncio.TaskGroup() as group:
                writer = group.create_task(self._write(session, context))
                async for message in request_iterator:
                    self._hear(session, message)
                writer.cancel()
        finally:
            self.open_sessions.remove(session)

    async def _write(self, session: ScriptedSession, context: grpc.aio.ServicerContext) -> None:
        while True:
            await context.write(await session.outbox.get())

    def _hear(self, session: ScriptedSession, message: worker_pb2.RouterMessage) -> None:
        match message.WhichOneof("message"):
            case "submit":
                number = message.submit.attempt.number
                session.numbers.append(number)
                session.legs[number] = leg = SubmittedLeg(session, message.submit)
                self.submitted.put_nowait(leg)
            case "cache_query":
                session.cache_queries.put_nowait(message.cache_query)
            case "cancel":
                session.legs[message.cancel.attempt.number].cancelled.set()
