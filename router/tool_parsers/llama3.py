"""Calls as Llama 3 models write them: {"name": ..., "parameters": {...}}, several with ; between them."""

from collections.abc import Set

from router.tool_parsers.call_reader import CallReader, Outcome, Reading
from router.tool_parsers.events import Text, ToolEvent
from router.tool_parsers.markers import split_possible

TAG = "<|python_tag|>"
SEPARATOR = ";"


class Llama3Parser:
    """A call stands at the answer's beginning, after the tag, or after another call: nowhere else, so that
    JSON in the middle of a text stays text.
    """

    def __init__(self, functions: Set[str]) -> None:
        self._functions = functions
        self._pending = ""
        self._num_calls = 0
        self._call: CallReader | None = None
        # A call may begin here. What stood since is in `_opening`: text, if none does.
        self._may_open = True
        self._opening = ""
        # Nothing but whitespace and separators came since a call.
        self._after_call = False

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
        rest = self._opening + self._pending
        if self._after_call:
            rest = rest.lstrip()
        self._say("" if self._after_call and rest.rstrip() in ("", SEPARATOR) else rest, events)
        return events

    def _advance(self, events: list[ToolEvent]) -> None:
        while self._pending:
            if self._call is not None:
                text, self._pending = self._pending, ""
                self._heed(self._call.read(text), events)
            elif not (self._read_opening(events) if self._may_open else self._read_text(events)):
                return

    def _heed(self, reading: Reading, events: list[ToolEvent]) -> None:
        events += reading.events
        if reading.outcome is Outcome.MORE:
            return
        self._call = None
        self._pending = reading.rest
        if reading.outcome is Outcome.CALL:
            self._num_calls += 1
            self._may_open = self._after_call = True
            self._opening = ""
        else:
            self._give_up_opening(events)

    def _read_opening(self, events: list[ToolEvent]) -> bool:
        """Reads what may stand before a call; False: what is pending needs more text."""
        markup = self._next_markup()
        if markup is None:
            return False
        if markup:
            self._opening += markup
            self._pending = self._pending[len(markup) :]
        elif self._pending.startswith("{"):
            self._call = CallReader(self._num_calls, self._functions, "")
        else:
            self._give_up_opening(events)
        return True

    def _next_markup(self) -> str | None:
        """Whitespace, the tag or a separator that is next; "": something else is; None: not known yet."""
        pending = self._pending
        if pending[0].isspace():
            return pending[: len(pending) - len(pending.lstrip())]
        if pending.startswith(TAG):
            return TAG
        if TAG.startswith(pending):
            return None
        takes_separator = self._after_call and not self._opening.strip()
        return SEPARATOR if takes_separator and pending.startswith(SEPARATOR) else ""

    def _give_up_opening(self, events: list[ToolEvent]) -> None:
        opening, self._opening = self._opening, ""
        self._may_open = False
        self._say(opening.lstrip() if self._after_call else opening, events)
        self._after_call = False

    def _read_text(self, events: list[ToolEvent]) -> bool:
        at = self._pending.find(TAG)
        if at < 0:
            text, self._pending = split_possible(self._pending, [TAG])
            self._say(text, events)
            return False
        text = self._pending[:at].rstrip()
        self._opening = self._pending[len(text) : at + len(TAG)]
        self._pending = self._pending[at + len(TAG) :]
        self._may_open = True
        self._say(text, events)
        return True

    def _say(self, text: str, events: list[ToolEvent]) -> None:
        if text:
            events.append(Text(text))
