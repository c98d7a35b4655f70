"""A model's chat template: messages in, the text of the prompt out."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.errors import ErrorCode, RequestError, invalid


@dataclass(frozen=True, slots=True)
class PastCall:
    """A call that an assistant's message made."""

    id: str
    name: str
    arguments: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation.

    Attributes:
        role: what the template knows: "system", "user", "assistant", "tool".
        tool_call_id: of the call that a tool's message answers; "": it answers none.
        name: of the speaker; "": none is given.
    """

    role: str
    content: str
    tool_calls: tuple[PastCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""

    def template_value(self) -> dict[str, object]:
        """As transformers passes it to a template: a call's arguments are an object."""
        value: dict[str, object] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            value["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        if self.tool_call_id:
            value["tool_call_id"] = self.tool_call_id
        if self.name:
            value["name"] = self.name
        return value


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: jinja2.runtime.Macro) -> str:
        return caller()


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the HTML escapes of jinja2's own filter, as templates are written for."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _now(format_: str) -> str:
    return datetime.now().strftime(format_)


def _environment() -> ImmutableSandboxedEnvironment:
    """What transformers gives to templates: the same settings, filters and globals."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _now
    return environment


class ChatTemplate:
    """A compiled template and the special tokens that it may name.

    Attributes:
        tool_source: the template's text, as it is where there are tools.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None
    ) -> None:
        """
        Args:
            tool_source: another template for conversations with tools.

        Raises:
            ValueError: a source is not a template.
        """
        self.tool_source = source if tool_source is None else tool_source
        self._plain = _compiled(source)
        self._with_tools = _compiled(self.tool_source)
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, object]] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The conversation as a prompt.

        Args:
            tools: what the model may call, as transformers describes functions.
            add_generation_prompt: the template's own variable: it opens the assistant's next turn.

        Raises:
            RequestError: INVALID_ARGUMENT, the template refuses these messages, or leaves the tools out.
        """
        turns = [message.template_value() for message in messages]
        if not tools:
            return self._render(self._plain, turns, None, add_generation_prompt)
        text = self._render(self._with_tools, turns, tools, add_generation_prompt)
        if text == self._without_tools(turns, add_generation_prompt):
            raise invalid("tools", "the model's chat template has no place for them")
        return text

    def _without_tools(
        self, turns: Sequence[Mapping[str, object]], add_generation_prompt: bool
    ) -> str | None:
        """None: the template cannot do without."""
        try:
            return self._render(self._with_tools, turns, None, add_generation_prompt)
        except RequestError:
            return None

    def _render(
        self,
        template: jinja2.Template,
        turns: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None,
        add_generation_prompt: bool,
    ) -> str:
        try:
            return template.render(
                messages=turns,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        # A template runs arbitrary expressions on the client's words: whatever fails is about those words.
        except (
            jinja2.TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise RequestError(
                ErrorCode.INVALID_ARGUMENT,
                f"messages: the chat template refuses them: {error}",
                field="messages",
            ) from error


def _compiled(source: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template does not compile: {error}") from error


def load_chat_template(
    folder: Path, tokenizer_config: Mapping[str, object], special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    """Of a Hugging Face folder: its .jinja files, else tokenizer_config.json. None: the model has none.

    Raises:
        ValueError: a template does not compile.
    """
    sources = _in_files(folder) or _configured(tokenizer_config)
    default = sources.get("default")
    return None if default is None else ChatTemplate(default, special_tokens, sources.get("tool_use"))


def _in_files(folder: Path) -> dict[str, str]:
    files = {
        "default": folder / "chat_template.jinja",
        "tool_use": folder / "additional_chat_templates" / "tool_use.jinja",
    }
    return {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}


def _configured(tokenizer_config: Mapping[str, object]) -> dict[str, str]:
    """One template, or several with names."""
    match tokenizer_config.get("chat_template"):
        case str() as source:
            return {"default": source}
        case list() as named:
            return {one["name"]: one["template"] for one in named}
        case _:
            return {}
