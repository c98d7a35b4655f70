"""What a router knows of a worker's load beyond the worker's last report: its own submissions since then."""

from collections.abc import KeysView
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Sent:
    """One submission. `prompt_tokens`: that the worker is to compute."""

    prompt_tokens: int
    blocks: int


class SentLoad:
    """Corrects a report by what was submitted, and what was computed, since it was made.

    A report is taken to know of all that was submitted before it came. Each number is of one attempt.
    """

    def __init__(self) -> None:
        # Whose prompts are not computed.
        self._uncomputed: dict[int, _Sent] = {}
        # Submitted since the last report, and not over.
        self._unreported: dict[int, _Sent] = {}
        self._computed_tokens = 0

    def submitted(self, number: int, prompt_tokens: int, blocks: int) -> None:
        sent = _Sent(prompt_tokens, blocks)
        self._uncomputed[number] = self._unreported[number] = sent

    @property
    def uncomputed(self) -> KeysView[int]:
        """The attempts that have no token."""
        return self._uncomputed.keys()

    def computed(self, number: int) -> None:
        """The attempt has a token. Changes nothing if it is not the first."""
        sent = self._uncomputed.pop(number, None)
        if sent is not None and number not in self._unreported:
            self._computed_tokens += sent.prompt_tokens

    def ended(self, number: int) -> None:
        """The attempt is over. May be called again."""
        self.computed(number)
        self._unreported.pop(number, None)

    def reported(self) -> None:
        """The worker has told its load."""
        self._unreported.clear()
        self._computed_tokens = 0

    @property
    def num_sequences(self) -> int:
        """That the report lacks."""
        return len(self._unreported)

    @property
    def blocks(self) -> int:
        """That the report takes for free."""
        return sum(sent.blocks for sent in self._unreported.values())

    def waiting_prompt_tokens(self, reported: int) -> int:
        """Of the whole worker, where its report says `reported`."""
        new = sum(
            sent.prompt_tokens for number, sent in self._unreported.items() if number in self._uncomputed
        )
        return max(0, reported - self._computed_tokens) + new
