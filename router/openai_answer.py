"""The answers of OpenAI's API: whole, or in chunks."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, Protocol

from pydantic import BaseModel

from router.chat_sample import AnswerMessage, ChatSample, Delta, FinishWord
from router.chunk_template import ChunkTemplate
from router.completion import End, FinishReason, ScoredPrompt, Usage
from router.openai_logprobs import ChatLogprobs, LogprobsWriter, PromptLogprobs, TextLogprobs
from router.shown_tokens import PlacedToken
from router.tool_parsers.events import ToolParser
from router.tool_parsers.plain import PlainParser


class PromptDetails(BaseModel):
    cached_tokens: int


class UsageBody(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails

    @classmethod
    def of(cls, usage: Usage) -> "UsageBody":
        return cls(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            total_tokens=usage.total_tokens,
            prompt_tokens_details=PromptDetails(cached_tokens=usage.cached_tokens),
        )


class ChatChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishWord | None


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishWord | None


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishWord | None
    prompt_logprobs: PromptLogprobs | None = None


class Answer(BaseModel):
    """A whole answer, or one chunk of it. What is not set is not written."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk", "text_completion"]
    created: int
    model: str
    choices: Sequence[ChatChoice | ChatChunkChoice | TextChoice]
    usage: UsageBody | None = None
    prompt_logprobs: PromptLogprobs | None = None

    def json_text(self) -> str:
        return self.model_dump_json(exclude_unset=True)


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """What of the prompt stands before the answer: "" and no tokens unless the client wants it back."""

    text: str = ""
    tokens: tuple[PlacedToken, ...] = ()


@dataclass(slots=True)
class WholeSample:
    """One sample as it grows to its end."""

    texts: list[str] = field(default_factory=list)
    tokens: list[PlacedToken] = field(default_factory=list)
    reason: FinishReason = FinishReason.STOP

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What every body of one answer says, and what it tells of tokens.

    Attributes:
        logprobs, prompt_logprobs: None: not asked for.
    """

    request_id: str
    model: str
    created_unix_s: int
    logprobs: LogprobsWriter | None
    prompt_logprobs: LogprobsWriter | None

    @classmethod
    def marked(cls, model: str) -> "AnswerHead":
        """Of no answer: what is made with it becomes an answer's when it is signed."""
        return cls(
            request_id=ChunkTemplate.ID_MARK,
            model=model,
            created_unix_s=ChunkTemplate.TIME_MARK,
            logprobs=None,
            prompt_logprobs=None,
        )

    def sign(self, marked: str) -> str:
        """`marked`: the JSON of a body."""
        return ChunkTemplate.signed(marked, self.request_id, self.created_unix_s)


class AnswerShape(Protocol):
    """How one endpoint writes an answer. Every string is the JSON of one body."""

    def opening(self, num_samples: int, echo: EchoedPrompt) -> list[str]:
        """Chunks before the first text. Asked for before any others."""
        ...

    def chunks(self, sample: int, text: str, tokens: Sequence[PlacedToken]) -> list[str]:
        """The next text of a sample, and the tokens that begin in it."""
        ...

    def last_chunks(self, sample: int, reason: FinishReason) -> list[str]:
        """The last of them says why the sample ended."""
        ...

    def usage_chunk(self, usage: Usage) -> str:
        """The chunk after the last, without choices."""
        ...

    def whole(
        self, samples: Sequence[WholeSample], echo: EchoedPrompt, scored: ScoredPrompt | None, end: End
    ) -> str: ...


