"""Runs one request of the OpenAI API while its client is there, and answers whole or as events."""

import json
from collections.abc import Mapping
from contextlib import aclosing

from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from router.completion import End, Output, Piece, Usage
from router.counted_answer import streamed_answer
from router.errors import RequestError, openai_body
from router.event_stream import EventStream
from router.generation_request import RequestDraft
from router.generation_service import GenerationService
from router.hang_up import until_hang_up
from router.openai_answer import AnswerHead, AnswerShape, EchoedPrompt
from router.openai_logprobs import LogprobsWriter
from router.prompt_answer import Body, StreamedAnswer, WholeAnswer, echo_of
from router.tokenizer import Tokenizer


def answer_head(service: GenerationService, body: Body, draft: RequestDraft) -> AnswerHead:
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
    """The answer to one request of one prompt, in the shape of its endpoint."""

    def __init__(
        self, service: GenerationService, body: Body, draft: RequestDraft, shape: AnswerShape
    ) -> None:
        self._service = service
        self._body = body
        self._draft = draft
        self._shape = shape
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._stream if self._body.stream else self._whole
        await until_hang_up(scope, receive, answer(scope, receive, send))

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        response: Response | None = None
        try:
            async with aclosing(self._service.generate(self._draft)) as outputs:
                first = await anext(outputs)
                echo = await echo_of(self._service.tokenizer, self._body, self._draft.prompt, first)
                whole = WholeAnswer(self._body, echo)
                whole.add(first)
                async for output in outputs:
                    whole.add(output)
                    if isinstance(output, End):
                        body = self._shape.whole(whole.samples, echo, whole.scored, output)
                        response = Response(body, media_type="application/json")
        except RequestError as error:
            response = error_response(in_words_of(self._body, error), self._draft.request_id)
        assert response is not None
        await response(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An error before the first output still is an HTTP status; a later one is the last event."""
        stream = EventStream(scope, send)
        try:
            draft = self._draft
            if self._body.wants_running_usage:
                draft = await self._service.checked(draft)
            answer = _AnswerStream(self._service.tokenizer, self._body, draft, self._shape, stream)
            async with aclosing(self._service.generate(draft, answer)) as outputs:
                async for output in outputs:
                    await answer.send(output)
        except RequestError as error:
            error = in_words_of(self._body, error)
            if stream.has_left:
                await stream.end([error_event(error, self._draft.request_id)])
                return
            stream.take_back()
            await error_response(error, self._draft.request_id)(scope, receive, send)


class _AnswerStream:
    """An answer as events: of pieces in the moment in which they come, of the other outputs when sent."""

    __slots__ = ("_answer", "_body", "_draft", "_opening", "_shape", "_stream", "_tokenizer")

    def __init__(
        self, tokenizer: Tokenizer, body: Body, draft: RequestDraft, shape: AnswerShape, stream: EventStream
    ) -> None:
        self._tokenizer = tokenizer
        self._body = body
        self._draft = draft
        self._shape = shape
        self._stream = stream
        # Once it has begun; and what comes before all else.
        self._answer: StreamedAnswer | None = None
        self._opening: list[str] = []

    async def prepare(self) -> None:
        """Begins, unless the first output has a say in how."""
        if self._stream.writer is not None and not self._body.echo:
            await self._begin(EchoedPrompt())

    async def _begin(self, echo: EchoedPrompt) -> StreamedAnswer:
        answer = streamed_answer(self._body, echo, self._shape, self._draft)
        await self._stream.begin()
        self._answer, self._opening = answer, answer.opening()
        return answer

    def take(self, piece: Piece) -> bool:
        writer = self._stream.writer
        if self._answer is None or writer is None or not writer.is_open:
            return False
        self._stream.write(self._events(self._answer, piece))
        return True

    async def send(self, output: Output) -> None:
        answer = self._answer
        if answer is None:
            echo = await echo_of(self._tokenizer, self._body, self._draft.prompt, output)
            answer = await self._begin(echo)
        events = self._events(answer, output)
        if isinstance(output, End):
            events += closing_events(self._body, self._shape, output.usage)
            await self._stream.end(events)
        else:
            await self._stream.send(events)

    def _events(self, answer: StreamedAnswer, output: Output) -> list[str]:
        events = answer.events(output)
        if self._opening:
            events, self._opening = self._opening + events, []
        return events


def closing_events(body: Body, shape: AnswerShape, usage: Usage) -> list[str]:
    """After those of the last output."""
    return [*([shape.usage_chunk(usage)] if body.wants_usage_chunk else []), "[DONE]"]


def in_words_of(body: Body, error: RequestError) -> RequestError:
    """An error that names the field as this client calls it."""
    return error if error.field is None else error.with_field(body.client_name(error.field))


def error_event(error: RequestError, request_id: str) -> str:
    return json.dumps(openai_body(error, request_id))


def error_response(
    error: RequestError, request_id: str, headers: Mapping[str, str] | None = None
) -> Response:
    all_headers = dict(headers or {})
    if error.retry_after_s is not None:
        all_headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    return JSONResponse(
        openai_body(error, request_id), status_code=error.code.http_status, headers=all_headers
    )
