"""Which tokens are shown with a text, and how their log probabilities are written."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from router.completion import FinishReason, Piece, SampleEnd, Token, TokenLogprobs
from router.detokenizer import text_starts
from router.openai_logprobs import LEAST_LOGPROB, LogprobsWriter
from router.sample_run import SampleRun
from router.shown_tokens import PlacedToken, ShownTokens
from router.text_stream import TextStream
from router.tokenizer import Tokenizer
from tests.tiny_models import VOCAB_SIZE


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.load(tiny_model)


@pytest.fixture(scope="module")
def encode(tiny_model: Path):
    backend = tokenizers.Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    return lambda text: backend.encode(text).ids


def shown_of(
    tokenizer: Tokenizer, token_ids: Sequence[int], stop: Sequence[str] = ()
) -> tuple[str, list[int], list[int]]:
    """A sample token by token: its text, the tokens that are shown with it and where they begin.

    No token is shown before the text that it begins in.
    """
    run, shown = SampleRun(0, TextStream(tokenizer, stop)), ShownTokens(0)
    text = ""
    tokens: list[PlacedToken] = []
    for token_id in token_ids:
        piece = run.push([token_id])
        text += piece.text
        tokens += shown.push(piece)
        assert all(placed.start < len(text) for placed in tokens)
        if run.end is not None:
            break
    end = run.end or run.finish(FinishReason.LENGTH)
    tokens += shown.finish(end)
    return text + end.text, [placed.token.id for placed in tokens], [placed.start for placed in tokens]


def test_tokens_are_placed_where_their_text_begins(tokenizer: Tokenizer, encode) -> None:
    ids = encode("the north wind")
    text, shown, starts = shown_of(tokenizer, ids)
    assert (text, shown) == ("the north wind", ids)
    ends = [*starts[1:], len(text)]
    assert [text[a:b] for a, b in zip(starts, ends, strict=True)] == [
        tokenizer.token_text(id_) for id_ in ids
    ]


def test_tokens_of_a_stop_string_are_not_shown(tokenizer: Tokenizer, encode) -> None:
    ids = encode("the north wind")
    text, shown, _ = shown_of(tokenizer, ids, stop=["th wi"])
    assert text == "the nor"
    assert "".join(tokenizer.token_text(id_) for id_ in shown).startswith(text)
    assert len("".join(tokenizer.token_text(id_) for id_ in shown[:-1])) < len(text)


def test_tokens_of_what_only_began_like_a_stop_string_are_shown(tokenizer: Tokenizer, encode) -> None:
    ids = encode("the north wind")
    assert shown_of(tokenizer, ids, stop=["wind of"])[1] == ids


def test_an_end_of_sequence_token_is_shown_at_the_texts_end(tokenizer: Tokenizer, encode) -> None:
    ids = encode("the wind<|im_end|>")
    text, shown, starts = shown_of(tokenizer, ids)
    assert shown == ids and starts[-1] == len(text) == len("the wind")


@given(token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40))
def test_every_token_of_a_text_without_stop_strings_is_shown_once(
    tokenizer: Tokenizer, token_ids: list[int]
) -> None:
    text, shown, starts = shown_of(tokenizer, token_ids)
    assert shown == token_ids
    assert starts == sorted(starts) and all(start <= len(text) for start in starts)


def test_text_of_the_answer_before_the_sample_moves_its_tokens() -> None:
    shown = ShownTokens(first_char=10)
    piece = Piece(0, 0, (1, 2), (0, 3), "abc")
    assert shown.push(piece) == [PlacedToken(Token(1), 10)]
    end = SampleEnd(0, 2, "d", FinishReason.LENGTH, at_stop_string=False)
    assert shown.finish(end) == [PlacedToken(Token(2), 13)]


@pytest.mark.parametrize("text", ["the north wind", "<|im_start|>user\nWhat?<|im_end|>", "é\u4e16 a", ""])
def test_a_prompts_tokens_are_placed_in_its_text(tokenizer: Tokenizer, encode, text: str) -> None:
    ids = encode(text)
    starts = text_starts(tokenizer, ids, text)
    pieces = [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=False)]
    assert "".join(pieces) == text
    whole = [(piece, tokenizer.token_text(id_)) for piece, id_ in zip(pieces, ids, strict=True)]
    assert all(piece == alone for piece, alone in whole if "\ufffd" not in alone)


def test_a_special_token_that_the_text_does_not_name_takes_no_place(tokenizer: Tokenizer, encode) -> None:
    ids = encode("<|im_start|>the")
    assert text_starts(tokenizer, ids, "the")[:2] == (0, 0)


@pytest.mark.parametrize("text", ["the north wind", "é\u4e16\U0001f600 ~", "<|im_start|> a"])
def test_the_bytes_of_tokens_are_the_bytes_of_their_text(tokenizer: Tokenizer, encode, text: str) -> None:
    assert b"".join(tokenizer.token_bytes(id_) for id_ in encode(text)) == text.encode()


def test_byte_fallback_tokens_have_their_byte() -> None:
    vocabulary = {"<unk>": 0, "a": 1} | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    )
    assert Tokenizer(backend, {}, None).token_bytes(2 + 0xE4) == b"\xe4"


def placed(token_id: int, logprob: float, *top: tuple[int, float]) -> PlacedToken:
    return PlacedToken(Token(token_id, TokenLogprobs(logprob, top)), 0)


def test_a_chat_lists_the_likeliest_beside_the_token(tokenizer: Tokenizer, encode) -> None:
    (a, b), (c,) = encode("a b"), encode("c")
    (entry,) = LogprobsWriter(tokenizer, 1).chat([placed(a, -2.0, (b, -0.5), (c, -1.0))]).content
    assert (entry.token, entry.logprob, entry.bytes) == ("a", -2.0, [97])
    assert [(top.token, top.logprob, top.bytes) for top in entry.top_logprobs] == [(" b", -0.5, [32, 98])]


def test_a_completion_always_lists_the_token_itself(tokenizer: Tokenizer, encode) -> None:
    (a, b) = encode("a b")
    told = LogprobsWriter(tokenizer, 1).text([placed(a, -2.0, (b, -0.5)), placed(b, -0.5, (b, -0.5))])
    assert told.tokens == ["a", " b"] and told.token_logprobs == [-2.0, -0.5]
    assert told.top_logprobs == [{" b": -0.5, "a": -2.0}, {" b": -0.5}]


def test_a_prompts_first_token_has_null(tokenizer: Tokenizer, encode) -> None:
    (a,) = encode("a")
    told = LogprobsWriter(tokenizer, 1).text([PlacedToken(Token(a), 0)])
    assert told.token_logprobs == [None] and told.top_logprobs == [None]


def test_prompt_logprobs_are_told_by_token_id_with_their_ranks(tokenizer: Tokenizer, encode) -> None:
    (a, b) = encode("a b")
    told = LogprobsWriter(tokenizer, 1).prompt(
        [Token(a), Token(b, TokenLogprobs(-3.0, ((a, -0.1),))), Token(a, TokenLogprobs(-0.1, ((a, -0.1),)))]
    )
    assert told[0] is None and told[1] is not None and told[2] is not None
    assert {id_: (each.logprob, each.rank, each.decoded_token) for id_, each in told[1].items()} == {
        str(a): (-0.1, 1, "a"),
        str(b): (-3.0, None, " b"),
    }
    assert list(told[2]) == [str(a)]


@pytest.mark.parametrize("logprob", [float("-inf"), float("nan"), -1e30])
def test_json_gets_no_infinity(tokenizer: Tokenizer, logprob: float) -> None:
    (entry,) = LogprobsWriter(tokenizer, 0).chat([placed(5, logprob)]).content
    assert entry.logprob == LEAST_LOGPROB
