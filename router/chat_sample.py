"""One sample of a chat's answer in OpenAI's shape: its text taken apart into content and calls."""

import uuid
from collections.abc import Iterable
from typing import Literal

from pydantic import BaseModel

from router.completion import FinishReason
from router.tool_parsers.events import Arguments, CallStart, Text, ToolEvent, ToolParser

FinishWord = Literal["stop", "length", "tool_calls"]


class FunctionDelta(BaseModel):
    name: str = ""
    arguments: str


class CallDelta(BaseModel):
    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionDelta


class Delta(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    tool_calls: list[CallDelta] = []


class Call(BaseModel):
    id: str
    type: Literal["function"]
    function: FunctionDelta


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    tool_calls: list[Call] = []


class ChatSample:
    """Give it all the text, in one way: `deltas` and then `last_deltas`, or `message`."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser
        self._has_calls = False

    def deltas(self, text: str) -> list[Delta]:
        return self._deltas(self._parser.push(text))

    def last_deltas(self) -> list[Delta]:
        return self._deltas(self._parser.finish())

    def message(self, text: str) -> AnswerMessage:
        events = [*self._parser.push(text), *self._parser.finish()]
        content = "".join(event.text for event in events if isinstance(event, Text))
        calls = [_call(start, events) for start in events if isinstance(start, CallStart)]
        if not calls:
            return AnswerMessage(role="assistant", content=content)
        self._has_calls = True
        return AnswerMessage(role="assistant", content=content or None, tool_calls=calls)

    def finish_word(self, reason: FinishReason) -> FinishWord:
        """Of the whole sample: ask after its last text."""
        return "tool_calls" if self._has_calls and reason is FinishReason.STOP else reason.value

    def _deltas(self, events: Iterable[ToolEvent]) -> list[Delta]:
        return [self._delta(event) for event in events]

    def _delta(self, event: ToolEvent) -> Delta:
        match event:
            case Text(text):
                return Delta(content=text)
            case CallStart(index, name):
                self._has_calls = True
                function = FunctionDelta(name=name, arguments="")
                call = CallDelta(index=index, id=_new_call_id(), type="function", function=function)
            case Arguments(index, text):
                call = CallDelta(index=index, function=FunctionDelta(arguments=text))
        return Delta(tool_calls=[call])


def _call(start: CallStart, events: Iterable[ToolEvent]) -> Call:
    own = (event for event in events if isinstance(event, Arguments) and event.index == start.index)
    function = FunctionDelta(name=start.name, arguments="".join(part.text for part in own))
    return Call(id=_new_call_id(), type="function", function=function)


def _new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
