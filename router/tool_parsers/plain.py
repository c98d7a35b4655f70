"""An answer that is text and nothing else."""

from router.tool_parsers.events import Text, ToolEvent


class PlainParser:
    """Calls nothing."""

    def push(self, text: str) -> list[ToolEvent]:
        return [Text(text)] if text else []

    def finish(self) -> list[ToolEvent]:
        return []
