"""Ends a text before the first of some strings."""

from collections.abc import Sequence
from typing import NamedTuple


class Passed(NamedTuple):
    """What may go to the client, and whether the text ends with it."""

    text: str
    stopped: bool


class StopStrings:
    """Watches a text in pieces for the stop string that is complete first (the longest of those).

    What could be the beginning of a stop string is held back. Nothing of the string leaks and
    nothing before it is lost, however the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> Passed:
        """Takes the text's next piece. After `stopped` nothing may be pushed."""
        if not self._stops:
            return Passed(text, stopped=False)
        self._held += text
        start = self._first_match()
        if start is not None:
            return Passed(self._held[:start], stopped=True)
        keep = self._possible_prefix_chars()
        passed = self._held[: len(self._held) - keep]
        self._held = self._held[len(passed) :]
        return Passed(passed, stopped=False)

    def finish(self) -> str:
        """What was held back of a text that ended by itself."""
        text, self._held = self._held, ""
        return text

    def _first_match(self) -> int | None:
        """Where the stop string that ends first starts."""
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _possible_prefix_chars(self) -> int:
        """Characters at the end that could begin a stop string."""
        longest = 0
        for stop in self._stops:
            for chars in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:chars]):
                    longest = chars
                    break
        return longest
