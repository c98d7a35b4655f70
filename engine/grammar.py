"""What a generated text must be: grammars over a model's tokens, and where a text is in one."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import xgrammar
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from engine.json_schema import check_json_schema
from engine.request import InvalidRequest

MAX_GRAMMAR_CHARACTERS = 64 << 10

_CACHE_BYTES = 64 << 20
_WORD_BITS = 32
# Characters between two parts of JSON: a weak model would go on for ever.
_MAX_WHITESPACE = 64
# A line break is whitespace between the parts of JSON, and nothing lets it into a string.
_CONTROL = re.compile(rb"[\x00-\x09\x0b-\x1f]")


class GrammarForm(Enum):
    """Of a regex, xgrammar's dialect: no look-around, no back-references; `.` is a line break too."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"


class GrammarText(NamedTuple):
    """A grammar as a client gave it. `text` is empty where the form says it all."""

    form: GrammarForm
    text: str = ""


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar over a model's tokens; any number of sequences may follow it."""

    compiled: xgrammar.CompiledGrammar
    vocab_size: int


class GrammarCompiler:
    """Compiles grammars for one model and remembers the latest ones.

    The first grammar loads the model's vocabulary. Methods may be called from any thread.

    Args:
        model_path: a Hugging Face folder with a tokenizer.json.
        vocab_size: the width of the model's logits.
        eos_token_ids: what may come when the text is complete.
    """

    def __init__(self, model_path: Path, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._model_path = model_path
        self._vocab_size = vocab_size
        self._eos = eos_token_ids

    def compile(self, grammar: GrammarText) -> CompiledGrammar:
        """Raises:
        InvalidRequest: the text is no such grammar, or one that is not supported: `response_format`.
        """
        if not self._eos:
            raise InvalidRequest("response_format: the model has no end-of-sequence token")
        if len(grammar.text) > MAX_GRAMMAR_CHARACTERS:
            raise InvalidRequest(f"response_format: at most {MAX_GRAMMAR_CHARACTERS} characters")
        if grammar.form is GrammarForm.JSON_SCHEMA:
            check_json_schema(grammar.text)
        try:
            return CompiledGrammar(self._compile(grammar), self._vocab_size)
        except RuntimeError as error:
            # The compiler's words follow the place in its source.
            reason = str(error).strip().splitlines()[0].rpartition(".cc:")[2].partition(" ")[2]
            raise InvalidRequest(f"response_format: {grammar.form.value}: {reason or error}") from error

    def _compile(self, grammar: GrammarText) -> xgrammar.CompiledGrammar:
        match grammar.form:
            case GrammarForm.JSON_OBJECT:
                return self._compile_schema('{"type": "object"}')
            case GrammarForm.JSON_SCHEMA:
                return self._compile_schema(grammar.text)
            case GrammarForm.REGEX:
                return self._of_text.compile_regex(grammar.text)

    def _compile_schema(self, schema: str) -> xgrammar.CompiledGrammar:
        return self._of_json.compile_json_schema(schema, max_whitespace_cnt=_MAX_WHITESPACE)

    @cached_property
    def _vocabulary(self) -> list[bytes]:
        """What each token writes. A special token is no text: it must not stand for its name's letters."""
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(self._model_path / "tokenizer.json"))
        read = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=self._vocab_size, stop_token_ids=sorted(self._eos)
        )
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        return [b"" if i in special else text for i, text in enumerate(read.decoded_vocab)]

    @cached_property
    def _of_text(self) -> xgrammar.GrammarCompiler:
        return self._compiler(self._vocabulary)

    @cached_property
    def _of_json(self) -> xgrammar.GrammarCompiler:
        """Strings of limited length would let raw control characters pass: here no token writes one."""
        return self._compiler([b"" if _CONTROL.search(text) else text for text in self._vocabulary])

    def _compiler(self, vocabulary: list[bytes]) -> xgrammar.GrammarCompiler:
        info = xgrammar.TokenizerInfo(
            vocabulary, vocab_size=self._vocab_size, stop_token_ids=sorted(self._eos)
        )
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=_CACHE_BYTES)


class GrammarMatcher:
    """Where one sequence's text is in its grammar: a function of the generated tokens alone."""

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._matcher = xgrammar.GrammarMatcher(grammar.compiled)
        self._vocab_size = grammar.vocab_size
        self._fits = True

    @property
    def fits(self) -> bool:
        """Whether all tokens so far were allowed."""
        return self._fits

    def advance(self, token: int) -> None:
        """A token came. After one that the grammar refuses the text may only end."""
        self._fits = self._fits and not self._matcher.is_terminated() and self._matcher.accept_token(token)

    def allowed(self, banned: frozenset[int]) -> np.ndarray:
        """The tokens that may come next, without the `banned` ones unless nothing else may.

        Returns:
            [ceil(vocab / 32)] int32, a bit for every token, the lowest first.
        """
        words = torch.zeros(1, -(-self._vocab_size // _WORD_BITS), dtype=torch.int32)
        if self._fits and not self._matcher.is_terminated():
            self._matcher.fill_next_token_bitmask(words)
        bits = words[0].numpy()
        if not bits.any():
            # A dead end: nothing could follow, not even the end.
            bits |= self._bits(self._matcher.stop_token_ids)
        kept = bits & ~self._bits(banned)
        return kept if kept.any() else bits

    def _bits(self, tokens: Iterable[int]) -> np.ndarray:
        words = np.zeros(-(-self._vocab_size // _WORD_BITS), np.uint32)
        for token in tokens:
            words[token // _WORD_BITS] |= np.uint32(1 << token % _WORD_BITS)
        return words.view(np.int32)


def keep_allowed(logits: Tensor, rows: list[int], allowed: list[np.ndarray]) -> None:
    """Drops from these rows of `logits` [num_rows, vocab] what is not `allowed`, in place."""
    flags = np.unpackbits(np.stack(allowed).view(np.uint8), axis=1, bitorder="little")
    dropped = torch.from_numpy(flags[:, : logits.shape[-1]] == 0).to(logits.device)
    for row, of_row in zip(rows, dropped, strict=True):
        logits[row].masked_fill_(of_row, -torch.inf)
