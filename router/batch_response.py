"""Runs one request for completions of several prompts, and answers whole or as events."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from router.completion import End, Output, Usage
from router.counted_answer import streamed_answer
from router.errors import RequestError, invalid
from router.event_stream import EventStream
from router.generation_request import RequestDraft
from router.generation_service import GenerationService
from router.hang_up import until_hang_up
from router.interleaving import interleave
from router.openai_answer import AnswerHead, EchoedPrompt, TextChoice, TextShape
from router.openai_response import (
    closing_events,
    error_event,
    error_response,
    in_words_of,
)
from router.openai_schema import CompletionRequest
from router.prompt_answer import StreamedAnswer, WholeAnswer, echo_of


class BatchResponse(Response):
    """The answer to several prompts, `n` choices of each, numbered prompt by prompt.

    To keys, queue and workers each prompt is a request of its own; what fails one fails all, once.
    """

    def __init__(
        self,
        service: GenerationService,
        body: CompletionRequest,
        drafts: Sequence[RequestDraft],
        head: AnswerHead,
    ) -> None:
        self._service = service
        self._body = body
        self._drafts = drafts
        self._request_id = head.request_id
        self._shapes = [TextShape(head, place * body.num_samples) for place in range(len(drafts))]
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._stream if self._body.stream else self._whole
        await until_hang_up(scope, receive, answer(scope, receive, send))

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = Response(await self._answer(), media_type="application/json")
        except RequestError as error:
            response = error_response(in_words_of(self._body, error), self._request_id)
        await response(scope, receive, send)

    async def _answer(self) -> str:
        answers: dict[int, WholeAnswer] = {}
        usage = Usage(0, 0, 0)
        async with aclosing(self._outputs(await self._all_checked())) as outputs:
            async for place, output in outputs:
                if place not in answers:
                    answers[place] = WholeAnswer(self._body, await self._echo(place, output))
                answers[place].add(output)
                if isinstance(output, End):
                    usage += output.usage
        return self._shapes[0].answer(self._choices(answers), usage)

    def _choices(self, answers: dict[int, WholeAnswer]) -> list[TextChoice]:
        each = [
            shape.choices(answers[place].samples, answers[place].echo, answers[place].scored)
            for place, shape in enumerate(self._shapes)
        ]
        return [choice for choices in each for choice in choices]

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An error before the first output still is an HTTP status; a later one is the last event."""
        stream = EventStream(scope, send)
        has_begun = False
        try:
            async with aclosing(self._events()) as events:
                async for each in events:
                    if not has_begun:
                        has_begun = True
                        await stream.begin()
                    await stream.send(each)
        except RequestError as error:
            error = in_words_of(self._body, error)
            if not has_begun:
                await error_response(error, self._request_id)(scope, receive, send)
                return
            await stream.send([error_event(error, self._request_id)])
        await stream.end([])

    async def _events(self) -> AsyncGenerator[list[str], None]:
        answers: dict[int, StreamedAnswer] = {}
        usage = Usage(0, 0, 0)
        checked = await self._all_checked()
        async with aclosing(self._outputs(checked)) as outputs:
            async for place, output in outputs:
                opening: list[str] = []
                if place not in answers:
                    echo = await self._echo(place, output)
                    shape = self._shapes[place]
                    answers[place] = streamed_answer(self._body, echo, shape, checked[place])
                    opening = answers[place].opening()
                yield [*opening, *answers[place].events(output)]
                if isinstance(output, End):
                    usage += output.usage
        yield closing_events(self._body, self._shapes[0], usage)

    async def _echo(self, place: int, first: Output) -> EchoedPrompt:
        return await echo_of(self._service.tokenizer, self._body, self._drafts[place].prompt, first)

    def _outputs(self, checked: Sequence[RequestDraft]) -> AsyncGenerator[tuple[int, Output], None]:
        """Of all prompts, each with its place."""
        return interleave([self._service.generate(each) for each in checked])

    async def _all_checked(self) -> list[RequestDraft]:
        """Nothing runs before all are found sound."""
        return [await self._checked(place, draft) for place, draft in enumerate(self._drafts)]

    async def _checked(self, place: int, draft: RequestDraft) -> RequestDraft:
        # Short prompts are tokenized where they stand: token streams go on between two of them.
        await asyncio.sleep(0)
        try:
            return await self._service.checked(draft)
        except RequestError as error:
            if error.field != "prompt":
                raise
            raise invalid("prompt", f"{place}: {error.message.removeprefix('prompt: ')}") from error
