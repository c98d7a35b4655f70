"""The text of one sample: detokenized, and ended at a stop string."""

from collections.abc import Sequence
from typing import NamedTuple

from router.detokenizer import Detokenizer
from router.stop_strings import StopStrings
from router.tokenizer import Tokenizer
from router.utf8_detokenizer import Utf8Detokenizer


class Written(NamedTuple):
    """What some tokens gave.

    Attributes:
        starts: where the text of each token that counts begins in the sample's text. Tokens after the one
            that completed a stop string do not count.
        stopped: a stop string was found; the text ends here.
    """

    text: str
    starts: Sequence[int]
    stopped: bool

    @property
    def num_tokens(self) -> int:
        """How many of the tokens count."""
        return len(self.starts)


class TextStream:
    """Tokens in, text out, for one sample."""

    __slots__ = ("_detokenizer", "_num_chars", "_stop_strings")

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], markup: Sequence[str] = ()) -> None:
        """
        Args:
            markup: special tokens that are text here.
        """
        kind = Utf8Detokenizer if tokenizer.is_byte_level else Detokenizer
        self._detokenizer = kind(tokenizer, tokenizer.special_ids_of(markup))
        self._stop_strings = StopStrings(stop) if stop else None
        self._num_chars = 0

    def push(self, token_ids: Sequence[int]) -> Written:
        if len(token_ids) == 1 and self._stop_strings is None:
            # As nearly all tokens come.
            start = self._num_chars
            text = self._detokenizer.push(token_ids[0])
            self._num_chars += len(text)
            return Written(text, (start,), False)
        texts: list[str] = []
        starts: list[int] = []
        stopped = False
        for token_id in token_ids:
            starts.append(self._num_chars)
            text = self._detokenizer.push(token_id)
            self._num_chars += len(text)
            if self._stop_strings is not None:
                text, stopped = self._stop_strings.push(text)
            texts.append(text)
            if stopped:
                break
        return Written("".join(texts), starts, stopped)

    def finish(self) -> Written:
        """The rest of the text, whose last tokens may still complete a stop string."""
        text = self._detokenizer.finish()
        if self._stop_strings is None:
            return Written(text, (), stopped=False)
        passed = self._stop_strings.push(text)
        if passed.stopped:
            return Written(passed.text, (), stopped=True)
        return Written(passed.text + self._stop_strings.finish(), (), stopped=False)