class ChatShape:
    """/v1/chat/completions."""

    __slots__ = ("_head", "_samples", "_templates")

    def __init__(self, head: AnswerHead, new_parser: Callable[[], ToolParser]) -> None:
        self._head = head
        self._templates: dict[int, ChunkTemplate] = {}
        self._samples: dict[int, ChatSample] = defaultdict(lambda: ChatSample(new_parser()))

    def opening(self, num_samples: int, echo: EchoedPrompt) -> list[str]:
        for sample in range(num_samples):
            self._templates[sample] = ChunkTemplate(self._known_chunk(sample, "content", None))
        return [self._known_chunk(sample, "role", None) for sample in range(num_samples)]

    def chunks(self, sample: int, text: str, tokens: Sequence[PlacedToken]) -> list[str]:
        """The log probabilities are told with the first of them."""
        logprobs = self._logprobs(tokens)
        deltas = self._samples[sample].deltas(text)
        if self._head.logprobs is None:
            return [self._bare_chunk(sample, delta) for delta in deltas]
        if not deltas and logprobs is not None:
            deltas = [Delta(content="")]
        told = [logprobs, *(None for _ in deltas[1:])]
        return [self._chunk(sample, delta, each, None) for delta, each in zip(deltas, told, strict=False)]

    def _bare_chunk(self, sample: int, delta: Delta) -> str:
        if delta.tool_calls:
            return self._chunk(sample, delta, None, None)
        return self._templates[sample].with_text(delta.content)

    def _known_chunk(self, sample: int, delta: "_KnownDelta", word: FinishWord | None) -> str:
        return self._head.sign(_marked_chat_chunk(self._head.model, sample, delta, word))

    def last_chunks(self, sample: int, reason: FinishReason) -> list[str]:
        parsed = self._samples[sample]
        rest = [self._chunk(sample, delta, None, None) for delta in parsed.last_deltas()]
        return [*rest, self._known_chunk(sample, "none", parsed.finish_word(reason))]

    def usage_chunk(self, usage: Usage) -> str:
        return _with_usage(self._answer("chat.completion.chunk", []), usage).json_text()

    def whole(
        self, samples: Sequence[WholeSample], echo: EchoedPrompt, scored: ScoredPrompt | None, end: End
    ) -> str:
        choices = [self._choice(index, sample) for index, sample in enumerate(samples)]
        answer = _with_usage(self._answer("chat.completion", choices), end.usage)
        told = _prompt_logprobs(self._head, scored)
        if told is not None:
            answer = answer.model_copy(update={"prompt_logprobs": told})
        return answer.json_text()

    def _choice(self, index: int, sample: WholeSample) -> ChatChoice:
        parsed = self._samples[index]
        return ChatChoice(
            index=index,
            message=parsed.message(sample.text),
            logprobs=self._logprobs(sample.tokens),
            finish_reason=parsed.finish_word(sample.reason),
        )

    def _logprobs(self, tokens: Sequence[PlacedToken]) -> ChatLogprobs | None:
        return None if self._head.logprobs is None else self._head.logprobs.chat(tokens)

    def _chunk(
        self, sample: int, delta: Delta, logprobs: ChatLogprobs | None, word: FinishWord | None
    ) -> str:
        choice = ChatChunkChoice(index=sample, delta=delta, logprobs=logprobs, finish_reason=word)
        return self._answer("chat.completion.chunk", [choice]).json_text()

    def _answer(
        self,
        object_: Literal["chat.completion", "chat.completion.chunk"],
        choices: Sequence[ChatChoice | ChatChunkChoice],
    ) -> Answer:
        head = self._head
        return Answer(
            id=f"chatcmpl-{head.request_id}",
            object=object_,
            created=head.created_unix_s,
            model=head.model,
            choices=choices,
        )


