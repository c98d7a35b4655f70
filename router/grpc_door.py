"""The gRPC door: baton.v1.Inference."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

from grpc.aio import ServicerContext

from protos import inference_pb2, inference_pb2_grpc
from router.api_keys import ApiKey
from router.chat_template import ChatMessage
from router.completion import End, FinishReason, Output, Piece, SampleEnd, ScoredPrompt, TokenLogprobs
from router.doorkeeper import Doorkeeper, authorization_of
from router.errors import ErrorCode, RequestError, invalid
from router.generation_request import (
    ChatPrompt,
    Prompt,
    RequestDraft,
    TextPrompt,
    TokenPrompt,
)
from router.generation_service import GenerationService
from router.grammar import Grammar, JsonObject, JsonSchema, Regex
from router.grpc_error import abort
from router.request_id import HEADER, metadata_request_id, request_id_from
from router.sampling_options import SamplingDraft
from router.tokenization import TokenizeDraft, detokenize, tokenize

T = TypeVar("T")

_FINISH_REASONS = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}


class GrpcDoor(inference_pb2_grpc.InferenceServicer):
    """Answers `baton.v1.Inference`."""

    def __init__(self, service: GenerationService, doorkeeper: Doorkeeper) -> None:
        self._service = service
        self._doorkeeper = doorkeeper

    async def Generate(
        self,
        request: inference_pb2.GenerateRequest,
        context: ServicerContext,
    ) -> None:
        async def answer(request_id: str) -> None:
            await self._generate(request, request_id, context)

        await self._answer(request.request_id, request.ByteSize(), context, answer)

    async def _answer(
        self, wanted_id: str, num_bytes: int, context: ServicerContext, answer: Callable[[str], Awaitable[T]]
    ) -> T:
        """Names a request, holds its bytes, and ends its call with the error if there is one.

        Args:
            wanted_id: in the request itself. "": none.
            num_bytes: of the request.
            answer: gets the request's id.
        """
        request_id = request_id_from(wanted_id, metadata_request_id(context.invocation_metadata()))
        context.set_trailing_metadata(((HEADER, request_id),))
        try:
            self._service.bodies.take(num_bytes)
            try:
                return await _in_time(context, answer(request_id))
            finally:
                self._service.bodies.give(num_bytes)
        except RequestError as error:
            await abort(context, error, request_id)

    async def _generate(
        self, request: inference_pb2.GenerateRequest, request_id: str, context: ServicerContext
    ) -> None:
        arrival_s, arrival_unix_s = time.monotonic(), time.time()
        api_key = self._doorkeeper.admit(authorization_of(context.invocation_metadata()))
        draft = _draft(request, request_id, api_key, arrival_s, arrival_unix_s)
        async with aclosing(self._service.generate(draft)) as outputs:
            async for output in outputs:
                await context.write(_response(request_id, output))

    async def ListModels(
        self,
        request: inference_pb2.ListModelsRequest,
        context: ServicerContext,
    ) -> inference_pb2.ListModelsResponse:
        card, limits = self._service.card, self._service.limits
        model = inference_pb2.Model(id=card.name, max_model_len=limits.max_model_len or 0)
        return inference_pb2.ListModelsResponse(models=[model])

    async def Tokenize(
        self,
        request: inference_pb2.TokenizeRequest,
        context: ServicerContext,
    ) -> inference_pb2.TokenizeResponse:
        async def answer(_: str) -> inference_pb2.TokenizeResponse:
            token_ids = await tokenize(self._service, _tokenize_draft(request))
            longest = self._service.limits.max_model_len
            return inference_pb2.TokenizeResponse(token_ids=token_ids, max_model_len=longest or 0)

        return await self._answer("", request.ByteSize(), context, answer)

    async def Detokenize(
        self,
        request: inference_pb2.DetokenizeRequest,
        context: ServicerContext,
    ) -> inference_pb2.DetokenizeResponse:
        async def answer(_: str) -> inference_pb2.DetokenizeResponse:
            text = await detokenize(self._service, "token_ids", request.model, request.token_ids)
            return inference_pb2.DetokenizeResponse(text=text)

        return await self._answer("", request.ByteSize(), context, answer)


async def _in_time(context: ServicerContext, answer: Awaitable[T]) -> T:
    """The answer, which ends when the client's time is up."""
    limit_s = context.time_remaining()
    if limit_s is None:
        return await answer
    try:
        async with asyncio.timeout(limit_s):
            return await answer
    except TimeoutError as error:
        raise RequestError(ErrorCode.DEADLINE_EXCEEDED, "the request's deadline has passed") from error


def _draft(
    request: inference_pb2.GenerateRequest,
    request_id: str,
    api_key: ApiKey,
    arrival_s: float,
    arrival_unix_s: float,
) -> RequestDraft:
    return RequestDraft(
        request_id=request_id,
        model=request.model,
        prompt=_prompt(request),
        sampling=_sampling(request.sampling),
        stop=tuple(request.stop),
        cache_salt=request.cache_salt,
        api_key=api_key,
        priority=request.priority,
        arrival_s=arrival_s,
        arrival_unix_s=arrival_unix_s,
    )


