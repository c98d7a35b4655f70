"""Which tokens a client sees whose answer has their text: those whose text is out."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from router.completion import Piece, SampleEnd, Token
from router.detokenizer import text_starts
from router.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PlacedToken:
    """`start`: where its text begins in the answer's text, in characters."""

    token: Token
    start: int


class ShownTokens:
    """The tokens of one sample, let through with their text: what may become a stop string shows nowhere."""

    def __init__(self, first_char: int) -> None:
        """`first_char`: of the sample's text in the answer's text."""
        self._first_char = first_char
        self._num_chars = 0
        self._waiting: deque[PlacedToken] = deque()

    def push(self, piece: Piece) -> list[PlacedToken]:
        """The tokens that begin in the text so far."""
        places = zip(piece.tokens, piece.starts, strict=True)
        self._waiting.extend(PlacedToken(token, self._first_char + start) for token, start in places)
        self._num_chars += len(piece.text)
        return self._begun()

    def finish(self, end: SampleEnd) -> list[PlacedToken]:
        """The rest, but for the tokens of a stop string."""
        self._num_chars += len(end.text)
        return self._begun() if end.at_stop_string else list(self._waiting)

    def _begun(self) -> list[PlacedToken]:
        end = self._first_char + self._num_chars
        begun: list[PlacedToken] = []
        while self._waiting and self._waiting[0].start < end:
            begun.append(self._waiting.popleft())
        return begun


def placed_prompt(tokenizer: Tokenizer, tokens: Sequence[Token], text: str) -> tuple[PlacedToken, ...]:
    """The tokens of a prompt in its text."""
    starts = text_starts(tokenizer, [token.id for token in tokens], text)
    return tuple(PlacedToken(token, start) for token, start in zip(tokens, starts, strict=True))
