"""The requests of OpenAI's API and of vLLM's extensions to it, as far as they are served.

Ranges are checked later, where `sampling_options` and `generation_request` document them: here, what only
this API has.
"""

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from router import grammar
from router.chat_template import ChatMessage
from router.errors import invalid
from router.generation_request import Prompt, TextPrompt, TokenPrompt
from router.openai_grammar import (
    STRUCTURED_OUTPUTS,
    ResponseFormat,
    StructuredOutputs,
    read_grammar,
)
from router.sampling_options import SamplingDraft
from router.strict_body import StrictBody, parse
from router.tool_schema import CalledBody, ToolBody, ToolChoice, ToolUse, read_tool_use

# OpenAI's default for completions; a chat may use what the context leaves.
COMPLETION_MAX_TOKENS = 16
# Of one request for completions.
MAX_PROMPTS = 128
# Fields that would change how a chat becomes a prompt.
UNSERVED_TEMPLATING = ("continue_final_message", "chat_template", "chat_template_kwargs")
_TOKEN_ID = re.compile(r"[0-9]{1,10}", re.ASCII)


class StreamOptions(StrictBody):
    """`continuous_usage_stats` is vLLM's: of every chunk, if there is a usage at all."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


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

    # Fields that would change the answer: refused, not ignored. `structured_outputs` has replaced guided_*.
    unserved: ClassVar[tuple[str, ...]] = (
        "use_beam_search",
        "include_stop_str_in_output",
        "allowed_token_ids",
        "bad_words",
        "truncate_prompt_tokens",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
    )

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
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    repetition_penalty: float | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    use_beam_search: object = None
    include_stop_str_in_output: object = None
    allowed_token_ids: object = None
    bad_words: object = None
    truncate_prompt_tokens: object = None
    guided_json: object = None
    guided_regex: object = None
    guided_choice: object = None
    guided_grammar: object = None
    add_special_tokens: bool | None = None

    def stops(self) -> tuple[str, ...]:
        """The stop strings. One that is "" is the client's way to say none."""
        if isinstance(self.stop, str):
            return (self.stop,) if self.stop else ()
        return tuple(self.stop or ())

    @property
    def num_samples(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def wants_usage_chunk(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        options = self.stream_options
        return self.wants_usage_chunk and bool(options and options.continuous_usage_stats)

    def client_name(self, field: str) -> str:
        """What this client calls a field that a check or a worker has found wrong."""
        is_structured = field == grammar.FIELD and self.structured_outputs is not None
        return STRUCTURED_OUTPUTS if is_structured else field

    def _sampling(
        self, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
    ) -> SamplingDraft:
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
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=_logit_bias(self.logit_bias or {}),
            n=self.n,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=read_grammar(self.response_format, self.structured_outputs),
        )

    def _check(self) -> None:
        for field in self.unserved:
            if getattr(self, field):
                raise invalid(field, "is not served")
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "is only allowed with stream")
        if self.stream and self.prompt_logprobs is not None:
            raise invalid("prompt_logprobs", "is not allowed with stream")
        if self.best_of is not None and self.best_of != self.num_samples:
            raise invalid("best_of", "must equal n: every sample is returned")
        if self.stream and self.best_of not in (None, 1):
            raise invalid("best_of", "is not allowed with stream")


class ChatRequest(_Generation):
    """POST /v1/chat/completions."""

    unserved = (*_Generation.unserved, *UNSERVED_TEMPLATING)

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[ToolBody] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: list[object] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: object = None
    chat_template: object = None
    chat_template_kwargs: object = None

    def check(self) -> None:
        """
        Raises:
            RequestError: INVALID_ARGUMENT, fields that contradict each other or are not served.
        """
        self._check()
        if self.functions:
            raise invalid("functions", "is not served: use tools")
        for field in ("echo", "suffix", "best_of"):
            if getattr(self, field):
                raise invalid(field, "is only allowed with completions")
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs", "is only allowed with logprobs")
        if self.add_special_tokens:
            raise invalid(
                "add_special_tokens", "is only allowed with completions: a chat template writes them"
            )
        if self.add_generation_prompt is False:
            raise invalid("add_generation_prompt", "must be true: an answer is what is generated")

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

    @property
    def num_logprobs(self) -> int | None:
        """Of the likeliest tokens. None: no log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def client_name(self, field: str) -> str:
        if field == grammar.FIELD and self.response_format is None and self.tools:
            return "tools"
        names = {"logprobs": "top_logprobs", "prompt": "messages"}
        return names.get(field) or super().client_name(field)

    def sampling(self) -> SamplingDraft:
        newer = self.max_completion_tokens
        return self._sampling(
            max_tokens=self.max_tokens if newer is None else newer,
            logprobs=self.num_logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )


class CompletionRequest(_Generation):
    """POST /v1/completions. A prompt is a text or token ids; there may be a list of either."""

    prompt_field: Annotated[str | list[int] | list[str] | list[list[int]], Field(alias="prompt")]
    logprobs: int | None = None

    def check(self) -> None:
        """
        Raises:
            RequestError: INVALID_ARGUMENT, fields that contradict each other or are not served.
        """
        self._check()
        if self.suffix:
            raise invalid("suffix", "is not served: nothing is filled in between")

    def prompts(self) -> tuple[Prompt, ...]:
        """At least one.

        Raises:
            RequestError: INVALID_ARGUMENT, none, or more than `MAX_PROMPTS`.
        """
        if isinstance(self.prompt_field, str):
            return (self._prompt(self.prompt_field),)
        several = [self._prompt(each) for each in self.prompt_field if not isinstance(each, int)]
        if not several:
            return (TokenPrompt(tuple(each for each in self.prompt_field if isinstance(each, int))),)
        if len(several) > MAX_PROMPTS:
            raise invalid("prompt", f"at most {MAX_PROMPTS} in one request, got {len(several)}")
        return tuple(several)

    def _prompt(self, given: str | list[int]) -> Prompt:
        if isinstance(given, str):
            return TextPrompt(given, self.add_special_tokens is not False)
        return TokenPrompt(tuple(given))

    @property
    def num_logprobs(self) -> int | None:
        """Of the likeliest tokens. None: no log probabilities."""
        return self.logprobs

    def sampling(self) -> SamplingDraft:
        echoed = self.logprobs if self.echo else None
        return self._sampling(
            max_tokens=COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=max(
                (each for each in (echoed, self.prompt_logprobs) if each is not None), default=None
            ),
        )


def _logit_bias(biases: dict[str, float]) -> dict[int, float]:
    for token in biases:
        if not _TOKEN_ID.fullmatch(token):
            raise invalid("logit_bias", f"must be keyed by token ids, got {token[:20]!r}")
    return {int(token): bias for token, bias in biases.items()}


def read_chat(body: bytes) -> ChatRequest:
    """
    Raises:
        RequestError: INVALID_ARGUMENT, naming the field that is wrong.
    """
    request = parse(ChatRequest, body)
    request.check()
    return request


def read_completion(body: bytes) -> CompletionRequest:
    """
    Raises:
        RequestError: INVALID_ARGUMENT, naming the field that is wrong.
    """
    request = parse(CompletionRequest, body)
    request.check()
    return request