class TextShape:
    """/v1/completions: the choices of one prompt."""

    __slots__ = ("_first_choice", "_head", "_templates")

    def __init__(self, head: AnswerHead, first_choice: int = 0) -> None:
        self._head = head
        self._first_choice = first_choice
        self._templates: dict[int, ChunkTemplate] = {}

    def opening(self, num_samples: int, echo: EchoedPrompt) -> list[str]:
        if self._head.logprobs is None:
            self._templates = {sample: self._new_template(sample, None) for sample in range(num_samples)}
        if not echo.text:
            return []
        return [self._chunk(sample, echo.text, echo.tokens, None) for sample in range(num_samples)]

    def chunks(self, sample: int, text: str, tokens: Sequence[PlacedToken]) -> list[str]:
        if self._head.logprobs is not None:
            return [self._chunk(sample, text, tokens, None)]
        return [self._templates[sample].with_text(text)]

    def _new_template(self, sample: int, reason: FinishReason | None) -> ChunkTemplate:
        marked = _marked_text_chunk(self._head.model, self._first_choice + sample, reason)
        return ChunkTemplate(self._head.sign(marked))

    def last_chunks(self, sample: int, reason: FinishReason) -> list[str]:
        return [self._new_template(sample, reason).with_text("")]

    def usage_chunk(self, usage: Usage) -> str:
        return _with_usage(self._answer([]), usage).json_text()

    def whole(
        self, samples: Sequence[WholeSample], echo: EchoedPrompt, scored: ScoredPrompt | None, end: End
    ) -> str:
        return self.answer(self.choices(samples, echo, scored), end.usage)

    def choices(
        self, samples: Sequence[WholeSample], echo: EchoedPrompt, scored: ScoredPrompt | None
    ) -> list[TextChoice]:
        told = _prompt_logprobs(self._head, scored)
        choices = [
            self._choice(index, echo.text + sample.text, (*echo.tokens, *sample.tokens), sample.reason)
            for index, sample in enumerate(samples)
        ]
        if told is None:
            return choices
        return [choice.model_copy(update={"prompt_logprobs": told}) for choice in choices]

    def answer(self, choices: Sequence[TextChoice], usage: Usage) -> str:
        """The whole answer."""
        return _with_usage(self._answer(choices), usage).json_text()

    def _chunk(
        self, sample: int, text: str, tokens: Sequence[PlacedToken], reason: FinishReason | None
    ) -> str:
        return self._answer([self._choice(sample, text, tokens, reason)]).json_text()

    def _choice(
        self, sample: int, text: str, tokens: Sequence[PlacedToken], reason: FinishReason | None
    ) -> TextChoice:
        writer = self._head.logprobs
        logprobs = writer.text(tokens) if writer is not None and tokens else None
        word = None if reason is None else reason.value
        index = self._first_choice + sample
        return TextChoice(index=index, text=text, logprobs=logprobs, finish_reason=word)

    def _answer(self, choices: Sequence[TextChoice]) -> Answer:
        head = self._head
        return Answer(
            id=f"cmpl-{head.request_id}",
            object="text_completion",
            created=head.created_unix_s,
            model=head.model,
            choices=choices,
        )


_KnownDelta = Literal["role", "content", "none"]
_DELTAS: dict[_KnownDelta, Delta] = {
    "role": Delta(role="assistant", content=""),
    "content": Delta(content=ChunkTemplate.MARK),
    "none": Delta(),
}


# Every answer has these chunks: only their marks are replaced for it.
@lru_cache(maxsize=256)
def _marked_chat_chunk(model: str, sample: int, delta: _KnownDelta, word: FinishWord | None) -> str:
    return ChatShape(AnswerHead.marked(model), PlainParser)._chunk(sample, _DELTAS[delta], None, word)


@lru_cache(maxsize=256)
def _marked_text_chunk(model: str, choice: int, reason: FinishReason | None) -> str:
    return TextShape(AnswerHead.marked(model), choice)._chunk(0, ChunkTemplate.MARK, (), reason)


def _with_usage(answer: Answer, usage: Usage) -> Answer:
    return answer.model_copy(update={"usage": UsageBody.of(usage)})


def _prompt_logprobs(head: AnswerHead, scored: ScoredPrompt | None) -> PromptLogprobs | None:
    if head.prompt_logprobs is None or scored is None:
        return None
    return head.prompt_logprobs.prompt(scored.tokens)
