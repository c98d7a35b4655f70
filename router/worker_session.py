"""One session with one worker: a `Worker.Connect` stream from its Hello to its end."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import grpc

from protos import PROTOCOL_VERSION, worker_pb2, worker_pb2_grpc
from router.cluster_view import Role, WorkerSnapshot
from router.observations import Observations
from router.sent_load import SentLoad
from security.channel_security import ChannelSecurity

logger = logging.getLogger(__name__)

# Messages that wait for a worker to read them: beyond it the worker counts as lost.
OUTBOX_MESSAGES = 4096


_CHANNEL_OPTIONS = [
    # A new connection for every session, whatever became of the last one.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", 64 << 20),
]


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The session ended with the attempt still in it."""

    reason: str


SentEvent = (
    worker_pb2.PromptLogprobs
    | worker_pb2.Admitted
    | worker_pb2.Prefilled
    | worker_pb2.Finished
    | worker_pb2.Dropped
)
LegEvent = SentEvent | SessionLost


class LegListener(Protocol):
    """Hears what a worker says of one leg, in order."""

    def __call__(self, event: LegEvent, /) -> None: ...

    def hear_tokens(self, event: worker_pb2.SequenceTokens, /) -> None:
        """What is said most."""
        ...


class WorkerRefused(Exception):
    """The worker serves another model or speaks another protocol."""


