"""Runs one request of the OpenAI API while its client is there, and answers whole or as events."""

import asyncio
import json
from collections.abc import Mapping
from contextlib import aclosing

from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from router.completion import End, Output, Piece, SampleEnd, ScoredPrompt
from router.errors import RequestError, openai_body
from router.generation_request import Prompt, RequestDraft, TextPrompt, TokenPrompt
from router.generation_service import GenerationService
from router.hang_up import until_hang_up
from router.openai_answer import AnswerHead, AnswerShape, EchoedPrompt, WholeSample
from router.openai_logprobs import LogprobsWriter
from router.openai_schema import ChatRequest, CompletionRequest
from router.shown_tokens import PlacedToken, ShownTokens, placed_prompt
from router.tokenizer import Tokenizer


def answer_head(
    service: GenerationService, body: ChatRequest | CompletionRequest, draft: RequestDraft
) -> AnswerHead:
    def writer(num_top: int | None) -> LogprobsWriter | None:
        return None if num_top is None else LogprobsWriter(service.tokenizer, num_top)

    return AnswerHead(
        request_id=draft.request_id,
        model=service.card.name,
        created_unix_s=int(draft.arrival_unix_s),
        logprobs=writer(body.num_logprobs),
        prompt_logprobs=writer(body.prompt_logprobs),
    )


class OpenAIResponse(Response):
    """The answer to one request, in the shape of its endpoint."""

    def __init__(
        self,
        service: GenerationService,
        body: ChatRequest | CompletionRequest,
        draft: RequestDraft,
        shape: AnswerShape,
    ) -> None:
        self._service = service
        self._body = body
        self._draft = draft
        self._shape = shape
        # With their log probabilities; without, a chunk has nothing of its tokens but their text.
        self._tells_tokens = body.num_logprobs is not None
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._stream if self._body.stream else self._whole
        await until_hang_up(receive, answer(scope, receive, send))

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        response: Response | None = None
        try:
            async with aclosing(self._service.generate(self._draft)) as outputs:
                first = await anext(outputs)
                echo = await self._echo(first)
                whole = _Whole(self._body.num_samples, len(echo.text))
                whole.add(first)
                async for output in outputs:
                    whole.add(output)
                    if isinstance(output, End):
                        body = self._shape.whole(whole.samples, echo, whole.scored, output)
                        response = Response(body, media_type="application/json")
        except RequestError as error:
            response = self._error(error)
        assert response is not None
        await response(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An error before the first output still is an HTTP status; a later one is the last event."""
        try:
            async with aclosing(self._service.generate(self._draft)) as outputs:
                first = await anext(outputs)
                echo = await self._echo(first)
                num_samples = self._body.num_samples
                shown = [ShownTokens(len(echo.text)) for _ in range(num_samples)]
                await send(_stream_start())
                opening = self._shape.opening(num_samples, echo)
                await _send_events(send, [*opening, *self._events(shown, first)])
                try:
                    async for output in outputs:
                        await _send_events(send, self._events(shown, output))
                except RequestError as error:
                    refused = openai_body(self._named(error), self._draft.request_id)
                    await _send_events(send, [json.dumps(refused)])
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except RequestError as error:
            await self._error(error)(scope, receive, send)

    def _error(self, error: RequestError) -> Response:
        return error_response(self._named(error), self._draft.request_id)

    def _named(self, error: RequestError) -> RequestError:
        """In the client's words."""
        return error if error.field is None else error.with_field(self._body.client_name(error.field))

    async def _echo(self, first: Output) -> EchoedPrompt:
        """What the client wants back of its prompt, once the first output says that it was sound."""
        if not self._body.echo:
            return EchoedPrompt()
        text = _prompt_text(self._service.tokenizer, self._draft.prompt)
        if not isinstance(first, ScoredPrompt) or self._body.num_logprobs is None:
            return EchoedPrompt(text)
        # Decodes the prompt token by token: a long one would hold up every stream.
        placed = await asyncio.to_thread(placed_prompt, self._service.tokenizer, first.tokens, text)
        return EchoedPrompt(text, placed)

    def _events(self, shown: list[ShownTokens], output: Output) -> list[str]:
        match output:
            case ScoredPrompt():
                return []
            case Piece(sample=sample):
                tokens = shown[sample].push(output) if self._tells_tokens else []
                return self._chunks(sample, output.text, tokens)
            case SampleEnd():
                return self._sample_end(shown, output)
            case End(last=last, usage=usage):
                usage_chunks = [self._shape.usage_chunk(usage)] if self._body.wants_usage_chunk else []
                return [*self._sample_end(shown, last), *usage_chunks, "[DONE]"]

    def _sample_end(self, shown: list[ShownTokens], end: SampleEnd) -> list[str]:
        tokens = shown[end.sample].finish(end) if self._tells_tokens else []
        rest = self._chunks(end.sample, end.text, tokens)
        return [*rest, *self._shape.last_chunks(end.sample, end.finish_reason)]

    def _chunks(self, sample: int, text: str, tokens: list[PlacedToken]) -> list[str]:
        if text or tokens:
            return self._shape.chunks(sample, text, tokens)
        return []


class _Whole:
    """Outputs as they grow to an answer."""

    def __init__(self, num_samples: int, first_char: int) -> None:
        self.samples = [WholeSample() for _ in range(num_samples)]
        self.scored: ScoredPrompt | None = None
        self._shown = [ShownTokens(first_char) for _ in range(num_samples)]

    def add(self, output: Output) -> None:
        match output:
            case ScoredPrompt():
                self.scored = output
            case Piece():
                self._grow(output.sample, output.text, self._shown[output.sample].push(output))
            case SampleEnd():
                self._finish(output)
            case End(last=last):
                self._finish(last)

    def _finish(self, end: SampleEnd) -> None:
        self._grow(end.sample, end.text, self._shown[end.sample].finish(end))
        self.samples[end.sample].reason = end.finish_reason

    def _grow(self, sample: int, text: str, tokens: list[PlacedToken]) -> None:
        self.samples[sample].texts.append(text)
        self.samples[sample].tokens += tokens


def _prompt_text(tokenizer: Tokenizer, prompt: Prompt) -> str:
    match prompt:
        case TextPrompt(text):
            return text
        case TokenPrompt(token_ids):
            return tokenizer.prompt_text(token_ids)
        case _:
            return ""


def _stream_start() -> dict[str, object]:
    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
    return {"type": "http.response.start", "status": 200, "headers": headers}


async def _send_events(send: Send, events: list[str]) -> None:
    if events:
        body = "".join(f"data: {event}\n\n" for event in events).encode()
        await send({"type": "http.response.body", "body": body, "more_body": True})


def error_response(
    error: RequestError, request_id: str, headers: Mapping[str, str] | None = None
) -> Response:
    all_headers = dict(headers or {})
    if error.retry_after_s is not None:
        all_headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    return JSONResponse(
        openai_body(error, request_id), status_code=error.code.http_status, headers=all_headers
    )
