"""The answers of OpenAI's API: whole, or in chunks."""

from typing import Literal, Protocol

from pydantic import BaseModel

from router.completion import End, FinishReason, Usage

FinishWord = Literal["stop", "length"] | None


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


class Delta(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str = ""


class ChatChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: None
    finish_reason: FinishWord


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: None
    finish_reason: FinishWord


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: None
    finish_reason: FinishWord


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
    """How one endpoint writes an answer: each method returns the JSON of one body."""

    def opening(self) -> list[str]:
        """Chunks before the first text."""
        ...

    def text_chunk(self, text: str) -> str: ...

    def last_chunk(self, reason: FinishReason) -> str:
        """The chunk that says why the text ended."""
        ...

    def usage_chunk(self, usage: Usage) -> str:
        """The chunk after the last, without choices."""
        ...

    def whole(self, text: str, end: End) -> str: ...


class ChatShape:
    """/v1/chat/completions."""

    def __init__(self, request_id: str, model: str, created_unix_s: int) -> None:
        self._id, self._model, self._created = f"chatcmpl-{request_id}", model, created_unix_s

    def opening(self) -> list[str]:
        return [self._chunk(Delta(role="assistant", content=""), None)]

    def text_chunk(self, text: str) -> str:
        return self._chunk(Delta(content=text), None)

    def last_chunk(self, reason: FinishReason) -> str:
        return self._chunk(Delta(), reason)

    def usage_chunk(self, usage: Usage) -> str:
        return self._answer("chat.completion.chunk", [], usage)

    def whole(self, text: str, end: End) -> str:
        message = AnswerMessage(role="assistant", content=text)
        choice = ChatChoice(index=0, message=message, logprobs=None, finish_reason=end.finish_reason.value)
        return self._answer("chat.completion", [choice], end.usage)

    def _chunk(self, delta: Delta, reason: FinishReason | None) -> str:
        word = None if reason is None else reason.value
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

    def text_chunk(self, text: str) -> str:
        return self._answer(text, None, None)

    def last_chunk(self, reason: FinishReason) -> str:
        return self._answer("", reason, None)

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
