"""The requests of OpenAI's API, as far as they are served."""

from typing import Annotated, Literal

from pydantic import Field, ValidationError

from router.chat_template import ChatMessage
from router.errors import ErrorCode, RequestError, invalid
from router.generation_request import Prompt, SamplingDraft, TextPrompt, TokenPrompt
from router.strict_body import StrictBody
from router.tool_schema import CalledBody, ToolBody, ToolChoice, ToolUse, read_tool_use

# OpenAI's default for completions; a chat may use what the context leaves.
COMPLETION_MAX_TOKENS = 16


class StreamOptions(StrictBody):
    include_usage: bool | None = None


class ResponseFormat(StrictBody):
    type: str = "text"


class TextPart(StrictBody):
    """A part of a message's content; only text is served."""

    type: Literal["text"]
    text: str


class Message(StrictBody):
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[TextPart] | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: list[CalledBody] | None = None
    tool_call_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None

    def chat_message(self, index: int) -> ChatMessage:
        """
        Raises:
            RequestError: INVALID_ARGUMENT, the role does not fit what is called or answered.
        """
        if self.tool_calls and self.role != "assistant":
            raise invalid("messages", f"{index}.tool_calls: only an assistant's message has them")
        if self.role == "tool" and self.tool_call_id is None:
            raise invalid("messages", f"{index}.tool_call_id: a tool's message needs it")
        return ChatMessage(
            role=self.role,
            content=self._text(),
            tool_calls=tuple(
                call.past_call(f"{index}.tool_calls.{place}")
                for place, call in enumerate(self.tool_calls or ())
            ),
            tool_call_id=self.tool_call_id or "",
            name=self.name or "",
        )

    def _text(self) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content)


class _Generation(StrictBody):
    """What both endpoints take; from `top_k` on, extensions that vLLM's users know."""

    model: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    repetition_penalty: float | None = None

    def stops(self) -> tuple[str, ...]:
        """The stop strings. One that is "" is the client's way to say none."""
        if isinstance(self.stop, str):
            return (self.stop,) if self.stop else ()
        return tuple(self.stop or ())

    @property
    def wants_usage_chunk(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def _sampling(self, max_tokens: int | None) -> SamplingDraft:
        return SamplingDraft(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
        )

    def _refuse_unserved(self) -> None:
        if self.n is not None and self.n != 1:
            raise _unserved("n", "values other than 1 are")
        for field in ("presence_penalty", "frequency_penalty"):
            if getattr(self, field):
                raise _unserved(field, "values other than 0 are")
        if self.repetition_penalty not in (None, 1):
            raise _unserved("repetition_penalty", "values other than 1 are")
        if self.logit_bias:
            raise _unserved("logit_bias", "it is")
        if self.response_format is not None and self.response_format.type != "text":
            raise _unserved("response_format", "types other than text are")
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "is only allowed with stream")


class ChatRequest(_Generation):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[ToolBody] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: list[object] | None = None

    def check(self) -> None:
        """
        Raises:
            RequestError: INVALID_ARGUMENT, it asks for what is not served.
        """
        self._refuse_unserved()
        if self.logprobs:
            raise _unserved("logprobs", "it is")
        for field in ("top_logprobs", "functions"):
            if getattr(self, field):
                raise _unserved(field, "it is")

    def chat_messages(self) -> tuple[ChatMessage, ...]:
        """
        Raises:
            RequestError: INVALID_ARGUMENT, a message contradicts itself.
        """
        return tuple(message.chat_message(index) for index, message in enumerate(self.messages))

    def tool_use(self) -> ToolUse | None:
        """None: nothing is to be called.

        Raises:
            RequestError: INVALID_ARGUMENT, the tools are wrong or the choice is none of them.
        """
        return read_tool_use(self.tools or (), self.tool_choice, self.parallel_tool_calls)

    def sampling(self) -> SamplingDraft:
        newer = self.max_completion_tokens
        return self._sampling(self.max_tokens if newer is None else newer)


class CompletionRequest(_Generation):
    """POST /v1/completions. A prompt is a text or token ids; a list of one such is one prompt too."""

    prompt_field: Annotated[str | list[int] | list[str] | list[list[int]], Field(alias="prompt")]
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | None = None

    def check(self) -> None:
        """
        Raises:
            RequestError: INVALID_ARGUMENT, it asks for what is not served.
        """
        self._refuse_unserved()
        if self.best_of is not None and self.best_of != 1:
            raise _unserved("best_of", "values other than 1 are")
        for field in ("echo", "suffix"):
            if getattr(self, field):
                raise _unserved(field, "it is")
        if self.logprobs is not None:
            raise _unserved("logprobs", "it is")

    def prompt(self) -> Prompt:
        match self.prompt_field:
            case str() as text:
                return TextPrompt(text)
            case [str() as text]:
                return TextPrompt(text)
            case [list() as token_ids]:
                return TokenPrompt(tuple(token_ids))
            case []:
                raise invalid("prompt", "must have at least one token")
            case [str() | list(), *_]:
                raise _unserved("prompt", "several prompts in one request are")
            case token_ids:
                return TokenPrompt(tuple(id_ for id_ in token_ids if isinstance(id_, int)))

    def sampling(self) -> SamplingDraft:
        return self._sampling(COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens)


def _unserved(field: str, what: str) -> RequestError:
    return invalid(field, f"{what} not supported yet")


def read_chat(body: bytes) -> ChatRequest:
    """
    Raises:
        RequestError: INVALID_ARGUMENT, naming the field that is wrong.
    """
    try:
        request = ChatRequest.model_validate_json(body)
    except ValidationError as error:
        raise _first_error(error) from error
    request.check()
    return request


def read_completion(body: bytes) -> CompletionRequest:
    """
    Raises:
        RequestError: INVALID_ARGUMENT, naming the field that is wrong.
    """
    try:
        request = CompletionRequest.model_validate_json(body)
    except ValidationError as error:
        raise _first_error(error) from error
    request.check()
    return request


def _first_error(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if not first["loc"]:
        return RequestError(ErrorCode.INVALID_ARGUMENT, f"the body is not a request: {first['msg']}")
    field = str(first["loc"][0])
    inner = ".".join(str(part) for part in first["loc"][1:])
    return invalid(field, f"{inner}: {first['msg']}" if inner else first["msg"])
