"""One attempt at a request: what its workers say of it, merged into one course."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

from protos import inference_pb2, worker_pb2
from router.completion import FinishReason, ServedBy, StageTimes
from router.errors import ErrorCode, RequestError, unavailable
from router.stage_clock import StageClock
from router.submission import AttemptId
from router.token_merge import TokenMerge
from router.worker_session import LegEvent, SessionLost, WorkerSession

# How long one worker's word is waited for after the other's has all but decided.
PATIENCE_S = 1.0

_FINISH_REASONS = {
    inference_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    inference_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}
# After these a prefill worker has not begun its Push and never will: nothing is left to decide.
_REFUSALS = frozenset(
    {worker_pb2.DROP_CAUSE_INVALID, worker_pb2.DROP_CAUSE_DRAINING, worker_pb2.DROP_CAUSE_INCOMPATIBLE}
)


class Leg(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    LOCAL = "local"

    @classmethod
    def of(cls, submit: worker_pb2.Submit) -> "Leg":
        return cls(submit.WhichOneof("leg"))


@dataclass(frozen=True, slots=True)
class Tokens:
    """A gapless run, `arrived_s` on `time.monotonic`'s clock."""

    index: int
    token_ids: tuple[int, ...]
    arrived_s: float


class Attempt:
    """Listens to both legs and decides.

    The decode (or local) leg decides: its Finished, its Dropped, the end of its session. The prefill
    leg decides only when it finishes the sequence at its first token or refuses it before any
    hand-off; its other failures are hints, because the hand-off may have been accepted: the decode
    leg has `PATIENCE_S` to say so.
    As soon as the attempt is decided, every leg that has not ended is cancelled.
    """

    def __init__(self, identity: AttemptId, *, first_index: int, max_tokens: int, arrival_s: float) -> None:
        """
        Args:
            first_index: of the next token: as many are generated already.
            max_tokens: generated tokens in all, earlier attempts' included.
        """
        self._wire_id = worker_pb2.Attempt(number=identity.number, attempt=identity.attempt)
        self._clock = StageClock(arrival_s, time.monotonic())
        self._merge = TokenMerge(first_index, max_tokens)
        self._sessions: dict[Leg, WorkerSession] = {}
        self._worker_ids: dict[Leg, str] = {}
        self._open: set[Leg] = set()
        self._changed = asyncio.Event()
        self._patience: asyncio.TimerHandle | None = None
        self._hint: RequestError | None = None
        self._admitted = False
        self._kv_bytes = 0
        self._finish: tuple[Leg, FinishReason] | None = None
        self._outcome: FinishReason | RequestError | None = None

    def submit(self, legs: Sequence[tuple[WorkerSession, str, worker_pb2.Submit]]) -> None:
        """Submits every leg: its session, its worker's id, its message."""
        for session, worker_id, message in legs:
            leg = Leg.of(message)
            self._sessions[leg] = session
            self._worker_ids[leg] = worker_id
            self._open.add(leg)
        for session, _, message in legs:
            session.submit(message, partial(self._hear, Leg.of(message)))

    async def next_tokens(self) -> Tokens | None:
        """All tokens since the last call, at least one. None: the sequence has its end.

        Raises:
            RequestError: the attempt failed. Every token that was said before is out.
        """
        while not self._merge.has_ready:
            match self._outcome:
                case RequestError() as error:
                    raise error
                case FinishReason():
                    return None
            self._changed.clear()
            await self._changed.wait()
        index, token_ids = self._merge.take()
        assert self._clock.last_token_s is not None
        return Tokens(index, token_ids, self._clock.last_token_s)

    @property
    def finish_reason(self) -> FinishReason:
        """Of an attempt whose `next_tokens` has returned None."""
        assert isinstance(self._outcome, FinishReason)
        return self._outcome

    def stage_times(self) -> StageTimes:
        return self._clock.times()

    def served_by(self) -> ServedBy:
        local = self._worker_ids.get(Leg.LOCAL)
        if local is not None:
            return ServedBy(local, local, 0)
        decode_worker = self._worker_ids[Leg.DECODE] if self._admitted else ""
        return ServedBy(self._worker_ids[Leg.PREFILL], decode_worker, self._kv_bytes)

    def close(self) -> None:
        """Cancels whatever still runs on a worker. May be called at any time, and again."""
        if self._patience is not None:
            self._patience.cancel()
        for leg in self._open:
            self._sessions[leg].cancel(self._wire_id)
        self._open.clear()

    def _hear(self, leg: Leg, event: LegEvent) -> None:
        match event:
            case worker_pb2.SequenceTokens():
                self._on_tokens(event)
            case worker_pb2.Admitted():
                self._admitted, self._kv_bytes = True, event.kv_bytes
                self._clock.admitted(time.monotonic())
            case worker_pb2.Prefilled():
                self._over(leg)
                self._clock.prefilled(event)
            case worker_pb2.Finished():
                self._over(leg)
                self._on_finished(leg, event)
            case worker_pb2.Dropped():
                self._over(leg)
                self._on_dropped(leg, event)
            case SessionLost():
                self._over(leg)
                self._on_lost(leg, unavailable(f"worker {self._worker_ids[leg]} died: {event.reason}"))
        self._settle()
        self._changed.set()

    def _over(self, leg: Leg) -> None:
        self._open.discard(leg)
        self._sessions[leg].release(self._wire_id.number)

    def _on_tokens(self, event: worker_pb2.SequenceTokens) -> None:
        before = self._merge.next_index
        self._merge.add(event.index, event.token_ids)
        if self._merge.next_index > before:
            self._clock.token(time.monotonic())

    def _on_finished(self, leg: Leg, event: worker_pb2.Finished) -> None:
        if self._finish is None:
            self._finish = (leg, _FINISH_REASONS.get(event.finish_reason, FinishReason.STOP))
        if leg is not Leg.DECODE:
            self._clock.prefilled(event)
        if leg is not Leg.PREFILL:
            self._clock.decoded(event)

    def _on_dropped(self, leg: Leg, event: worker_pb2.Dropped) -> None:
        if leg is Leg.DECODE and event.cause == worker_pb2.DROP_CAUSE_ENDED_AT_FIRST_TOKEN:
            # The prefill worker's Finished says the same, and how it ended: it came or will come.
            self._expect(unavailable(f"worker {self._worker_ids[Leg.PREFILL]} did not say how it ended"))
            return
        error = self._drop_error(leg, event)
        if leg is Leg.PREFILL and event.cause in _REFUSALS and not self._admitted:
            self._conclude(error)
        else:
            self._on_failed(leg, error)

    def _on_lost(self, leg: Leg, died: RequestError) -> None:
        if leg is Leg.PREFILL:
            self._on_failed(leg, died)
        elif self._finish is None:
            # Whatever the prefill worker said before: this is its cause.
            self._conclude(died)

    def _on_failed(self, leg: Leg, error: RequestError) -> None:
        if self._finish is not None:
            return
        if leg is Leg.PREFILL:
            if Leg.DECODE not in self._open:
                self._conclude(error)
            elif not self._admitted:
                self._expect(error)
        elif self._hint is not None and not self._admitted:
            # The prefill worker's own word is nearer to the cause.
            self._conclude(self._hint)
        else:
            self._conclude(error)

    def _drop_error(self, leg: Leg, event: worker_pb2.Dropped) -> RequestError:
        cause = worker_pb2.DropCause.Name(event.cause).removeprefix("DROP_CAUSE_").lower()
        message = f"worker {self._worker_ids[leg]} dropped the request ({cause}): {event.detail}"
        match event.cause:
            case worker_pb2.DROP_CAUSE_INVALID:
                return RequestError(ErrorCode.INVALID_ARGUMENT, event.detail or message)
            case worker_pb2.DROP_CAUSE_INTERNAL | worker_pb2.DROP_CAUSE_INCOMPATIBLE:
                return RequestError(ErrorCode.INTERNAL, message)
            case worker_pb2.DROP_CAUSE_PUSH_BROKEN | worker_pb2.DROP_CAUSE_DAMAGED if leg is Leg.DECODE:
                return unavailable(f"the hand-off from {self._worker_ids[Leg.PREFILL]} failed: {message}")
            case _:
                return unavailable(message)

    def _settle(self) -> None:
        """Concludes a sequence that has its end, once nothing that belongs to it can still come."""
        if self._finish is None or self._outcome is not None:
            return
        leg, reason = self._finish
        awaits_times = leg is Leg.DECODE and Leg.PREFILL in self._open
        if not self._merge.has_gap and not awaits_times:
            self._conclude(reason)
        elif Leg.PREFILL not in self._open:
            self._conclude(self._gap_error())
        else:
            self._expect(self._gap_error())

    def _gap_error(self) -> RequestError:
        return RequestError(ErrorCode.INTERNAL, f"token {self._merge.next_index} never came")

    def _expect(self, otherwise: RequestError) -> None:
        """Another word is due, within `PATIENCE_S`; `otherwise` is the outcome without it."""
        if self._outcome is None and self._patience is None:
            self._hint = otherwise
            loop = asyncio.get_running_loop()
            self._patience = loop.call_later(PATIENCE_S, self._lose_patience)

    def _lose_patience(self) -> None:
        if self._finish is not None and not self._merge.has_gap:
            self._conclude(self._finish[1])
        elif self._hint is not None and not self._admitted:
            self._conclude(self._hint)
        elif self._finish is not None:
            self._conclude(self._gap_error())

    def _conclude(self, outcome: FinishReason | RequestError) -> None:
        if self._outcome is None:
            self._outcome = outcome
            self._changed.set()
            self.close()
