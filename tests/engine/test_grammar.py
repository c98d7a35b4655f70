"""Grammars over the tiny model's tokens: what is drawn at random is always in them."""

import json
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from engine.grammar import (
    CompiledGrammar,
    GrammarCompiler,
    GrammarForm,
    GrammarMatcher,
    GrammarText,
    keep_allowed,
)
from engine.request import InvalidRequest
from tests.tiny_models import IM_END, IM_START, VOCAB_SIZE

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
}
DATE = r"(19|20)\d\d-[01]\d-[0-3]\d"


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_model / "tokenizer.json"))


@pytest.fixture(scope="module")
def eos(tokenizer) -> int:
    return tokenizer.token_to_id(IM_END)


@pytest.fixture(scope="module")
def compiler(tiny_model, eos) -> GrammarCompiler:
    return GrammarCompiler(tiny_model, VOCAB_SIZE, frozenset({eos}))


def bits(words: np.ndarray) -> set[int]:
    flags = np.unpackbits(words.view(np.uint8), bitorder="little")
    return set(flags.nonzero()[0].tolist())


def walk(grammar: CompiledGrammar, eos: int, seed: int, banned: frozenset[int] = frozenset()) -> list[int]:
    """Random allowed tokens up to the end-of-sequence token, without it; shorter ones are likelier later."""
    matcher, generator, tokens = GrammarMatcher(grammar), np.random.default_rng(seed), []
    while True:
        allowed = sorted(bits(matcher.allowed(banned)))
        token = eos if eos in allowed and len(tokens) > 60 else int(generator.choice(allowed))
        if token == eos:
            return tokens
        tokens.append(token)
        matcher.advance(token)
        assert matcher.fits


def schema_of(form: GrammarForm, content: object) -> GrammarText:
    return GrammarText(form, json.dumps(content))


@pytest.mark.parametrize("seed", range(30))
def test_random_tokens_under_a_regex_match_it(compiler, tokenizer, eos, seed):
    grammar = compiler.compile(GrammarText(GrammarForm.REGEX, DATE))
    assert re.fullmatch(DATE, tokenizer.decode(walk(grammar, eos, seed)))


STRINGS = {
    "type": "object",
    "properties": {
        "bounded": {"type": "string", "minLength": 2, "maxLength": 30},
        "any": {"type": "string", "pattern": "^.{20}$"},
        "not": {"type": "string", "pattern": "^[^a]{5,10}$"},
        **{form: {"type": "string", "format": form} for form in ("date", "time", "uuid", "ipv4", "email")},
    },
    "required": ["bounded", "any", "not", "date", "time", "uuid", "ipv4", "email"],
}


@pytest.mark.parametrize("schema", [SCHEMA, STRINGS], ids=["person", "strings"])
@pytest.mark.parametrize("seed", range(10))
def test_random_tokens_under_a_schema_are_valid_when_they_end(compiler, tokenizer, eos, schema, seed):
    """No control character, quote or backslash gets into a string as it stands."""
    grammar = compiler.compile(schema_of(GrammarForm.JSON_SCHEMA, schema))
    texts = [tokenizer.decode([token]) for token in range(VOCAB_SIZE)]
    # Neither pages of whitespace nor bytes that random choice would join to no character.
    unwanted = frozenset(t for t, text in enumerate(texts) if "\ufffd" in text or not text.strip(" \n"))
    answer = json.loads(tokenizer.decode(walk(grammar, eos, seed, unwanted)))
    jsonschema.validate(answer, schema)


def allowed_after(compiler, tokenizer, grammar: GrammarText, text: str) -> set[int]:
    matcher = GrammarMatcher(compiler.compile(grammar))
    for token in tokenizer.encode(text).ids:
        matcher.advance(token)
    assert matcher.fits
    return bits(matcher.allowed(frozenset()))


@pytest.mark.parametrize(
    ("text", "is_complete"),
    [
        ("", False),
        ("{", False),
        ('{"a"', False),
        ('{"a": [1, {"b": null}]', False),
        ("{}", True),
        ('{"a": [1.5e3]}', True),
    ],
)
def test_the_end_is_allowed_exactly_when_the_object_is_complete(compiler, tokenizer, eos, text, is_complete):
    allowed = allowed_after(compiler, tokenizer, GrammarText(GrammarForm.JSON_OBJECT), text)
    assert (eos in allowed) == is_complete
    assert allowed - {eos} == set() or not is_complete