class WorkerSession:
    """Submits attempts to a worker and passes on what it says of them.

    Everything that the worker says is dispatched at once, in order: the reader never waits for anybody.
    """

    def __init__(
        self,
        address: str,
        model: str,
        stall_limit_s: float,
        security: ChannelSecurity,
        observations: Observations,
    ) -> None:
        """
        Args:
            model: that the worker must serve.
            stall_limit_s: a worker silent for longer loses the session.
            observations: told of the worker's cache and of its hand-offs.
        """
        self.id = secrets.token_hex(16)
        self.address = address
        self.description: worker_pb2.WorkerDescription | None = None
        self.load: worker_pb2.LoadReport | None = None
        self.heard_s: float | None = None
        self._model = model
        self._stall_limit_s = stall_limit_s
        self._security = security
        self._observations = observations
        self._outbox: asyncio.Queue[worker_pb2.RouterMessage] = asyncio.Queue(OUTBOX_MESSAGES)
        self._listeners: dict[int, LegListener] = {}
        # To whom the prefill legs hand off: the decode workers' ids.
        self._receivers: dict[int, str] = {}
        self._sent = SentLoad()
        # Prompt tokens and blocks that the next submission takes.
        self._expected = (0, 0)
        # The worker by its own last word, and with what was sent since: until that changes.
        self._reported: WorkerSnapshot | None = None
        self._snapshot: WorkerSnapshot | None = None
        self._end_timeout: asyncio.Timeout | None = None
        self._silence: asyncio.TimerHandle | None = None
        self._end_reason: str | None = None
        self._retiring = False

    @property
    def in_flight(self) -> int:
        """Attempts that the worker has not ended."""
        return len(self._listeners)

    async def run(self, on_change: Callable[[], None]) -> str:
        """Holds the session until it ends. Then every attempt that is left has heard `SessionLost`.

        Args:
            on_change: called after the description and after every load report.

        Returns:
            Why it ended.

        Raises:
            WorkerRefused: the description does not fit.
        """
        reason = "the router ended the session"
        try:
            reason = await self._read_until_end(on_change)
        except WorkerRefused as error:
            reason = str(error)
            raise
        finally:
            self._end_reason = reason
            self._observations.prefixes.forget(self.id)
            listeners, self._listeners = self._listeners, {}
            for listener in listeners.values():
                listener(SessionLost(reason))
        return reason

    async def _read_until_end(self, on_change: Callable[[], None]) -> str:
        loop = asyncio.get_running_loop()
        try:
            async with (
                self._security.connect(self.address, _CHANNEL_OPTIONS) as channel,
                asyncio.timeout(None) as self._end_timeout,
            ):
                self._listen_for_silence(loop.time())
                try:
                    call = worker_pb2_grpc.WorkerStub(channel).Connect(self._outgoing())
                    async for message in call:
                        if self._end_reason is not None:
                            break
                        self.heard_s = loop.time()
                        self._hear(message, on_change)
                finally:
                    # A timeout that is over cannot be set again.
                    self._end_timeout = None
        except TimeoutError:
            return self._end_reason or f"silent for more than {self._stall_limit_s:g} s"
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        finally:
            if self._silence is not None:
                self._silence.cancel()
        return self._end_reason or "the worker closed the session"

    def _listen_for_silence(self, heard_s: float) -> None:
        """Until the limit is over since the worker's last word. A word costs no timer."""
        loop = asyncio.get_running_loop()
        limit_s = heard_s + self._stall_limit_s
        if loop.time() >= limit_s:
            self._expire()
        else:
            self._silence = loop.call_at(limit_s, lambda: self._listen_for_silence(self.heard_s or heard_s))

    def _expire(self) -> None:
        if self._end_timeout is not None:
            self._end_timeout.reschedule(asyncio.get_running_loop().time())

    async def _outgoing(self) -> AsyncIterator[worker_pb2.RouterMessage]:
        hello = worker_pb2.Hello(protocol_version=PROTOCOL_VERSION, session=self.id)
        yield worker_pb2.RouterMessage(hello=hello)
        while True:
            yield await self._outbox.get()

    def _hear(self, message: worker_pb2.WorkerMessage, on_change: Callable[[], None]) -> None:
        match message.WhichOneof("message"):
            case "step":
                self._dispatch(message.step)
            case "load":
                self.load = message.load
                self._sent.reported()
                self._take_report()
                on_change()
            case "cache":
                if not self._observations.prefixes.hear(self.id, message.cache):
                    self._send(worker_pb2.RouterMessage(cache_query=worker_pb2.CacheQuery()))
            case "description":
                self._accept(message.description)
                self._take_report()
                on_change()

    def _accept(self, description: worker_pb2.WorkerDescription) -> None:
        if abs(description.protocol_version - PROTOCOL_VERSION) > 1:
            raise WorkerRefused(
                f"{description.worker_id} speaks protocol {description.protocol_version}, "
                f"this router {PROTOCOL_VERSION}"
            )
        if description.model != self._model:
            raise WorkerRefused(
                f"{description.worker_id} serves {description.model!r}, this router {self._model!r}"
            )
        self.description = description

    def _dispatch(self, step: worker_pb2.StepEvent) -> None:
        for prefilled in step.prefilled:
            self._observe_handoff(prefilled)
        self._tell(step.prompt_logprobs)
        # Tokens before the event that ends their attempt.
        self._tell_tokens(step.tokens)
        for events in (step.admitted, step.prefilled, step.finished, step.dropped):
            self._tell(events)

    def _tell(self, events: Iterable[SentEvent]) -> None:
        for event in events:
            listener = self._listeners.get(event.attempt.number)
            if listener is not None:
                listener(event)

    def _tell_tokens(self, events: Iterable[worker_pb2.SequenceTokens]) -> None:
        uncomputed = self._sent.uncomputed
        for event in events:
            number = event.attempt.number
            if number in uncomputed:
                self._sent.computed(number)
                self._snapshot = None
            listener = self._listeners.get(number)
            if listener is not None:
                listener.hear_tokens(event)

    def _observe_handoff(self, event: worker_pb2.Prefilled) -> None:
        receiver = self._receivers.get(event.attempt.number)
        if receiver is not None and self.description is not None:
            sender = self.description.worker_id
            self._observations.links.measured(sender, receiver, event.kv_bytes, event.transfer_s)

    def expect(self, *, prompt_tokens: int, blocks: int) -> None:
        """What the submission that follows at once will take of the worker."""
        self._expected = (prompt_tokens, blocks)

    def submit(self, submit: worker_pb2.Submit, listener: LegListener) -> None:
        """Queues a submission; `listener` hears all of the attempt until `release` or `cancel`.

        Numbers must grow from call to call: draw and submit without an await in between.
        """
        self._listeners[submit.attempt.number] = listener
        self._sent.submitted(submit.attempt.number, *self._expected)
        self._expected = (0, 0)
        self._snapshot = None
        if submit.WhichOneof("leg") == "prefill":
            self._receivers[submit.attempt.number] = submit.prefill.decode_worker_id
        self._send(worker_pb2.RouterMessage(submit=submit))

    def cancel(self, attempt: worker_pb2.Attempt) -> None:
        """Ends an attempt on the worker. Nothing more is heard of it."""
        if self._forget(attempt.number):
            self._send(worker_pb2.RouterMessage(cancel=worker_pb2.Cancel(attempt=attempt)))
            self._end_if_retired()

    def release(self, number: int) -> None:
        """The worker has ended the attempt: nothing more is heard of it."""
        if self._forget(number):
            self._end_if_retired()

    def _forget(self, number: int) -> bool:
        """False: it is forgotten already."""
        self._receivers.pop(number, None)
        self._sent.ended(number)
        self._snapshot = None
        return self._listeners.pop(number, None) is not None

    def retire(self) -> None:
        """Ends the session as soon as no attempt is left in it."""
        self._retiring = True
        self._take_report()
        self._end_if_retired()

    def unretire(self) -> None:
        self._retiring = False
        self._take_report()

    def _end_if_retired(self) -> None:
        if self._retiring and not self._listeners:
            self._end("the worker has left the directory")

    def _send(self, message: worker_pb2.RouterMessage) -> None:
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            self._end("the worker does not read")

    def _end(self, reason: str) -> None:
        if self._end_reason is None and self._end_timeout is not None:
            self._end_reason = reason
            self._expire()

    def snapshot(self) -> WorkerSnapshot | None:
        """The worker as placement sees it. None: it has not said yet who it is and how busy."""
        reported = self._reported
        if reported is None or self._end_reason is not None:
            return None
        if self._snapshot is None:
            sent = self._sent
            self._snapshot = reported._replace(
                free_blocks=reported.free_blocks - sent.blocks,
                num_waiting=reported.num_waiting + sent.num_sequences,
                waiting_prompt_tokens=sent.waiting_prompt_tokens(reported.waiting_prompt_tokens),
            )
        return self._snapshot

    def _take_report(self) -> None:
        self._snapshot = None
        description, load = self.description, self.load
        if description is None or load is None:
            return
        layout = description.layout
        self._reported = WorkerSnapshot(
            address=self.address,
            worker_id=description.worker_id,
            epoch=description.epoch,
            session=self.id,
            role=role_of(description),
            fingerprint=layout.model_fingerprint,
            wire_dtype=description.wire_dtype,
            accepted_dtypes=frozenset(description.accepted_dtypes),
            block_size=layout.block_size,
            capacity_tokens=min(description.max_model_len, description.num_blocks * layout.block_size),
            token_bytes=description.wire_token_bytes,
            num_blocks=load.num_blocks,
            free_blocks=load.free_blocks,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            waiting_prompt_tokens=load.waiting_prompt_tokens,
            step_s=load.step_s,
            prefill_tokens_per_s=load.prefill_tokens_per_s,
            draining=load.draining or self._retiring,
        )


def role_of(description: worker_pb2.WorkerDescription) -> Role:
    return Role.PREFILL if description.role == worker_pb2.ROLE_PREFILL else Role.DECODE
