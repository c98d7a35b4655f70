"""What both doors open on: a draft in, the outputs of a completion out."""

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from router.admission import Admission, Claim, Ticket
from router.body_budget import BodyBudget
from router.cluster_view import Role, WorkerStatus
from router.completion import End, Output
from router.decision_log import MAX_DECISIONS
from router.errors import ErrorCode, RequestError, unavailable
from router.explanation import Explanation, explain_now, explain_recorded
from router.failover import RetryLimits
from router.fleet import Fleet, count_ready, max_model_len
from router.generation_request import (
    ChatPrompt,
    GenerationRequest,
    RequestDraft,
    TextPrompt,
    TokenPrompt,
    check_cache_salt,
    check_prompt,
    check_stop,
)
from router.key_quota import KeyQuota, Spending
from router.metrics import CANCELLED, RouterMetrics
from router.model_card import ModelCard
from router.piece_sink import PieceSink
from router.placer import Placer
from router.request_run import RequestRun
from router.sampling_options import Limits, check_sampling
from router.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Outputs = AsyncGenerator[Output, None]


class GenerationService:
    """Checks requests, runs them, and counts them."""

    def __init__(
        self,
        card: ModelCard,
        tokenizer: Tokenizer,
        fleet: Fleet,
        metrics: RouterMetrics,
        placer: Placer,
        admission: Admission,
        retry_limits: RetryLimits,
    ) -> None:
        self.card = card
        self.draining = False
        self.tokenizer = tokenizer
        self.bodies = BodyBudget()
        self._fleet = fleet
        self._metrics = metrics
        self._placer = placer
        self._admission = admission
        self._retry_limits = retry_limits
        self._quota = KeyQuota()
        self._num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def limits(self) -> Limits:
        """Of the model and of the workers that are connected."""
        longest = max_model_len(self._fleet.snapshot(), self.card.max_model_len)
        return Limits(self.card.vocab_size, longest)

    @property
    def is_ready(self) -> bool:
        """A request would find a worker."""
        workers = self._fleet.snapshot()
        return not self.draining and any(count_ready(workers, role) for role in Role)

    def worker_statuses(self) -> list[WorkerStatus]:
        return self._fleet.statuses()

    def metrics_text(self) -> bytes:
        """In Prometheus' text format."""
        self._metrics.running.set(self._num_running)
        workers = self._fleet.snapshot()
        for role in Role:
            self._metrics.workers.labels(role.value).set(count_ready(workers, role))
        self._metrics.queued.set(self._admission.num_queued)
        self._metrics.expected_ttft.set(self._admission.expected_ttft_s(Claim("", 0, 1)))
        return self._metrics.exposition()

    async def idle(self) -> None:
        """Returns when no request runs."""
        await self._idle.wait()

    async def generate(self, draft: RequestDraft, sink: PieceSink | None = None) -> Outputs:
        """Outputs, the last of them one `End`. Closing the generator cancels the request on its workers.

        Args:
            sink: offered pieces while the next output is waited for. What it takes is not yielded.

        Raises:
            RequestError: any code of `ErrorCode`.
        """
        self._begin()
        code = CANCELLED
        try:
            if self.draining:
                raise unavailable("the router is leaving")
            with self._quota.request(draft.api_key) as spending:
                request = await self._check(draft)
                spending.charge(len(request.prompt))
                with await self._admission.enter(self._claim(draft, request)) as ticket:
                    run = self._run(request, spending, ticket)
                    async with aclosing(run.outputs(sink)) as outputs:
                        async for output in outputs:
                            if isinstance(output, End):
                                code = ""
                                self._log_end(draft, output)
                            yield output
        except RequestError as error:
            code = error.code.name
            logger.info("%s: %s: %s", draft.request_id, code, error.message)
            raise
        except Exception as error:
            code = ErrorCode.INTERNAL.name
            logger.exception("%s: failed", draft.request_id)
            raise RequestError(ErrorCode.INTERNAL, "the router failed; its log says why") from error
        finally:
            self._finish(code)

    def _run(self, request: GenerationRequest, spending: Spending, ticket: Ticket) -> RequestRun:
        """Of a request that is let in. Its tokens are charged to its key and to the queue."""

        def charge(num_tokens: int) -> None:
            spending.charge(num_tokens)
            ticket.generated(num_tokens)

        return RequestRun(
            request,
            self._fleet,
            self.tokenizer,
            self._metrics,
            self._placer,
            self._retry_limits,
            charge,
        )

    def _claim(self, draft: RequestDraft, request: GenerationRequest) -> Claim:
        return Claim(draft.api_key.name, draft.priority, self._placer.uncached_tokens(request))

    async def explain(self, draft: RequestDraft) -> Explanation:
        """Where the request would go now. It does not run.

        Raises:
            RequestError: INVALID_ARGUMENT or NOT_FOUND.
        """
        request = await self._check(draft)
        decision = self._placer.decide(self._fleet.snapshot(), request)
        expected_s = self._admission.expected_ttft_s(self._claim(draft, request))
        return explain_now(
            draft.request_id, len(request.prompt), decision, None if math.isinf(expected_s) else expected_s
        )

    def explain_past(self, request_id: str) -> list[Explanation]:
        """Where every attempt at a request went, of those that are remembered.

        Raises:
            RequestError: NOT_FOUND, none is.
        """
        recorded = self._placer.log.of(request_id)
        if not recorded:
            raise RequestError(
                ErrorCode.NOT_FOUND,
                f"{request_id!r} is not among the last {MAX_DECISIONS} requests that were placed here",
            )
        return [explain_recorded(each) for each in recorded]

    async def checked(self, draft: RequestDraft) -> RequestDraft:
        """The same request, found sound; its prompt is tokens now. It does not run.

        Raises:
            RequestError: INVALID_ARGUMENT or NOT_FOUND.
        """
        try:
            request = await self._check(draft)
        except RequestError as error:
            self._metrics.failed(error.code.name)
            logger.info("%s: %s: %s", draft.request_id, error.code.name, error.message)
            raise
        return replace(draft, prompt=TokenPrompt(request.prompt))

    def check_model(self, model: str) -> None:
        """
        Args:
            model: that a client names. "": whichever is served.

        Raises:
            RequestError: NOT_FOUND.
        """
        if model not in ("", self.card.name):
            raise RequestError(ErrorCode.NOT_FOUND, f"model: {model!r} is not served here", field="model")

    async def _check(self, draft: RequestDraft) -> GenerationRequest:
        self.check_model(draft.model)
        stop = check_stop(draft.stop)
        match draft.prompt:
            case TokenPrompt(token_ids):
                field = "prompt"
            case TextPrompt(text, add_special_tokens):
                field = "prompt"
                token_ids = await self.tokenizer.encode_text(text, add_special_tokens=add_special_tokens)
            case ChatPrompt(messages, tools, answer_start):
                field = "messages"
                token_ids = await self.tokenizer.encode_chat(messages, tools, answer_start)
        limits = self.limits
        prompt = check_prompt(field, token_ids, limits)
        return GenerationRequest(
            request_id=draft.request_id,
            prompt=prompt,
            sampling=check_sampling(draft.sampling, len(prompt), limits),
            stop=stop,
            markup=draft.markup,
            cache_salt=check_cache_salt(draft.cache_salt),
            arrival_s=draft.arrival_s,
            arrival_unix_s=draft.arrival_unix_s,
        )

    def _begin(self) -> None:
        self._num_running += 1
        self._idle.clear()

    def _finish(self, code: str) -> None:
        self._num_running -= 1
        if self._num_running == 0:
            self._idle.set()
        if code:
            self._metrics.failed(code)

    def _log_end(self, draft: RequestDraft, end: End) -> None:
        latency_s = time.monotonic() - draft.arrival_s
        self._metrics.ended(end, latency_s)
        logger.info(
            "%s of %s: %s after %d + %d tokens in %.3f s, prefilled by %s, decoded by %s",
            draft.request_id,
            draft.api_key.name,
            end.last.finish_reason.value,
            end.usage.prompt_tokens,
            end.usage.completion_tokens,
            latency_s,
            end.served_by.prefill_worker,
            end.served_by.decode_worker or "nobody",
        )
