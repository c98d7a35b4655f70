"""Tokens to text: incremental detokenizing and stop strings against decoding all at once."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from router.detokenizer import REPLACEMENT, Detokenizer
from router.stop_strings import StopStrings
from router.text_stream import TextStream
from router.tokenizer import Tokenizer
from tests.tiny_models import VOCAB_SIZE


@pytest.fixture(scope="module")
def byte_level(tiny_model: Path) -> Tokenizer:
    return Tokenizer.load(tiny_model)


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """As Llama 2 has it: words with a leading space, bytes for what has no word."""
    words = ["<unk>", "\u2581a", "\u2581\u00e9t\u00e9", "b", "\u2581"]
    vocabulary = {token: id_ for id_, token in enumerate(words)}
    vocabulary |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    return Tokenizer(backend, {}, None)


def pieces(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.finish()]


@given(token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=60))
def test_pieces_of_any_tokens_are_the_text_decoded_at_once(
    byte_level: Tokenizer, token_ids: list[int]
) -> None:
    assert "".join(pieces(byte_level, token_ids)) == byte_level.decode(token_ids)


@given(token_ids=st.lists(st.integers(0, 261), max_size=40))
def test_pieces_of_byte_fallback_tokens_are_the_text_decoded_at_once(
    byte_fallback: Tokenizer, token_ids: list[int]
) -> None:
    assert "".join(pieces(byte_fallback, token_ids)) == byte_fallback.decode(token_ids)


@given(text=st.text(max_size=30))
def test_no_piece_of_a_text_ends_inside_a_character(byte_level: Tokenizer, text: str) -> None:
    ids = byte_level._backend.encode(text.replace(REPLACEMENT, "")).ids
    assert not any(REPLACEMENT in piece for piece in pieces(byte_level, ids))


def test_a_long_run_of_bad_bytes_is_not_held_back(byte_level: Tokenizer) -> None:
    bad = byte_level._backend.token_to_id("\u0122")  # the byte 0x80
    written = pieces(byte_level, [bad] * 100)
    assert all(written[1:]) and "".join(written) == REPLACEMENT * 100


def test_special_tokens_have_no_text(byte_level: Tokenizer, tiny_model: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    ids = backend.encode("the<|im_end|> end").ids
    assert "".join(pieces(byte_level, ids)) == "the end"


def test_a_character_whose_last_bytes_never_come_is_replaced_at_the_end(byte_level: Tokenizer) -> None:
    ids = byte_level._backend.encode("a\N{GRINNING FACE}").ids
    assert pieces(byte_level, ids[:-1])[-1] == REPLACEMENT


def cut(text: str, cuts: Sequence[int]) -> list[str]:
    bounds = [0, *sorted(min(at, len(text)) for at in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(bounds)]


def until_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The reference: before the match that ends first, the longest of those."""
    ends = [(end, -len(stop)) for end in range(len(text) + 1) for stop in stops if text[:end].endswith(stop)]
    if not ends:
        return text, False
    end, length = min(ends)
    return text[: end + length], True


few_letters = st.text(alphabet="ab\u00e9", max_size=20)


@given(
    text=few_letters,
    stops=st.lists(st.text(alphabet="ab\u00e9", min_size=1, max_size=5), max_size=3),
    cuts=st.lists(st.integers(0, 20), max_size=20),
)
def test_a_stop_string_ends_the_text_wherever_the_pieces_are_cut(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    watch = StopStrings(stops)
    written = ""
    stopped = False
    for piece in cut(text, cuts):
        passed = watch.push(piece)
        written += passed.text
        if passed.stopped:
            stopped = True
            break
    if not stopped:
        written += watch.finish()
    assert (written, stopped) == until_stop(text, stops)


@given(text=few_letters, stop=st.text(alphabet="ab\u00e9", min_size=1, max_size=5))
def test_nothing_but_a_possible_beginning_is_held_back(text: str, stop: str) -> None:
    watch = StopStrings([stop])
    written = "".join(passed.text for passed in map(watch.push, text.partition(stop)[0]))
    held = watch.finish()
    assert stop.startswith(held) and written + held == text.partition(stop)[0]


@given(
    token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30),
    stop=st.text(alphabet="the ", min_size=1, max_size=3),
)
def test_the_text_ends_before_the_stop_string_and_the_token_that_completes_it_is_the_last(
    byte_level: Tokenizer, token_ids: list[int], stop: str
) -> None:
    stream = TextStream(byte_level, [stop])
    written = stream.push(token_ids)
    whole = byte_level.decode(token_ids)
    text = written.text if written.stopped else written.text + stream.finish().text
    assert text == whole.partition(stop)[0]
    if stop in whole:
        shortest = next(n for n in range(len(token_ids) + 1) if stop in byte_level.decode(token_ids[:n]))
        assert written.stopped and written.num_tokens == shortest
    else:
        assert written.num_tokens == len(token_ids)
