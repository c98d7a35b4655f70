"""One call out of an answer's text, from its opening brace on."""

from collections.abc import Set
from dataclasses import dataclass
from enum import Enum, auto

from router.tool_parsers.call_object import CallObject, NotACall
from router.tool_parsers.events import Arguments, CallStart, ToolEvent
from router.tool_parsers.json_scanner import NotJson
from router.tool_parsers.markers import held_chars


class Outcome(Enum):
    MORE = auto()
    """All is read; the call goes on."""
    CALL = auto()
    """The call is over; `rest` comes after it."""
    NOT_A_CALL = auto()
    """`rest` is all the text again, from the brace on, and nothing was said."""


@dataclass(frozen=True, slots=True)
class Reading:
    events: list[ToolEvent]
    outcome: Outcome
    rest: str = ""


class CallReader:
    """Reads a call object as it comes. Whitespace may stand before it.

    Once the call is certain its arguments go out as they are written. If they then turn out not to be
    JSON, they are passed on as they are up to `close`: the client sees what the model said.
    """

    def __init__(self, index: int, functions: Set[str], close: str) -> None:
        self._index = index
        self._close = close
        self._object = CallObject(functions)
        self._held = ""
        self._started = False
        self._broken = False

    def read(self, text: str) -> Reading:
        if self._broken:
            return self._read_broken(text)
        events: list[ToolEvent] = []
        parts: list[str] = []
        for at, char in enumerate(text):
            try:
                parts.append(self._object.take(char))
            except (NotJson, NotACall):
                return self._stop(events, parts, text, at)
            if self._object.committed and not self._started:
                self._start(events)
            if self._object.complete:
                self._say(events, parts)
                return Reading(events, Outcome.CALL, text[at + 1 :])
        if not self._started:
            self._held += text
        self._say(events, parts)
        return Reading(events, Outcome.MORE)

    def finish(self) -> Reading:
        """The text has ended."""
        if not self._started:
            return Reading([], Outcome.NOT_A_CALL, self._held)
        events: list[ToolEvent] = []
        self._say(events, [self._held])
        return Reading(events, Outcome.CALL)

    def _start(self, events: list[ToolEvent]) -> None:
        self._started, self._held = True, ""
        events.append(CallStart(self._index, self._object.name))

    def _say(self, events: list[ToolEvent], parts: list[str]) -> None:
        if arguments := "".join(parts):
            events.append(Arguments(self._index, arguments))

    def _stop(self, events: list[ToolEvent], parts: list[str], text: str, at: int) -> Reading:
        if not self._started:
            return Reading([], Outcome.NOT_A_CALL, self._held + text)
        self._say(events, parts)
        if self._object.arguments_done:
            # Only the object's end is wrong: a forgotten brace.
            return Reading(events, Outcome.CALL, text[at:])
        self._broken = True
        broken = self._read_broken(text[at:])
        return Reading(events + broken.events, broken.outcome, broken.rest)

    def _read_broken(self, text: str) -> Reading:
        events: list[ToolEvent] = []
        text, self._held = self._held + text, ""
        at = text.find(self._close) if self._close else -1
        if at >= 0:
            self._say(events, [text[:at]])
            return Reading(events, Outcome.CALL, text[at:])
        kept = len(text) - held_chars(text, [self._close] if self._close else [])
        self._held = text[kept:]
        self._say(events, [text[:kept]])
        return Reading(events, Outcome.MORE)
