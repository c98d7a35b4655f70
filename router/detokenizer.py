"""Generated tokens to text, token by token."""

from collections.abc import Sequence

from router.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """The text of one sample as its tokens arrive.

    The pieces never end inside a character, and all of them with `finish` are what decoding all the
    tokens at once gives. Special tokens that are not `shown` are left out.

    Only a window of the last tokens is decoded: `_context` tokens whose text is out already, since a
    token's text can depend on what stands before it (a leading space), then `_held` tokens whose text
    is not final. A text that ends in U+FFFD may be a character's first bytes. A run of byte-fallback
    tokens is final when it ends, because one bad byte turns the whole run into U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, shown: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._shown = shown
        self._context: list[int] = []
        self._context_text = ""
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that this token makes final."""
        if token_id in self._tokenizer.special_ids and token_id not in self._shown:
            return ""
        self._held.append(token_id)
        if token_id in self._tokenizer.byte_fallback_ids:
            return ""
        window_text = self._decode(self._context + self._held)
        if window_text.endswith(REPLACEMENT):
            return self._release_before_last(window_text)
        return self._release(window_text)

    def finish(self) -> str:
        """The text that was held back. A character whose last bytes never came is U+FFFD in it."""
        if not self._held:
            return ""
        return self._release(self._decode(self._context + self._held))

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, self._shown)

    def _release(self, window_text: str) -> str:
        text = window_text[len(self._context_text) :]
        if text:
            self._context, self._held = self._held, []
            self._context_text = self._decode(self._context)
        return text

    def _release_before_last(self, window_text: str) -> str:
        """Keeps a long run of bad bytes short: the text splits before a token when its parts decode to
        the whole, for then no character reaches over the split.
        """
        before, last = self._held[:-1], self._held[-1:]
        if not before:
            return ""
        before_text = self._decode(self._context + before)
        last_text = self._decode(last)
        if before_text + last_text != window_text or len(before_text) <= len(self._context_text):
            return ""
        text = before_text[len(self._context_text) :]
        self._context, self._context_text = [], ""
        self._held = last
        return text


def text_starts(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> tuple[int, ...]:
    """Where each token of a prompt begins in its text, which may name special tokens or leave them out.

    Exact where decoding gives `text` back (a normalizer can change it); never beyond its end.
    """
    detokenizer = Detokenizer(tokenizer)
    starts: list[int] = []
    at = 0
    for token_id in token_ids:
        starts.append(min(at, len(text)))
        if token_id not in tokenizer.special_ids:
            at += len(detokenizer.push(token_id))
            continue
        at += len(detokenizer.finish())
        name = tokenizer.token_text(token_id)
        at += len(name) if text.startswith(name, at) else 0
    return tuple(starts)
