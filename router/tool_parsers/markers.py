"""Markers in a text that comes in pieces."""

from collections.abc import Sequence


def first_marker(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Where the first of the markers starts, and which it is."""
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    return min(found) if found else None


def held_chars(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end could begin a marker."""
    return max((_held_of_one(text, marker) for marker in markers), default=0)


def _held_of_one(text: str, marker: str) -> int:
    longest = min(len(marker) - 1, len(text))
    return next((chars for chars in range(longest, 0, -1) if text.endswith(marker[:chars])), 0)


def split_possible(text: str, markers: Sequence[str]) -> tuple[str, str]:
    """What no marker can follow or claim, and the rest: whitespace before a possible marker, and it."""
    certain = text[: len(text) - held_chars(text, markers)].rstrip()
    return certain, text[len(certain) :]
