"""A router's session with one worker, without a router: a test says what each leg is told."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

import grpc

from protos import PROTOCOL_VERSION, worker_pb2, worker_pb2_grpc


@dataclass(slots=True)
class Told:
    """All that a worker told of one attempt.

    Attributes:
        tokens: by index, of its first sample.
        outcomes: every Admitted and Dropped.
        over: the sequence has its end here, or was dropped, or handed over.
    """

    tokens: dict[int, int] = field(default_factory=dict)
    outcomes: list[worker_pb2.Admitted | worker_pb2.Dropped] = field(default_factory=list)
    finished: list[worker_pb2.Finished] = field(default_factory=list)
    prefilled: list[worker_pb2.Prefilled] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def text(self) -> tuple[int, ...]:
        return tuple(self.tokens[index] for index in sorted(self.tokens))


class _Event(Protocol):
    @property
    def attempt(self) -> worker_pb2.Attempt: ...


class BareSession:
    """
    Attributes:
        description: the worker's.
        told: by the attempt's number.
        doubled: attempts of which a second outcome was told.
    """

    def __init__(self, call: grpc.aio.StreamStreamCall, session_id: str) -> None:
        self.session_id = session_id
        self.description = worker_pb2.WorkerDescription()
        self.told: dict[int, Told] = {}
        self.doubled: list[int] = []
        self._decided: set[int] = set()
        self._call = call
        self._writing = asyncio.Lock()

    async def submit(self, submit: worker_pb2.Submit) -> Told:
        told = self.told[submit.attempt.number] = Told()
        await self._write(worker_pb2.RouterMessage(submit=submit))
        return told

    async def cancel(self, number: int) -> None:
        attempt = worker_pb2.Attempt(number=number)
        await self._write(worker_pb2.RouterMessage(cancel=worker_pb2.Cancel(attempt=attempt)))

    async def _write(self, message: worker_pb2.RouterMessage) -> None:
        async with self._writing:  # gRPC takes one message at a time
            await self._call.write(message)

    def forget(self, number: int) -> None:
        """Of what still comes only a second outcome is noted."""
        self.told.pop(number, None)

    async def read_all(self) -> None:
        while isinstance(message := await self._call.read(), worker_pb2.WorkerMessage):
            if message.HasField("step"):
                self._take(message.step)

    def _take(self, step: worker_pb2.StepEvent) -> None:
        for tokens in step.tokens:
            for offset, token in enumerate(tokens.token_ids):
                self._told_of(tokens).tokens[tokens.index + offset] = token
        for outcome in (*step.admitted, *step.dropped):
            self._told_of(outcome).outcomes.append(outcome)
            if outcome.attempt.number in self._decided:
                self.doubled.append(outcome.attempt.number)
            self._decided.add(outcome.attempt.number)
        for prefilled in step.prefilled:
            self._told_of(prefilled).prefilled.append(prefilled)
        for finished in step.finished:
            self._told_of(finished).finished.append(finished)
        for ending in (*step.dropped, *step.prefilled, *step.finished):
            self._told_of(ending).over.set()

    def _told_of(self, event: _Event) -> Told:
        return self.told.get(event.attempt.number) or Told()


@asynccontextmanager
async def bare_session(address: str, session_id: str) -> AsyncIterator[BareSession]:
    async with grpc.aio.insecure_channel(address) as channel:
        call = worker_pb2_grpc.WorkerStub(channel).Connect()
        session = BareSession(call, session_id)
        hello = worker_pb2.Hello(protocol_version=PROTOCOL_VERSION, session=session_id)
        await call.write(worker_pb2.RouterMessage(hello=hello))
        session.description = (await call.read()).description
        reading = asyncio.create_task(session.read_all())
        yield session
        call.cancel()
        await asyncio.wait([reading])


def submit_message(
    number: int, prompt: tuple[int, ...], max_tokens: int, *, cache_salt: str = ""
) -> worker_pb2.Submit:
    """Greedy, to its last token; its leg is to be set."""
    submit = worker_pb2.Submit(
        attempt=worker_pb2.Attempt(number=number),
        request_id=f"request-{number}",
        secret=b"a secret of the attempt",
        prompt_token_ids=prompt,
        cache_salt=cache_salt,
    )
    submit.sampling.temperature = 0.0
    submit.sampling.max_tokens = max_tokens
    submit.sampling.ignore_eos = True
    return submit


async def submit_pair(
    number: int,
    sender: BareSession,
    receiver: BareSession,
    receiver_address: str,
    message: worker_pb2.Submit,
) -> tuple[Told, Told]:
    """Both legs of an attempt. Returns what each worker tells of it, the sender's first."""
    receive, send = worker_pb2.Submit(), worker_pb2.Submit()
    receive.CopyFrom(message)
    receive.decode.prefill_worker_id = sender.description.worker_id
    send.CopyFrom(message)
    send.prefill.decode_worker_id = receiver.description.worker_id
    send.prefill.decode_address = receiver_address
    send.prefill.decode_epoch = receiver.description.epoch
    send.prefill.decode_session = receiver.session_id
    received = await receiver.submit(receive)
    return await sender.submit(send), received
