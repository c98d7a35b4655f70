"""How a model writes its calls, and how it is made to write one."""

from collections.abc import Callable, Set
from dataclasses import dataclass, replace

from router.config import ToolCallFormat
from router.errors import invalid
from router.grammar import JsonSchema
from router.sampling_options import SamplingDraft
from router.tool_grammar import call_schema
from router.tool_parsers import hermes, llama3
from router.tool_parsers.events import ToolParser
from router.tool_parsers.first_call import FirstCallOnly
from router.tool_parsers.hermes import HermesParser
from router.tool_parsers.llama3 import Llama3Parser
from router.tool_parsers.plain import PlainParser
from router.tool_schema import JsonObject, ToolUse


@dataclass(frozen=True, slots=True)
class ToolStyle:
    """
    Attributes:
        parser: of an answer's text, for a set of function names.
        markup: tokens that must stay in the text, even where the tokenizer calls them special.
        call_start: after it in an answer nothing but a call's object can follow.
        arguments_member: what the object calls its arguments.
    """

    parser: Callable[[Set[str]], ToolParser]
    markup: tuple[str, ...]
    call_start: str
    arguments_member: str


HERMES = ToolStyle(HermesParser, (hermes.OPEN, hermes.CLOSE), f"{hermes.OPEN}\n", "arguments")
LLAMA3 = ToolStyle(Llama3Parser, (llama3.TAG,), "", "parameters")

# Styles of other models that share the Hermes tags.
_OTHER_TAGS = ("<function=", "<arg_key>")


def choose_tool_style(
    wanted: ToolCallFormat, tool_template: str, has_token: Callable[[str], bool]
) -> ToolStyle | None:
    """For "auto" the style that the model's template for tools teaches. None: none is known."""
    match wanted:
        case "hermes":
            return HERMES
        case "llama3":
            return LLAMA3
        case "none":
            return None
        case "auto":
            return _taught_style(tool_template, has_token)


def _taught_style(tool_template: str, has_token: Callable[[str], bool]) -> ToolStyle | None:
    if hermes.OPEN in tool_template:
        return None if any(tag in tool_template for tag in _OTHER_TAGS) else HERMES
    knows_tag = llama3.TAG in tool_template or has_token(llama3.TAG)
    return LLAMA3 if knows_tag and f'"{LLAMA3.arguments_member}"' in tool_template else None


@dataclass(frozen=True, slots=True)
class CallPlan:
    """What one chat's tools ask of the prompt, the sampling and the answer's parser. Without tools: nothing.

    Attributes:
        tools: as the template gets them.
        answer_start: the answer's first text, given to the model with the prompt.
        json_schema: what the rest of the answer must fit. "": anything.
        markup: special tokens that are text in this answer.
    """

    tools: tuple[JsonObject, ...] = ()
    answer_start: str = ""
    json_schema: str = ""
    markup: tuple[str, ...] = ()
    new_parser: Callable[[], ToolParser] = PlainParser

    def sampling(self, draft: SamplingDraft) -> SamplingDraft:
        """
        Raises:
            RequestError: INVALID_ARGUMENT, a grammar is asked for that calls do not fit.
        """
        if self.tools and draft.grammar is not None:
            raise invalid("response_format", "cannot be had together with tools")
        if not self.json_schema:
            return draft
        return replace(draft, grammar=JsonSchema(self.json_schema))


def plan_calls(use: ToolUse | None, style: ToolStyle | None) -> CallPlan:
    """
    Raises:
        RequestError: INVALID_ARGUMENT, nobody knows how this model writes calls.
    """
    if use is None:
        return CallPlan()
    if style is None:
        raise invalid(
            "tools",
            "how this model writes calls is not known (tool_call_format); only tool_choice none works",
        )
    forced = [tool for tool in use.tools if tool.function.name in use.must_call]
    answer_start = style.call_start if forced else ""
    return CallPlan(
        tools=tuple(tool.template_value() for tool in use.tools),
        answer_start=answer_start,
        json_schema=call_schema(
            {tool.function.name: tool.parameters() for tool in forced}, style.arguments_member
        )
        if forced
        else "",
        markup=style.markup,
        new_parser=lambda: _started_parser(style, use, answer_start),
    )


def _started_parser(style: ToolStyle, use: ToolUse, answer_start: str) -> ToolParser:
    parser = style.parser(use.names)
    parser.push(answer_start)
    return parser if use.parallel else FirstCallOnly(parser)
