"""One attempt at a request: what its workers say of it, merged into one course."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum

from protos import inference_pb2, worker_pb2
from router.completion import FinishReason, ServedBy, StageTimes
from router.failure import Failure, unfinished, worker_dropped, worker_lost
from router.sample_course import SampleCourse, SampleFinished, Tokens
from router.sampling_options import SamplingOptions
from router.stage_clock import StageClock
from router.submission import AttemptId
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
# What a decode worker says of a hand-off that failed on its way: the one at fault is who made it.
_HANDOFF_FAILURES = frozenset(
    {
        worker_pb2.DROP_CAUSE_PUSH_BROKEN,
        worker_pb2.DROP_CAUSE_DAMAGED,
        worker_pb2.DROP_CAUSE_INCOMPATIBLE,
    }
)

AttemptEvent = worker_pb2.PromptLogprobs | Tokens | SampleFinished


class Leg(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    LOCAL = "local"

    @classmethod
    def of(cls, submit: worker_pb2.Submit) -> "Leg":
        return cls(submit.WhichOneof("leg"))


class Attempt:
    """Listens to both legs and decides.

    The decode (or local) leg decides: its Finished of every sample, its Dropped, the end of its session.
    The prefill leg decides only when it finishes all samples at their first token or refuses the attempt
    before any hand-off; its other failures are hints, because the hand-off may have been accepted: the
    decode leg has `PATIENCE_S` to say so.
    As soon as the attempt is decided, every leg that has not ended is cancelled.

    Attributes:
        number: counts the attempts at the request, from 0.
        is_decided: no further word counts. What `take` still gives was said before.
        failure: once it is decided, and some sample has no end.
        cached_tokens: of the prompt, that were not computed; None: no worker has said.
    """

    # So has every object that a token touches: those of two thousand streams do not fit into caches.
    __slots__ = (
        "_admitted",
        "_awaits_prompt",
        "_clock",
        "_courses",
        "_hint",
        "_kv_bytes",
        "_news",
        "_on_change",
        "_open",
        "_patience",
        "_prompt",
        "_sessions",
        "_wire_id",
        "_worker_ids",
        "cached_tokens",
        "failure",
        "is_decided",
        "number",
    )

    def __init__(
        self,
        identity: AttemptId,
        first_indices: Mapping[int, int],
        options: SamplingOptions,
        arrival_s: float,
        on_change: Callable[[], None],
    ) -> None:
        """
        Args:
            first_indices: of every sample the next token's index: as many are generated already.
            options: `prompt_logprobs` are awaited if they are asked for.
            on_change: called when there may be something to take, or the attempt is decided.
        """
        self.number = identity.attempt
        self._wire_id = worker_pb2.Attempt(number=identity.number, attempt=identity.attempt)
        self._clock = StageClock(arrival_s, time.monotonic())
        self._courses = {
            sample: SampleCourse(sample, first, options) for sample, first in first_indices.items()
        }
        # Samples with something to take, the longest waiting first.
        self._news: dict[int, SampleCourse] = {}
        self._awaits_prompt = options.prompt_logprobs is not None
        self._prompt: worker_pb2.PromptLogprobs | None = None
        self._sessions: dict[Leg, WorkerSession] = {}
        self._worker_ids: dict[Leg, str] = {}
        # The samples that a leg which has not ended has not finished.
        self._open: dict[Leg, set[int]] = {}
        self._on_change = on_change
        self._patience: asyncio.TimerHandle | None = None
        self._hint: Failure | None = None
        self._admitted = False
        self._kv_bytes = 0
        self.is_decided = False
        self.failure: Failure | None = None
        self.cached_tokens: int | None = None

    def submit(self, legs: Sequence[tuple[WorkerSession, str, worker_pb2.Submit]]) -> None:
        """Submits every leg: its session, its worker's id, its message."""
        ears = [_Ear(self, Leg.of(message)) for _, _, message in legs]
        for ear, (session, worker_id, _) in zip(ears, legs, strict=True):
            self._sessions[ear.leg] = session
            self._worker_ids[ear.leg] = worker_id
            self._open[ear.leg] = set(self._courses)
        for ear, (session, _, message) in zip(ears, legs, strict=True):
            session.submit(message, ear)

    def take(self) -> AttemptEvent | None:
        """The prompt's log probabilities first, if they were asked for; then of each sample its tokens (all
        since the last time, at least one) and its end. None: nothing has come, and nothing will if it is
        decided.
        """
        if self._awaits_prompt:
            return None
        if self._prompt is not None:
            prompt, self._prompt = self._prompt, None
            return prompt
        while self._news:
            sample = next(iter(self._news))
            course = self._news.pop(sample)
            if (event := course.take()) is not None:
                if course.is_over and isinstance(event, Tokens):
                    self._news[sample] = course
                return event
        return None

    @property
    def has_more(self) -> bool:
        """There is something to take, or it is decided."""
        has_news = self._prompt is not None or bool(self._news)
        return self.is_decided or (has_news and not self._awaits_prompt)

    def abandon(self, sample: int) -> None:
        """Nothing more of this sample is wanted. With the last one the attempt is over."""
        self._courses[sample].abandon()
        if self._has_all_ends and not self._has_gap:
            self._decide(None)
        self._settle()

    @property
    def last_token_s(self) -> float:
        """When the last token came, on `time.monotonic`'s clock."""
        assert self._clock.last_token_s is not None
        return self._clock.last_token_s

    @property
    def _has_all_ends(self) -> bool:
        return all(course.is_over for course in self._courses.values())

    @property
    def _has_gap(self) -> bool:
        return self._awaits_prompt or any(course.has_gap for course in self._courses.values())

    def stage_times(self) -> StageTimes:
        return self._clock.times()

    @property
    def num_tokens(self) -> int:
        """That it brought, of all samples together."""
        return sum(course.num_taken for course in self._courses.values())

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

    def hear(self, leg: Leg, event: LegEvent) -> None:
        match event:
            case worker_pb2.Admitted():
                self._admitted, self._kv_bytes = True, event.kv_bytes
                self._clock.admitted(time.monotonic())
            case worker_pb2.PromptLogprobs():
                self._on_prompt(event)
            case worker_pb2.Prefilled():
                self._over(leg)
                self._on_prefilled(event)
            case worker_pb2.Finished():
                self._on_finished(leg, event)
            case worker_pb2.Dropped():
                self._over(leg)
                self._on_dropped(leg, event)
            case SessionLost():
                self._over(leg)
                self._on_lost(leg, worker_lost(self._worker_ids[leg], self._sessions[leg].id, event.reason))
        self._settle()
        if self.has_more:
            self._on_change()

    def hear_tokens(self, event: worker_pb2.SequenceTokens) -> None:
        """Whichever leg says them. A token in its turn settles nothing."""
        sample = event.sample
        course = self._courses.get(sample)
        if course is None or not course.hear(event):
            self._settle()
            return
        self._news[sample] = course
        self._clock.token(time.monotonic())
        if not course.is_going_on:
            self._settle()
        self._on_change()

    def _over(self, leg: Leg) -> None:
        self._open.pop(leg, None)
        self._sessions[leg].release(self._wire_id.number)

    def _on_prompt(self, event: worker_pb2.PromptLogprobs) -> None:
        if self._awaits_prompt:
            self._prompt, self._awaits_prompt = event, False

    def _on_prefilled(self, event: worker_pb2.Prefilled | worker_pb2.Finished) -> None:
        self._clock.prefilled(event)
        self.cached_tokens = max(self.cached_tokens or 0, event.cached_tokens)

    def _on_finished(self, leg: Leg, event: worker_pb2.Finished) -> None:
        course = self._courses.get(event.sample)
        unfinished = self._open.get(leg)
        if course is None or unfinished is None:
            return
        unfinished.discard(event.sample)
        if not unfinished:
            self._over(leg)
        course.finish(_FINISH_REASONS.get(event.finish_reason, FinishReason.STOP))
        self._news[event.sample] = course
        if leg is not Leg.DECODE:
            self._on_prefilled(event)
        if leg is not Leg.PREFILL:
            self._clock.decoded(event)

    def _on_dropped(self, leg: Leg, event: worker_pb2.Dropped) -> None:
        if leg is Leg.DECODE and event.cause == worker_pb2.DROP_CAUSE_ENDED_AT_FIRST_TOKEN:
            # The prefill worker's Finished says the same, and how it ended: it came or will come.
            self._expect(self._unfinished(f"worker {self._worker_ids[Leg.PREFILL]} did not say how it ended"))
            return
        failure = worker_dropped(self._worker_ids[leg], self._sessions[leg].id, event)
        if leg is Leg.DECODE and event.cause in _HANDOFF_FAILURES:
            failure = failure.because_of(self._first_session)
        if leg is Leg.PREFILL and event.cause in _REFUSALS and not self._admitted:
            self._decide(failure)
        else:
            self._on_failed(leg, failure)

    def _on_lost(self, leg: Leg, failure: Failure) -> None:
        if leg is Leg.PREFILL:
            self._on_failed(leg, failure)
        elif not self._has_all_ends:
            # Whatever the prefill worker said before: this is its cause.
            self._decide(failure)

    def _on_failed(self, leg: Leg, failure: Failure) -> None:
        if self._has_all_ends:
            return
        if leg is Leg.PREFILL:
            if Leg.DECODE not in self._open:
                self._decide(failure)
            elif not self._admitted:
                self._expect(failure)
        elif self._hint is not None and not self._admitted:
            # The prefill worker's own word is nearer to the cause.
            self._decide(self._hint)
        else:
            self._decide(failure)

    def _settle(self) -> None:
        """Decides an attempt whose samples have their ends, once nothing of it can still come; or that waits
        for what only the prefill worker could have said.
        """
        if self.is_decided:
            return
        if self._has_all_ends and Leg.PREFILL in self._open:
            self._expect(self._gap_failure())
        elif self._has_all_ends:
            self._decide(self._gap_failure() if self._has_gap else None)
        elif self._admitted and Leg.PREFILL not in self._open and self._has_gap:
            self._decide(self._gap_failure())

    def _gap_failure(self) -> Failure:
        if self._awaits_prompt:
            return self._unfinished("the prompt's log probabilities never came")
        missing = next((c.next_index for c in self._courses.values() if c.has_gap), 0)
        return self._unfinished(f"token {missing} never came")

    def _unfinished(self, message: str) -> Failure:
        """Whoever prefills owes the first token and all that comes before it."""
        return unfinished(self._first_session, message)

    @property
    def _first_session(self) -> str:
        """With the worker that prefills."""
        legs = (Leg.PREFILL, Leg.LOCAL, Leg.DECODE)
        return next(self._sessions[leg].id for leg in legs if leg in self._sessions)

    def _expect(self, otherwise: Failure) -> None:
        """Another word is due, within `PATIENCE_S`; `otherwise` is the outcome without it."""
        if not self.is_decided and self._patience is None:
            self._hint = otherwise
            loop = asyncio.get_running_loop()
            self._patience = loop.call_later(PATIENCE_S, self._lose_patience)

    def _lose_patience(self) -> None:
        if self._has_all_ends and not self._has_gap:
            self._decide(None)
        elif self._hint is not None and not self._admitted:
            self._decide(self._hint)
        elif self._has_all_ends:
            self._decide(self._gap_failure())

    def _decide(self, failure: Failure | None) -> None:
        """The attempt is over: with a failure, or with the end of every sample."""
        if self.is_decided:
            return
        self.is_decided, self.failure = True, failure
        if failure is not None:
            self._clock.failed(time.monotonic())
        self.close()
        self._on_change()


class _Ear:
    """An attempt's, for one of its legs."""

    __slots__ = ("_attempt", "hear_tokens", "leg")

    def __init__(self, attempt: Attempt, leg: Leg) -> None:
        self.hear_tokens = attempt.hear_tokens
        self._attempt = attempt
        self.leg = leg

    def __call__(self, event: LegEvent) -> None:
        self._attempt.hear(self.leg, event)
