"""Tools in a request of OpenAI's chat API: what is declared, what was called, what must be called."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, JsonValue
from pydantic_core import from_json

from router.chat_template import PastCall
from router.errors import invalid
from router.strict_body import StrictBody

MAX_TOOLS = 128
NAME = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]

JsonObject = dict[str, JsonValue]


class FunctionBody(StrictBody):
    name: NAME
    description: str | None = None
    parameters: JsonObject | None = None


class ToolBody(StrictBody):
    type: Literal["function"]
    function: FunctionBody

    def parameters(self) -> JsonObject:
        """A function without parameters takes none."""
        return self.function.parameters or {"type": "object", "properties": {}}

    def template_value(self) -> JsonObject:
        """As transformers describes a function to a template, members in its order."""
        function: JsonObject = {"name": self.function.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        function["parameters"] = self.parameters()
        return {"type": "function", "function": function}


class CalledFunction(StrictBody):
    name: NAME
    arguments: str


class CalledBody(StrictBody):
    """A call in an assistant's message."""

    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"]
    function: CalledFunction

    def past_call(self, field: str) -> PastCall:
        """
        Args:
            field: where the call stands in the request.

        Raises:
            RequestError: INVALID_ARGUMENT, the arguments are no JSON object.
        """
        try:
            arguments: object = from_json(self.function.arguments.strip() or "{}", allow_inf_nan=False)
        except ValueError as error:
            raise _arguments_wrong(field, str(error)) from error
        if not isinstance(arguments, dict):
            raise _arguments_wrong(field, "not a JSON object")
        return PastCall(self.id, self.function.name, arguments)


def _arguments_wrong(field: str, why: str) -> Exception:
    return invalid("messages", f"{field}.function.arguments: {why}")


class NamedFunction(StrictBody):
    name: str


class NamedChoice(StrictBody):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What the model may call, at least one function.

    Attributes:
        must_call: one of these functions is called; empty: the model decides.
        parallel: several calls may be answered.
    """

    tools: tuple[ToolBody, ...]
    must_call: tuple[str, ...]
    parallel: bool

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.function.name for tool in self.tools)


def read_tool_use(
    tools: Sequence[ToolBody], choice: ToolChoice | None, parallel: bool | None
) -> ToolUse | None:
    """None: the model calls nothing, and with the choice "none" it is not told of the tools.

    Raises:
        RequestError: INVALID_ARGUMENT, the tools are wrong or the choice is none of them.
    """
    must_call = _must_call(tools, choice)
    _check_tools(tools)
    if not tools or choice == "none":
        return None
    return ToolUse(tuple(tools), must_call, parallel is not False)


def _must_call(tools: Sequence[ToolBody], choice: ToolChoice | None) -> tuple[str, ...]:
    names = tuple(tool.function.name for tool in tools)
    match choice:
        case "required":
            if not tools:
                raise invalid("tool_choice", '"required" needs tools')
            return names
        case NamedChoice():
            if choice.function.name not in names:
                raise invalid("tool_choice", f"{choice.function.name!r} is none of the tools")
            return (choice.function.name,)
        case _:
            return ()


def _check_tools(tools: Sequence[ToolBody]) -> None:
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"at most {MAX_TOOLS}, got {len(tools)}")
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.function.name in seen:
            raise invalid("tools", f"{index}.function.name: {tool.function.name!r} is there twice")
        seen.add(tool.function.name)
        if tool.parameters().get("type", "object") != "object":
            raise invalid("tools", f'{index}.function.parameters.type: must be "object"')
