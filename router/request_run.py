"""One request from its placement to its end."""

import logging
import secrets
from collections.abc import AsyncGenerator

from router.attempt import Attempt, Tokens
from router.completion import End, FinishReason, Piece, Usage
from router.errors import unavailable
from router.fleet import Fleet
from router.generation_request import GenerationRequest
from router.metrics import RouterMetrics
from router.placement import place
from router.submission import AttemptId, submits
from router.text_stream import TextStream
from router.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class RequestRun:
    """A request's tokens so far are its whole state: an attempt starts from them."""

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
        self._text = TextStream(tokenizer, request.stop, request.markup)
        self._generated: list[int] = []
        self._attempts = 0
        self._last_arrival_s: float | None = None

    async def outputs(self) -> AsyncGenerator[Piece | End, None]:
        """Pieces, then the end. Closing it cancels the request on its workers.

        Raises:
            RequestError: UNAVAILABLE, no worker takes it or one died; or what a worker answered.
        """
        attempt = self._start_attempt()
        try:
            while (tokens := await attempt.next_tokens()) is not None:
                written = self._text.push(tokens.token_ids)
                kept = tokens.token_ids[: written.num_tokens]
                self._count(tokens, len(kept))
                self._generated += kept
                if written.stopped:
                    attempt.close()
                yield Piece(tokens.index, kept, written.text)
                if written.stopped:
                    yield self._end(attempt, "", FinishReason.STOP)
                    return
            rest = self._text.finish()
            reason = FinishReason.STOP if rest.stopped else attempt.finish_reason
            yield self._end(attempt, rest.text, reason)
        finally:
            attempt.close()

    def _start_attempt(self) -> Attempt:
        """Places, draws a number and submits, without an await: numbers grow in every session."""
        request, options = self._request, self._request.sampling
        placement = place(
            self._fleet.snapshot(),
            num_prompt_tokens=len(request.prompt) + len(self._generated),
            max_tokens=options.max_tokens - len(self._generated),
            local_prefill_tokens=self._local_prefill_tokens,
        )
        if placement is None:
            raise unavailable("no worker takes requests now")
        identity = AttemptId(self._fleet.next_number(), self._attempts, secrets.token_bytes(16))
        self._attempts += 1
        messages = submits(identity, request, self._seed, tuple(self._generated), placement)
        attempt = Attempt(
            identity,
            first_index=len(self._generated),
            max_tokens=options.max_tokens,
            arrival_s=request.arrival_s,
        )
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

    def _count(self, tokens: Tokens, num_kept: int) -> None:
        if self._last_arrival_s is None:
            self._metrics.first_token.observe(tokens.arrived_s - self._request.arrival_s)
        else:
            each_s = (tokens.arrived_s - self._last_arrival_s) / len(tokens.token_ids)
            for _ in range(num_kept):
                self._metrics.inter_token.observe(each_s)
        self._last_arrival_s = tokens.arrived_s
        self._metrics.generation_tokens.inc(num_kept)

    def _end(self, attempt: Attempt, text: str, reason: FinishReason) -> End:
        usage = Usage(len(self._request.prompt), len(self._generated))
        return End(text, reason, usage, attempt.stage_times(), attempt.served_by())