def _prompt(request: inference_pb2.GenerateRequest) -> Prompt:
    match request.WhichOneof("prompt"):
        case "text":
            return TextPrompt(request.text)
        case "token_ids":
            return TokenPrompt(tuple(request.token_ids.ids))
        case "chat":
            return _chat(request.chat)
        case _:
            raise invalid("prompt", "must be set: text, token_ids or chat")


def _tokenize_draft(request: inference_pb2.TokenizeRequest) -> TokenizeDraft:
    match request.WhichOneof("prompt"):
        case "text":
            with_special = not request.HasField("add_special_tokens") or request.add_special_tokens
            prompt = TextPrompt(request.text, with_special)
        case "chat":
            prompt = _chat(request.chat)
        case _:
            raise invalid("prompt", "must be set: text or chat")
    return TokenizeDraft(
        model=request.model,
        prompt=prompt,
        add_generation_prompt=not request.HasField("add_generation_prompt") or request.add_generation_prompt,
    )


def _chat(chat: inference_pb2.Chat) -> ChatPrompt:
    if not chat.messages:
        raise invalid("messages", "must have at least one message")
    return ChatPrompt(tuple(ChatMessage(message.role, message.content) for message in chat.messages))


def _sampling(params: inference_pb2.SamplingParams) -> SamplingDraft:
    def given(field: str) -> bool:
        return params.HasField(field)

    return SamplingDraft(
        temperature=params.temperature if given("temperature") else None,
        top_k=params.top_k if given("top_k") else None,
        top_p=params.top_p if given("top_p") else None,
        min_p=params.min_p if given("min_p") else None,
        seed=params.seed if given("seed") else None,
        max_tokens=params.max_tokens if given("max_tokens") else None,
        min_tokens=params.min_tokens,
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty if given("repetition_penalty") else None,
        logit_bias=dict(params.logit_bias),
        n=params.n if given("n") else None,
        logprobs=params.logprobs if given("logprobs") else None,
        prompt_logprobs=params.prompt_logprobs if given("prompt_logprobs") else None,
        grammar=_grammar(params.grammar),
    )


def _grammar(grammar: inference_pb2.Grammar) -> Grammar | None:
    match grammar.WhichOneof("form"):
        case "json_object":
            return JsonObject()
        case "json_schema":
            return JsonSchema(grammar.json_schema)
        case "regex":
            return Regex(grammar.regex)
        case _:
            return None


def _response(request_id: str, output: Output) -> inference_pb2.GenerateResponse:
    match output:
        case ScoredPrompt(tokens):
            scores = [_wire_logprobs(token.logprobs) for token in tokens]
            return inference_pb2.GenerateResponse(request_id=request_id, prompt_logprobs=scores)
        case Piece():
            response = inference_pb2.GenerateResponse(
                request_id=request_id,
                sample=output.sample,
                index=output.first_index,
                token_ids=output.token_ids,
                text=output.text,
            )
            if output.logprobs is not None:
                response.logprobs.extend(map(_wire_logprobs, output.logprobs))
            return response
        case SampleEnd():
            return _sample_end(request_id, output)
        case End():
            return _end(request_id, output)


def _wire_logprobs(scores: TokenLogprobs | None) -> inference_pb2.TokenLogprobs:
    """Empty for a token that has none."""
    if scores is None:
        return inference_pb2.TokenLogprobs()
    return inference_pb2.TokenLogprobs(
        logprob=scores.logprob,
        top_token_ids=[id_ for id_, _ in scores.top],
        top_logprobs=[logprob for _, logprob in scores.top],
    )


def _sample_end(request_id: str, end: SampleEnd) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        request_id=request_id,
        sample=end.sample,
        index=end.num_tokens,
        text=end.text,
        finish_reason=_FINISH_REASONS[end.finish_reason],
    )


def _end(request_id: str, end: End) -> inference_pb2.GenerateResponse:
    response = _sample_end(request_id, end.last)
    usage, times, served_by = end.usage, end.stage_times, end.served_by
    response.usage.MergeFrom(
        inference_pb2.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
        )
    )
    response.stage_times.MergeFrom(
        inference_pb2.StageTimes(
            door_s=times.door_s,
            queue_s=times.queue_s,
            prefill_s=times.prefill_s,
            transfer_s=times.transfer_s,
            decode_wait_s=times.decode_wait_s,
            decode_s=times.decode_s,
        )
    )
    response.served_by.MergeFrom(
        inference_pb2.ServedBy(
            prefill_worker=served_by.prefill_worker,
            decode_worker=served_by.decode_worker,
            kv_bytes=served_by.kv_bytes,
        )
    )
    return response
