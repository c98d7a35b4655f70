"""An answer of at most one call."""

from collections.abc import Iterable

from router.tool_parsers.events import Text, ToolEvent, ToolParser


class FirstCallOnly:
    """Another parser's events without its second call and all further ones."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser

    def push(self, text: str) -> list[ToolEvent]:
        return self._kept(self._parser.push(text))

    def finish(self) -> list[ToolEvent]:
        return self._kept(self._parser.finish())

    def _kept(self, events: Iterable[ToolEvent]) -> list[ToolEvent]:
        return [event for event in events if isinstance(event, Text) or event.index == 0]
