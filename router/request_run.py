"""One request from its placement to its end."""

import logging
import secrets
from collections.abc import AsyncGenerator

from router.attempt import Attempt, AttemptEvent
from router.completion import End, Output, Piece, SampleEnd, ScoredPrompt, Usage
from router.errors import unavailable
from router.fleet import Fleet
from router.generation_request import GenerationRequest
from router.metrics import RouterMetrics
from router.placement import place
from router.sample_course import SampleFinished, Tokens, scored_tokens
from router.sample_run import SampleRun
from router.submission import AttemptId, submits
from router.text_stream import TextStream
from router.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class RequestRun:
    """All samples of a request, in one attempt."""

    def __init__(
        self,
        request: GenerationRequest,
        fleet: Fleet,
        tokenizer: Tokenizer,
        metrics: RouterMetrics,
        local_prefill_tokens: int,
    ) -> None:
        self._request = request
        self._fleet = fleet
        self._metrics = metrics
        self._local_prefill_tokens = local_prefill_tokens
        seed = request.sampling.seed
        self._seed = secrets.randbits(64) if seed is None else seed
        self._samples = [
            SampleRun(sample, TextStream(tokenizer, request.stop, request.markup))
            for sample in range(request.sampling.n)
        ]
        self._attempts = 0
        self._has_token = False

    async def outputs(self) -> AsyncGenerator[Output, None]:
        """The scored prompt if it was asked for, pieces and ends of samples as they come, the end.

        Closing it cancels the request on its workers.

        Raises:
            RequestError: UNAVAILABLE, no worker takes it or one died; or what a worker answered.
        """
        attempt = self._start_attempt()
        last: SampleEnd | None = None
        try:
            while (event := await attempt.next_event()) is not None:
                for output in self._hear(attempt, event):
                    if isinstance(output, SampleEnd) and self._num_live == 0:
                        last = output
                    else:
                        yield output
            assert last is not None
            yield End(last, self._usage(attempt), attempt.stage_times(), attempt.served_by())
        finally:
            attempt.close()

    def _hear(self, attempt: Attempt, event: AttemptEvent) -> list[Output]:
        match event:
            case Tokens(number, _, tokens):
                sample = self._samples[number]
                piece = sample.push(tokens)
                self._count(sample, piece, len(tokens), attempt.last_token_s)
                if sample.end is None:
                    return [piece]
                attempt.abandon(number)
                return [piece, sample.end]
            case SampleFinished(number, reason):
                return [self._samples[number].finish(reason)]
            case prompt:
                return [ScoredPrompt(scored_tokens(self._request.prompt, prompt.tokens))]

    @property
    def _num_live(self) -> int:
        return sum(sample.end is None for sample in self._samples)

    def _start_attempt(self) -> Attempt:
        """Places, draws a number and submits, without an await: numbers grow in every session."""
        request, options = self._request, self._request.sampling
        placement = place(
            self._fleet.snapshot(),
            num_prompt_tokens=len(request.prompt),
            max_tokens=options.max_tokens,
            local_prefill_tokens=self._local_prefill_tokens,
        )
        if placement is None:
            raise unavailable("no worker takes requests now")
        identity = AttemptId(self._fleet.next_number(), self._attempts, secrets.token_bytes(16))
        self._attempts += 1
        messages = submits(identity, request, self._seed, (), placement)
        first_indices = {number: len(sample.generated) for number, sample in enumerate(self._samples)}
        attempt = Attempt(identity, first_indices, options, request.arrival_s)
        attempt.submit(
            [(self._fleet.session(worker), worker.worker_id, message) for worker, message in messages]
        )
        logger.debug(
            "%s: attempt %d on %s",
            request.request_id,
            identity.number,
            ", ".join(f"{worker.worker_id} ({message.WhichOneof('leg')})" for worker, message in messages),
        )
        return attempt

    def _count(self, sample: SampleRun, piece: Piece, num_came: int, arrived_s: float) -> None:
        num_kept = len(piece.tokens)
        if not self._has_token:
            self._has_token = True
            self._metrics.first_token.observe(arrived_s - self._request.arrival_s)
        if sample.last_arrival_s is not None:
            each_s = (arrived_s - sample.last_arrival_s) / num_came
            for _ in range(num_kept):
                self._metrics.inter_token.observe(each_s)
        sample.last_arrival_s = arrived_s
        self._metrics.generation_tokens.inc(num_kept)

    def _usage(self, attempt: Attempt) -> Usage:
        generated = sum(len(sample.generated) for sample in self._samples)
        return Usage(len(self._request.prompt), generated, attempt.cached_tokens)
