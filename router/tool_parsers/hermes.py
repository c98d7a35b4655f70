"""Calls as Hermes and Qwen models write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from collections.abc import Set

from router.tool_parsers.call_reader import CallReader, Outcome, Reading
from router.tool_parsers.events import Text, ToolEvent
from router.tool_parsers.markers import first_marker, split_possible

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser:
    """Text and calls in any order. A call ends with its object; its closing tag may be missing."""

    def __init__(self, functions: Set[str]) -> None:
        self._functions = functions
        self._pending = ""
        self._num_calls = 0
        self._call: CallReader | None = None
        # The markup before the call that is being read: text, if it is none.
        self._opening = ""
        # Nothing but whitespace came since a call.
        self._after_call = False
        self._owes_close = False

    def push(self, text: str) -> list[ToolEvent]:
        self._pending += text
        events: list[ToolEvent] = []
        self._advance(events)
        return events

    def finish(self) -> list[ToolEvent]:
        events: list[ToolEvent] = []
        while self._call is not None:
            self._heed(self._call.finish(), events)
            self._advance(events)
        cut_close = self._after_call and self._owes_close and CLOSE.startswith(self._pending)
        self._say("" if cut_close else self._pending, events)
        return events

    def _advance(self, events: list[ToolEvent]) -> None:
        while self._pending:
            if self._call is None:
                if not self._read_text(events):
                    return
            else:
                text, self._pending = self._pending, ""
                self._heed(self._call.read(text), events)

    def _heed(self, reading: Reading, events: list[ToolEvent]) -> None:
        events += reading.events
        if reading.outcome is Outcome.MORE:
            return
        self._call = None
        self._pending = reading.rest
        if reading.outcome is Outcome.CALL:
            self._num_calls += 1
            self._after_call = self._owes_close = True
        else:
            self._say(self._opening, events)

    def _read_text(self, events: list[ToolEvent]) -> bool:
        """Reads up to a tag; False: what is pending needs more text."""
        if self._after_call:
            self._pending = self._pending.lstrip()
        tags = (OPEN, CLOSE) if self._owes_close else (OPEN,)
        found = first_marker(self._pending, tags)
        if found is None:
            text, self._pending = split_possible(self._pending, tags)
            self._say(text, events)
            return False
        at, tag = found
        text = self._pending[:at].rstrip()
        markup = self._pending[len(text) : at + len(tag)]
        self._pending = self._pending[at + len(tag) :]
        self._say(text, events)
        if tag == CLOSE:
            self._after_call, self._owes_close = True, False
        else:
            self._opening = markup
            self._call = CallReader(self._num_calls, self._functions, CLOSE)
        return True

    def _say(self, text: str, events: list[ToolEvent]) -> None:
        if text:
            events.append(Text(text))
            self._after_call = False