def test_an_object_is_not_any_json(compiler, tokenizer):
    allowed = allowed_after(compiler, tokenizer, GrammarText(GrammarForm.JSON_OBJECT), "")
    assert all(tokenizer.decode([token]).lstrip()[:1] in ("", "{") for token in allowed)


def test_special_tokens_are_no_text(compiler, tokenizer, eos):
    """A string may hold any letters; that a special token's name has letters does not make it text."""
    specials = {tokenizer.token_to_id(IM_START), eos}
    allowed = allowed_after(compiler, tokenizer, GrammarText(GrammarForm.JSON_OBJECT), '{"')
    assert len(allowed) > 100
    assert not specials & allowed


def test_banned_tokens_are_dropped_unless_nothing_else_may_come(compiler, eos):
    matcher = GrammarMatcher(compiler.compile(GrammarText(GrammarForm.REGEX, "[ab]?")))
    everything = bits(matcher.allowed(frozenset()))
    assert bits(matcher.allowed(frozenset({eos}))) == everything - {eos}
    matcher.advance(min(everything - {eos}))
    assert bits(matcher.allowed(frozenset({eos}))) == {eos}


def test_after_a_token_that_does_not_fit_the_text_may_only_end(compiler, tokenizer, eos):
    matcher = GrammarMatcher(compiler.compile(GrammarText(GrammarForm.REGEX, "a+")))
    matcher.advance(tokenizer.token_to_id("x"))
    assert not matcher.fits
    assert bits(matcher.allowed(frozenset())) == {eos}
    matcher.advance(eos)
    matcher.advance(eos)
    assert bits(matcher.allowed(frozenset())) == {eos}


@pytest.mark.parametrize(
    ("grammar", "named"),
    [
        (GrammarText(GrammarForm.REGEX, "("), "regex: .*parenthesis"),
        (GrammarText(GrammarForm.REGEX, "a{3,1}"), "regex: .*bound"),
        (GrammarText(GrammarForm.REGEX, "(?=a)b"), "regex: .*Lookahead"),
        (GrammarText(GrammarForm.REGEX, "(" * 50_000), "characters|regex"),
        (GrammarText(GrammarForm.REGEX, "(" * 5_000 + "a" + ")" * 5_000), "regex"),
        (GrammarText(GrammarForm.REGEX, "a" * 100_000), "at most 65536 characters"),
        (GrammarText(GrammarForm.REGEX, "a\x00"), "regex: .*null"),
        (GrammarText(GrammarForm.JSON_SCHEMA, "{"), "json_schema: .*JSON"),
        (GrammarText(GrammarForm.JSON_SCHEMA, '{"type": "nope"}'), "json_schema: .*nope"),
        (
            GrammarText(GrammarForm.JSON_SCHEMA, '{"type": "string", "pattern": "("}'),
            "json_schema: .*parenthesis",
        ),
        (GrammarText(GrammarForm.JSON_SCHEMA, '{"$ref": "#/nothing"}'), "json_schema: .*nothing"),
        (GrammarText(GrammarForm.JSON_SCHEMA, "false"), "json_schema"),
        (GrammarText(GrammarForm.JSON_SCHEMA, '{"not": {}}'), "json_schema: .*not"),
    ],
)
def test_what_is_no_grammar_is_refused_with_the_field_and_the_reason(compiler, grammar, named):
    with pytest.raises(InvalidRequest, match=f"^response_format: {named}"):
        compiler.compile(grammar)


def test_a_model_without_an_end_takes_no_grammar(tiny_model):
    with pytest.raises(InvalidRequest, match="response_format"):
        GrammarCompiler(tiny_model, VOCAB_SIZE, frozenset()).compile(GrammarText(GrammarForm.JSON_OBJECT))


@pytest.mark.parametrize("vocab", [VOCAB_SIZE, VOCAB_SIZE + 13])
def test_only_the_rows_of_grammars_lose_tokens(tiny_model, eos, vocab):
    """Also when the model's logits are wider than its vocabulary, and no multiple of a word."""
    grammar = GrammarCompiler(tiny_model, vocab, frozenset({eos})).compile(
        GrammarText(GrammarForm.REGEX, "[ab]")
    )
    allowed = GrammarMatcher(grammar).allowed(frozenset())
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(0))
    kept = logits.clone()
    keep_allowed(kept, [1], [allowed])
    assert torch.equal(kept[[0, 2]], logits[[0, 2]])
    assert set((kept[1] > -torch.inf).nonzero().flatten().tolist()) == bits(allowed)
    assert len(bits(allowed)) == 2
