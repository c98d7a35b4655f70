"""The text of one sample: detokenized, and ended at a stop string."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from router.detokenizer import Detokenizer
from router.stop_strings import StopStrings
from router.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Written:
    """What some tokens gave.

    Attributes:
        num_tokens: how many of them count: those after the one that completed a stop string do not.
        stopped: a stop string was found; the text ends here.
    """

    text: str
    num_tokens: int
    stopped: bool


class TextStream:
    """Tokens in, text out, for one sample."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], markup: Sequence[str] = ()) -> None:
        """
        Args:
            markup: special tokens that are text here.
        """
        self._detokenizer = Detokenizer(tokenizer, tokenizer.special_ids_of(markup))
        self._stop_strings = StopStrings(stop)

    def push(self, token_ids: Iterable[int]) -> Written:
        texts: list[str] = []
        num_tokens = 0
        for token_id in token_ids:
            num_tokens += 1
            passed = self._stop_strings.push(self._detokenizer.push(token_id))
            texts.append(passed.text)
            if passed.stopped:
                return Written("".join(texts), num_tokens, stopped=True)
        return Written("".join(texts), num_tokens, stopped=False)

    def finish(self) -> Written:
        """The rest of the text, whose last tokens may still complete a stop string."""
        passed = self._stop_strings.push(self._detokenizer.finish())
        if passed.stopped:
            return Written(passed.text, 0, stopped=True)
        return Written(passed.text + self._stop_strings.finish(), 0, stopped=False)
