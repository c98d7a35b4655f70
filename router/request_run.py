"""One request from its placement to its end."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from functools import partial

from router.attempt import Attempt, AttemptEvent
from router.completion import End, Output, Piece, SampleEnd, ScoredPrompt, Usage
from router.errors import unavailable
from router.failover import RetryLimits, choices, last_word
from router.failure import Failure
from router.fleet import Fleet
from router.generation_request import GenerationRequest
from router.metrics import RouterMetrics
from router.piece_sink import PieceSink
from router.placement import Decision
from router.placer import Placer
from router.sample_course import SampleFinished, Tokens, scored_tokens
from router.sample_group import SampleGroup
from router.sample_run import SampleRun
from router.submission import AttemptId, submits
from router.text_stream import TextStream
from router.tokenizer import Tokenizer
from router.wake_up import WakeUp

logger = logging.getLogger(__name__)

# Tokens that are charged together: each by itself would cost as much as its text.
_TOLD_AT_ONCE = 16


class RequestRun:
    """All samples of a request. A failed attempt is followed by another, from the tokens that are there."""

    __slots__ = (
        "_cached_tokens",
        "_changed",
        "_defect",
        "_fingerprint",
        "_fleet",
        "_has_token",
        "_held",
        "_last",
        "_metrics",
        "_num_attempts",
        "_on_tokens",
        "_placer",
        "_prompt_logprobs",
        "_request",
        "_retry_limits",
        "_running",
        "_samples",
        "_seed",
        "_sink",
        "_told_at",
        "_untold",
    )

    def __init__(
        self,
        request: GenerationRequest,
        fleet: Fleet,
        tokenizer: Tokenizer,
        metrics: RouterMetrics,
        placer: Placer,
        retry_limits: RetryLimits,
        on_tokens: Callable[[int], None],
    ) -> None:
        """`on_tokens`: told how many came: of the first at once, then of several together."""
        self._request = request
        self._fleet = fleet
        self._metrics = metrics
        self._placer = placer
        self._retry_limits = retry_limits
        self._on_tokens = on_tokens
        # Tokens that it was not told of, and at how many it is.
        self._untold, self._told_at = 0, 1
        seed = request.sampling.seed
        self._seed = secrets.randbits(64) if seed is None else seed
        self._samples = tuple(
            SampleRun(number, TextStream(tokenizer, request.stop, request.markup))
            for number in range(request.sampling.n)
        )
        self._running: dict[SampleGroup, Attempt] = {}
        # Outputs that are known and not yielded: what comes after pieces that went past the reader.
        self._held: list[Output] = []
        self._last: SampleEnd | None = None
        self._changed = WakeUp()
        self._sink: PieceSink | None = None
        self._defect: Exception | None = None
        self._num_attempts = 0
        # Of the prompt's log probabilities, what has not come.
        self._prompt_logprobs = request.sampling.prompt_logprobs
        self._cached_tokens: int | None = None
        # Of the model that the last attempt was made with, or all that run.
        self._fingerprint: str | None = None
        self._has_token = False

    async def outputs(self, sink: PieceSink | None = None) -> AsyncGenerator[Output, None]:
        """The scored prompt if it was asked for, pieces and ends of samples as they come, the end.

        Closing it cancels the request on its workers.

        Args:
            sink: offered pieces while the reader waits. What it takes is not yielded.

        Raises:
            RequestError: UNAVAILABLE or INTERNAL, no worker takes it or every attempt failed; or what a
                worker found wrong with it.
        """
        self._sink = sink
        self._start()
        try:
            if sink is not None:
                # The submits leave before anything else is done.
                await asyncio.sleep(0)
                await sink.prepare()
            while True:
                await self._changed.wait()
                if self._defect is not None:
                    raise self._defect
                for group, attempt in [*self._running.items()]:
                    has_heard = self._hear_next(attempt)
                    while self._held:
                        yield self._held.pop(0)
                    if not has_heard and attempt.is_decided and (end := await self._settle(group, attempt)):
                        yield end
                        return
        finally:
            for attempt in self._running.values():
                attempt.close()
            self._tell_tokens()

    @property
    def _num_live(self) -> int:
        return sum(sample.end is None for sample in self._samples)

    def _start(self) -> None:
        """The first attempt, at all samples together."""
        group = SampleGroup(self._samples)
        decision = self._place(group)
        if decision is None:
            raise unavailable("no worker takes requests now")
        self._begin(group, decision, self._request.arrival_s)

    def _place(self, group: SampleGroup) -> Decision | None:
        fingerprint = self._fingerprint if self._has_token else None
        every = self._fleet.snapshot()
        mover = next((worker for worker in every if worker.session == group.history.mover), None)
        for workers in choices(every, group.history, fingerprint):
            decision = self._placer.decide(workers, self._request, group.samples[0].generated, mover)
            if decision is not None:
                return decision
        return None

    def _begin(self, group: SampleGroup, decision: Decision, since_s: float) -> None:
        """Draws a number and submits, in the moment of the placement: numbers grow in every session.

        Args:
            since_s: the arrival of the request, or of the failure before.
        """
        share = group.share(self._request.sampling, self._prompt_logprobs)
        identity = AttemptId(self._fleet.next_number(), self._num_attempts, secrets.token_bytes(16))
        self._num_attempts += 1
        self._placer.book(decision)
        messages = submits(identity, self._request, share, self._seed, decision.chosen.placement)
        self._fingerprint = messages[0][0].fingerprint
        attempt = Attempt(
            identity,
            {number: len(share.generated) for number in share.samples},
            share.options,
            since_s,
            partial(self._on_news, group),
        )
        attempt.submit(
            [(self._fleet.session(worker), worker.worker_id, message) for worker, message in messages]
        )
        self._running[group] = attempt
        # The submits leave before.
        asyncio.get_running_loop().call_soon(self._placer.record, self._request.request_id, decision)
        if logger.isEnabledFor(logging.DEBUG):
            legs = [f"{worker.worker_id} ({message.WhichOneof('leg')})" for worker, message in messages]
            logger.debug("%s: attempt %d on %s", self._request.request_id, identity.attempt, ", ".join(legs))

    def _on_news(self, group: SampleGroup) -> None:
        """The group's attempt has something to take, or is decided."""
        if self._sink is None or not self._changed.is_awaited:
            self._changed.due()
            return
        try:
            self._hear_next(self._running[group], self._sink)
        except Exception as error:  # it ends this request, not the session that calls
            self._defect = error
        if self._held or self._defect is not None:
            self._changed.due()

    def _hear_next(self, attempt: Attempt, sink: PieceSink | None = None) -> bool:
        """Whether the attempt had something to say: what follows from it is held now, or the sink has it.

        Args:
            sink: of pieces that come while nothing is held.
        """
        event = attempt.take()
        if event is not None:
            self._hear(attempt, event, sink)
        if attempt.has_more:
            self._changed.due()
        return event is not None

    def _hear(self, attempt: Attempt, event: AttemptEvent, sink: PieceSink | None) -> None:
        match event:
            case Tokens():
                sample = self._samples[event.sample]
                piece = sample.push(event.token_ids, event.logprobs)
                if sink is None or self._held or not sink.take(piece):
                    self._held.append(piece)
                self._count(sample, piece, len(event.token_ids), attempt.last_token_s)
                if sample.end is not None:
                    self._hold_end(sample.end)
                    attempt.abandon(sample.number)
            case SampleFinished(number, reason):
                self._hold_end(self._samples[number].finish(reason))
            case prompt:
                self._prompt_logprobs = None
                self._held.append(ScoredPrompt(scored_tokens(self._request.prompt, prompt.tokens)))

    def _hold_end(self, end: SampleEnd) -> None:
        """The last of all ends is told with the request's."""
        if self._num_live > 0:
            self._held.append(end)
        else:
            self._last = end

    async def _settle(self, group: SampleGroup, attempt: Attempt) -> End | None:
        """An attempt is over. Its samples have their ends, or go on in another one; with the end of all
        comes the end of the request.
        """
        del self._running[group]
        if self._cached_tokens is None:
            self._cached_tokens = attempt.cached_tokens
        if attempt.failure is not None:
            await self._go_on(group, attempt, attempt.failure)
        if self._running:
            return None
        assert self._last is not None
        return End(
            self._last, self._usage(), group.history.spent + attempt.stage_times(), attempt.served_by()
        )

    async def _go_on(self, group: SampleGroup, attempt: Attempt, failure: Failure) -> None:
        """Makes the next attempt, of each sample that has tokens its own.

        Raises:
            RequestError: there is none to make.
        """
        failed_s = time.monotonic()
        logger.info(
            "%s: attempt %d failed (%s): %s",
            self._request.request_id,
            attempt.number,
            failure.cause,
            failure.error.message,
        )
        if failure.is_final:
            raise failure.error
        history = group.history.after(failure, num_tokens=attempt.num_tokens, spent=attempt.stage_times())
        if history.num_fruitless >= self._retry_limits.max_attempts:
            raise last_word(failure, self._num_attempts, "no more are made")
        for following in group.after(history):
            decision = await self._find_place(following)
            if decision is None:
                raise last_word(failure, self._num_attempts, "no worker is left")
            self._begin(following, decision, failed_s)
        self._metrics.retried(failure.cause)

    async def _find_place(self, group: SampleGroup) -> Decision | None:
        """When no worker is left, waits a while for one that is expected."""
        seen = 0
        try:
            async with asyncio.timeout(self._retry_limits.rejoin_limit_s):
                while (decision := self._place(group)) is None and self._fleet.expects_workers:
                    seen = await self._fleet.next_change(seen)
        except TimeoutError:
            return None
        return decision

    def _count(self, sample: SampleRun, piece: Piece, num_came: int, arrived_s: float) -> None:
        num_kept = len(piece.token_ids)
        if not self._has_token:
            self._has_token = True
            self._metrics.first_token.observe(arrived_s - self._request.arrival_s)
        if sample.last_arrival_s is not None:
            each_s = (arrived_s - sample.last_arrival_s) / num_came
            self._metrics.inter_token.observe(each_s, num_kept)
        sample.last_arrival_s = arrived_s
        self._metrics.generation_tokens.value += num_kept
        self._untold += num_kept
        if self._untold >= self._told_at:
            self._tell_tokens()

    def _tell_tokens(self) -> None:
        told, self._untold = self._untold, 0
        self._told_at = _TOLD_AT_ONCE
        if told:
            self._on_tokens(told)

    def _usage(self) -> Usage:
        generated = sum(len(sample.generated) for sample in self._samples)
        num_prompt = len(self._request.prompt)
        return Usage(num_prompt, generated, min(self._cached_tokens or 0, num_prompt))
