"""What a parser of tool calls makes of a model's text."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Text:
    """Words for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins.

    Attributes:
        index: its place among the answer's calls, from 0.
        name: of a function that the request declares.
    """

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next part of the JSON text of a call's arguments."""

    index: int
    text: str


ToolEvent = Text | CallStart | Arguments


class ToolParser(Protocol):
    """One answer's text in, events out. How the text is cut into pieces does not change what they add up to.

    Whitespace around a call's markup belongs to the markup. All other text comes out again, as `Text` or
    as `Arguments`; what only began like a call is `Text`, markup included.
    """

    def push(self, text: str) -> list[ToolEvent]: ...

    def finish(self) -> list[ToolEvent]:
        """The text has ended; nothing may be pushed after it."""
        ...
