"""The answers of OpenAI's API: whole, or in chunks."""

from collections.abc import Callable
from typing import Literal, Protocol

from pydantic import BaseModel

from router.chat_sample import AnswerMessage, ChatSample, Delta, FinishWord
from router.completion import End, FinishReason, Usage
from router.tool_parsers.events import ToolParser


class UsageBody(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> "UsageBody":
        return cls(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            total_tokens=usage.total_tokens,
        )


class ChatChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: None
    finish_reason: FinishWord | None


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: None
    finish_reason: FinishWord | None


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: None
    finish_reason: FinishWord | None


class Answer(BaseModel):
    """A whole answer, or one chunk of it. What is not set is not written."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk", "text_completion"]
    created: int
    model: str
    choices: list[ChatChoice] | list[ChatChunkChoice] | list[TextChoice]
    usage: UsageBody | None = None

    def json_text(self) -> str:
        return self.model_dump_json(exclude_unset=True)


class AnswerShape(Protocol):
    """How one endpoint writes one answer: each method returns the JSON of bodies."""

    def opening(self) -> list[str]:
        """Chunks before the first text."""
        ...

    def text_chunks(self, text: str) -> list[str]: ...

    def last_chunks(self, reason: FinishReason) -> list[str]:
        """The last of them says why the text ended."""
        ...

    def usage_chunk(self, usage: Usage) -> str:
        """The chunk after the last, without choices."""
        ...

    def whole(self, text: str, end: End) -> str: ...


class ChatShape:
    """/v1/chat/completions."""

    def __init__(
        self, request_id: str, model: str, created_unix_s: int, new_parser: Callable[[], ToolParser]
    ) -> None:
        self._id, self._model, self._created = f"chatcmpl-{request_id}", model, created_unix_s
        self._sample = ChatSample(new_parser())

    def opening(self) -> list[str]:
        return [self._chunk(Delta(role="assistant", content=""), None)]

    def text_chunks(self, text: str) -> list[str]:
        return [self._chunk(delta, None) for delta in self._sample.deltas(text)]

    def last_chunks(self, reason: FinishReason) -> list[str]:
        rest = [self._chunk(delta, None) for delta in self._sample.last_deltas()]
        return [*rest, self._chunk(Delta(), self._sample.finish_word(reason))]

    def usage_chunk(self, usage: Usage) -> str:
        return self._answer("chat.completion.chunk", [], usage)

    def whole(self, text: str, end: End) -> str:
        message = self._sample.message(text)
        word = self._sample.finish_word(end.finish_reason)
        choice = ChatChoice(index=0, message=message, logprobs=None, finish_reason=word)
        return self._answer("chat.completion", [choice], end.usage)

    def _chunk(self, delta: Delta, word: FinishWord | None) -> str:
        choice = ChatChunkChoice(index=0, delta=delta, logprobs=None, finish_reason=word)
        return self._answer("chat.completion.chunk", [choice], None)

    def _answer(
        self,
        object_: Literal["chat.completion", "chat.completion.chunk"],
        choices: list[ChatChoice] | list[ChatChunkChoice],
        usage: Usage | None,
    ) -> str:
        answer = Answer(
            id=self._id, object=object_, created=self._created, model=self._model, choices=choices
        )
        return _with_usage(answer, usage).json_text()


class TextShape:
    """/v1/completions."""

    def __init__(self, request_id: str, model: str, created_unix_s: int) -> None:
        self._id, self._model, self._created = f"cmpl-{request_id}", model, created_unix_s

    def opening(self) -> list[str]:
        return []

    def text_chunks(self, text: str) -> list[str]:
        return [self._answer(text, None, None)]

    def last_chunks(self, reason: FinishReason) -> list[str]:
        return [self._answer("", reason, None)]

    def usage_chunk(self, usage: Usage) -> str:
        return _with_usage(self._body([]), usage).json_text()

    def whole(self, text: str, end: End) -> str:
        return self._answer(text, end.finish_reason, end.usage)

    def _answer(self, text: str, reason: FinishReason | None, usage: Usage | None) -> str:
        word = None if reason is None else reason.value
        choice = TextChoice(index=0, text=text, logprobs=None, finish_reason=word)
        return _with_usage(self._body([choice]), usage).json_text()

    def _body(self, choices: list[TextChoice]) -> Answer:
        return Answer(
            id=self._id, object="text_completion", created=self._created, model=self._model, choices=choices
        )


def _with_usage(answer: Answer, usage: Usage | None) -> Answer:
    return answer if usage is None else answer.model_copy(update={"usage": UsageBody.of(usage)})
