"""Generated tokens to text where each token stands for bytes of its own."""

import codecs

from router.tokenizer import Tokenizer


class Utf8Detokenizer:
    """The text of one sample as its tokens arrive: what `Detokenizer` gives, for byte-level tokenizers.

    Their text is the bytes of the tokens, one after the other, as UTF-8 with U+FFFD for what is none: nothing
    has to be decoded twice.
    """

    __slots__ = ("_decoder", "_hidden", "_is_inside_character", "_tokenizer", "_whole_texts")

    def __init__(self, tokenizer: Tokenizer, shown: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids - shown
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._whole_texts = tokenizer.whole_texts
        self._is_inside_character = False

    def push(self, token_id: int) -> str:
        """The text that this token makes final."""
        text = self._whole_texts.get(token_id)
        if text is None or self._is_inside_character:
            return self._push_bytes(token_id)
        return text

    def _push_bytes(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        began_inside = self._is_inside_character
        text = self._decoder.decode(self._tokenizer.known_bytes(token_id))
        self._is_inside_character = self._decoder.getstate()[0] != b""
        if not (began_inside or self._is_inside_character or token_id in self._tokenizer.special_ids):
            self._whole_texts[token_id] = text
        return text

    def finish(self) -> str:
        """The text that was held back. A character whose last bytes never came is U+FFFD in it."""
        return self._decoder.decode(b"", final=True)
