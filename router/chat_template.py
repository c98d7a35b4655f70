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

from router.errors import ErrorCode, RequestError


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation; `role` is what the template knows: "system", "user", "assistant"."""

    role: str
    content: str


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
    """A compiled template and the special tokens that it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """
        Raises:
            ValueError: `source` is not a template.
        """
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt that asks for the assistant's next turn.

        Raises:
            RequestError: INVALID_ARGUMENT, the template refuses these messages.
        """
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._template.render(
                messages=turns,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        # A template runs arbitrary expressions on the client's words: whatever fails is about those words.
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise RequestError(
                ErrorCode.INVALID_ARGUMENT,
                f"messages: the chat template refuses them: {error}",
                field="messages",
            ) from error


def load_chat_template(
    folder: Path, tokenizer_config: Mapping[str, object], special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    """Of a Hugging Face folder: chat_template.jinja, else tokenizer_config.json. None: the model has none.

    Raises:
        ValueError: the template does not compile.
    """
    file = folder / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.is_file() else _configured(tokenizer_config)
    return None if source is None else ChatTemplate(source, special_tokens)


def _configured(tokenizer_config: Mapping[str, object]) -> str | None:
    """A template, or the one called "default" among several."""
    match tokenizer_config.get("chat_template"):
        case str() as source:
            return source
        case list() as named:
            return next((one["template"] for one in named if one.get("name") == "default"), None)
        case _:
            return None
