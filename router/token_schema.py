"""What /tokenize and /detokenize take and tell, as vLLM's do."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, Field

from router.errors import invalid
from router.generation_request import ChatPrompt, TextPrompt
from router.openai_schema import UNSERVED_TEMPLATING, Message
from router.strict_body import StrictBody, parse
from router.tokenization import TokenizeDraft
from router.tool_schema import ToolBody, read_tool_use
from router.tool_style import ToolStyle, plan_calls


class TokenizeRequest(StrictBody):
    """POST /tokenize, of a prompt or of a chat."""

    model: str = ""
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[ToolBody] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    continue_final_message: object = None
    chat_template: object = None
    chat_template_kwargs: object = None

    def check(self) -> None:
        """
        Raises:
            RequestError: INVALID_ARGUMENT, fields that contradict each other or are not served.
        """
        for field in UNSERVED_TEMPLATING:
            if getattr(self, field):
                raise invalid(field, "is not served")
        if (self.prompt is None) == (self.messages is None):
            raise invalid("prompt", "must be set, or messages, but not both")
        if self.messages is None:
            for field in ("tools", "add_generation_prompt"):
                if getattr(self, field) is not None:
                    raise invalid(field, "is only allowed with messages")
        elif self.add_special_tokens:
            raise invalid("add_special_tokens", "is only allowed with a prompt: a chat template writes them")

    def draft(self, style: ToolStyle | None) -> TokenizeDraft:
        """
        Args:
            style: how the model writes calls.

        Raises:
            RequestError: INVALID_ARGUMENT, a chat with these messages or tools would be refused.
        """
        return TokenizeDraft(
            model=self.model,
            prompt=self._text() if self.messages is None else self._chat(style),
            add_generation_prompt=self.add_generation_prompt is not False,
        )

    def _text(self) -> TextPrompt:
        return TextPrompt(self.prompt or "", self.add_special_tokens is not False)

    def _chat(self, style: ToolStyle | None) -> ChatPrompt:
        tools = plan_calls(read_tool_use(self.tools or (), None, None), style).tools
        messages = tuple(message.chat_message(index) for index, message in enumerate(self.messages or ()))
        return ChatPrompt(messages, tools)


class TokenizeAnswer(BaseModel):
    """
    Attributes:
        max_model_len: of prompt and answer together. None: not known.
        token_strs: the vocabulary's entries, with its marks for spaces and bytes. None: not asked for.
    """

    count: int
    max_model_len: int | None
    tokens: Sequence[int]
    token_strs: Sequence[str] | None


class DetokenizeRequest(StrictBody):
    """POST /detokenize."""

    model: str = ""
    tokens: list[int]


class DetokenizeAnswer(BaseModel):
    prompt: str


def read_tokenize(body: bytes) -> TokenizeRequest:
    """
    Raises:
        RequestError: INVALID_ARGUMENT, naming the field that is wrong.
    """
    request = parse(TokenizeRequest, body)
    request.check()
    return request


def read_detokenize(body: bytes) -> DetokenizeRequest:
    """
    Raises:
        RequestError: INVALID_ARGUMENT, naming the field that is wrong.
    """
    return parse(DetokenizeRequest, body)
