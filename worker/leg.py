"""One attempt's part on this worker, and the table of those that live."""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.logprobs import TokenLogprobs
from engine.request import FinishReason, SequenceId
from engine.step_result import EndedSequence, HeldSequence, SampledToken
from protos import inference_pb2, worker_pb2
from worker.engine_thread import EngineReport
from worker.session import RouterSession

log = logging.getLogger(__name__)

FINISH_REASONS = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}


@dataclass(frozen=True, slots=True)
class Assignment:
    """A Submit, and the session it came by. `received`: `time.monotonic()` seconds."""

    session: RouterSession
    submit: worker_pb2.Submit
    received: float = field(default_factory=time.monotonic)

    @property
    def sequence_id(self) -> SequenceId:
        return sequence_id(self.session.session_id, self.submit.attempt.number)


def sequence_id(session_id: str, number: int) -> SequenceId:
    """What the engine calls an attempt."""
    return SequenceId(f"{session_id}/{number}")


class LegDropped(Exception):
    """The attempt is over on this worker without an end of the sequence: told to the router as Dropped."""

    def __init__(self, cause: worker_pb2.DropCause, detail: str) -> None:
        super().__init__(detail)
        self.cause = cause
        self.detail = detail


class Leg(ABC):
    """One attempt's part on this worker.

    `run` is its whole life: it returns when the attempt is over here, and raises LegDropped when it failed.
    `close` follows, also when `run` was cancelled, before it began even. The `on_` methods come from the
    engine, in the order of its steps, and must not block.
    """

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment

    @abstractmethod
    async def run(self) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Frees what the leg holds. Called once."""

    def on_granted(self, cached_tokens: int) -> None:
        """The sequence holds its blocks; a hand-off may fill those after its first `cached_tokens`."""
        raise AssertionError("this leg takes no hand-off")

    def on_held(self, held: HeldSequence) -> None:
        """The samples have their first tokens, and the blocks are kept."""
        raise AssertionError("this leg makes no hand-off")

    def on_token(self, token: SampledToken) -> None:
        told = worker_pb2.SequenceTokens(
            attempt=self.assignment.submit.attempt,
            sample=token.sample,
            index=token.index,
            token_ids=[token.token],
        )
        if token.logprobs is not None:
            told.logprobs.append(_logprobs(token.logprobs))
        self.assignment.session.event().tokens.append(told)

    def on_prompt_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """`logprobs`: of every prompt token but the first."""
        told = [inference_pb2.TokenLogprobs(), *map(_logprobs, logprobs)]
        self.assignment.session.event().prompt_logprobs.append(
            worker_pb2.PromptLogprobs(attempt=self.assignment.submit.attempt, tokens=told)
        )

    @abstractmethod
    def on_ended(self, ended: EndedSequence) -> None:
        """A sample has its end and its blocks are free."""

    def report_finished(self, ended: EndedSequence) -> None:
        """Tells the router the end, with the stages that were this worker's."""
        marks, submit = ended.marks, self.assignment.submit
        finished = worker_pb2.Finished(
            attempt=submit.attempt,
            sample=ended.sample,
            finish_reason=FINISH_REASONS[ended.reason],
            cached_tokens=ended.cached_tokens,
        )
        if marks.first_token:
            finished.queue_s = marks.first_chunk - self.assignment.received
            finished.prefill_s = marks.first_token - marks.first_chunk
        if marks.first_decode:
            finished.decode_wait_s = marks.first_decode - marks.decode_ready
            finished.decode_s = marks.last_token - marks.first_decode
        self.assignment.session.event().finished.append(finished)


def _logprobs(logprobs: TokenLogprobs) -> inference_pb2.TokenLogprobs:
    return inference_pb2.TokenLogprobs(
        logprob=logprobs.logprob,
        top_token_ids=logprobs.top_token_ids,
        top_logprobs=logprobs.top_logprobs,
    )


LegFactory = Callable[[Assignment], Leg]


class LegTable:
    """Every leg that lives on this worker. Its owner gives it the engine's reports."""

    def __init__(self) -> None:
        self._legs: dict[SequenceId, Leg] = {}
        self._tasks: dict[SequenceId, asyncio.Task[None]] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self._busy = asyncio.Event()

    def __len__(self) -> int:
        return len(self._legs)

    def get(self, key: SequenceId) -> Leg | None:
        return self._legs.get(key)

    def start(self, leg: Leg) -> None:
        key = leg.assignment.sequence_id
        self._legs[key] = leg
        task = asyncio.create_task(self._run(leg), name=f"leg {key}")
        task.add_done_callback(lambda _: self._forget(leg))
        self._tasks[key] = task
        self._empty.clear()
        self._busy.set()

    def cancel(self, key: SequenceId) -> asyncio.Task[None] | None:
        """Ends a leg without a word to the router. Returns what ends when it has cleaned up."""
        task = self._tasks.get(key)
        if task is not None:
            task.cancel()
        return task

    def drop_all(self, dropped: LegDropped) -> None:
        """Ends every leg and tells its router why."""
        for key, leg in self._legs.items():
            self._report_dropped(leg.assignment, dropped)
            self._tasks[key].cancel()

    async def wait_empty(self) -> None:
        await self._empty.wait()

    async def wait_busy(self) -> None:
        """Returns when there is a leg."""
        await self._busy.wait()

    async def _run(self, leg: Leg) -> None:
        assignment = leg.assignment
        try:
            await leg.run()
        except LegDropped as dropped:
            self._report_dropped(assignment, dropped)
        except Exception as error:
            log.exception("request %s failed", assignment.submit.request_id)
            self._report_dropped(assignment, LegDropped(worker_pb2.DROP_CAUSE_INTERNAL, repr(error)))

    def _forget(self, leg: Leg) -> None:
        key = leg.assignment.sequence_id
        del self._legs[key], self._tasks[key]
        leg.close()
        leg.assignment.session.forget(leg.assignment.submit.attempt.number)
        if not self._legs:
            self._empty.set()
            self._busy.clear()

    def _report_dropped(self, assignment: Assignment, dropped: LegDropped) -> None:
        log.info("request %s dropped: %s", assignment.submit.request_id, dropped.detail)
        assignment.session.event().dropped.append(
            worker_pb2.Dropped(attempt=assignment.submit.attempt, cause=dropped.cause, detail=dropped.detail)
        )

    def dispatch(self, report: EngineReport) -> None:
        """Hands an engine report to the legs it speaks of. What it says of one that is over is dropped."""
        for granted in report.granted:
            if (leg := self._legs.get(granted.sequence_id)) is not None:
                leg.on_granted(granted.cached_tokens)
        if report.step is None:
            return
        for told in report.step.prompt_logprobs:
            if (leg := self._legs.get(told.sequence_id)) is not None:
                leg.on_prompt_logprobs(told.tokens)
        for token in report.step.tokens:
            if (leg := self._legs.get(token.sequence_id)) is not None:
                leg.on_token(token)
        for ended in report.step.ended:
            if (leg := self._legs.get(ended.sequence_id)) is not None:
                leg.on_ended(ended)
        for held in report.step.held:
            if (leg := self._legs.get(held.sequence_id)) is not None:
                leg.on_held(held)
