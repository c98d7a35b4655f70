"""Parameters of sampling through a whole engine: right at every position, wherever the tokens came from."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import jsonschema
import pytest
import torch
from tokenizers import Tokenizer
from transformers import RepetitionPenaltyLogitsProcessor

from engine.engine import Engine
from engine.grammar import CompiledGrammar, GrammarCompiler, GrammarForm, GrammarText
from engine.logprobs import TokenLogprobs
from engine.request import FinishReason, InvalidRequest, KVSource, RunUntil, SequenceId
from engine.step_result import StepResult
from tests.engine.engines import prompt_of, request, tiny_engine
from tests.engine.kv_pieces import Wire
from tests.reference import NEAR_TIE, Reference
from tests.tiny_models import IM_END, VOCAB_SIZE

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
}
DATE = r"(19|20)\d\d-[01]\d-[0-3]\d( [a-z]+)?"
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
DRAWN = {"temperature": 1.0, "seed": 11, "ignore_eos": True}


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Reference:
    return Reference(tiny_model)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_model / "tokenizer.json"))


@pytest.fixture(scope="module")
def eos(tokenizer: Tokenizer) -> int:
    token = tokenizer.token_to_id(IM_END)
    assert token is not None
    return token


@pytest.fixture(scope="module")
def compiler(tiny_model: Path, eos: int) -> GrammarCompiler:
    return GrammarCompiler(tiny_model, VOCAB_SIZE, frozenset({eos}))


@pytest.fixture(scope="module")
def date(compiler: GrammarCompiler) -> CompiledGrammar:
    return compiler.compile(GrammarText(GrammarForm.REGEX, DATE))


class Answers:
    """What an engine tells until nothing is left to compute, by (request, sample)."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.logprobs: dict[tuple[str, int], list[TokenLogprobs]] = {}
        self.prompts: dict[str, tuple[TokenLogprobs, ...]] = {}
        self.reasons: dict[tuple[str, int], FinishReason] = {}
        self.first_tokens: dict[str, tuple[int, ...]] = {}

    def run(self) -> "Answers":
        while True:
            self.engine.admit()
            launched = self.engine.launch()
            if launched is None:
                return self
            self._take(self.engine.collect(launched))
            self.engine.check_integrity()

    def _take(self, result: StepResult) -> None:
        for told in result.prompt_logprobs:
            assert told.sequence_id not in self.prompts
            self.prompts[told.sequence_id] = told.tokens
        for token in result.tokens:
            key = (token.sequence_id, token.sample)
            self.tokens.setdefault(key, []).append(token.token)
            if token.logprobs is not None:
                self.logprobs.setdefault(key, []).append(token.logprobs)
        self.reasons |= {(ended.sequence_id, ended.sample): ended.reason for ended in result.ended}
        self.first_tokens |= {held.sequence_id: held.first_tokens for held in result.held}


def alone(tiny_model: Path, prompt: Sequence[int], max_tokens: int, sampling: dict, **fields) -> list[int]:
    answers = Answers(tiny_engine(tiny_model))
    sample = fields.get("sample", 0)
    answers.engine.submit(request("a", prompt, max_tokens, sampling=sampling, **fields))
    return answers.run().tokens["a", sample]


def check_logprobs(
    told: Sequence[TokenLogprobs], tokens: Sequence[int], logits: torch.Tensor, top: int
) -> None:
    """`logits`: row i is of what tokens[i] was one of."""
    assert len(told) == len(tokens) == len(logits)
    for each, token, row in zip(told, tokens, logits.log_softmax(-1), strict=True):
        assert each.logprob == pytest.approx(row[token].item(), abs=1e-4)
        assert each.top_logprobs == pytest.approx(row.topk(top).values.tolist(), abs=1e-4)
        assert list(each.top_logprobs) == pytest.approx(row[list(each.top_token_ids)].tolist(), abs=1e-4)


@pytest.mark.parametrize("step_tokens", [1, 7, 512])
def test_logprobs_are_the_references_at_every_position(tiny_model, reference, step_tokens):
    """Conformance 9: of the raw logits, whatever else shapes the choice."""
    answers = Answers(tiny_engine(tiny_model, step_tokens=step_tokens))
    shaped = {**DRAWN, **PENALTIES, "top_k": 20, "logit_bias": ((7, 5.0),)}
    plain = {"temperature": 0.0, "ignore_eos": True}
    for name, sampling, top in (("shaped", shaped, 5), ("plain", plain, 0), ("whole", plain, VOCAB_SIZE)):
        answers.engine.submit(request(name, prompt_of(33), 12, sampling={**sampling, "logprobs": top}))
    answers.engine.submit(request("silent", prompt_of(20, seed=1), 12, sampling=plain))
    answers.run()
    for name, top in (("shaped", 5), ("plain", 0), ("whole", VOCAB_SIZE)):
        tokens = answers.tokens[name, 0]
        logits = reference.logits((*prompt_of(33), *tokens))[32:-1]
        check_logprobs(answers.logprobs[name, 0], tokens, logits, top)
    assert ("silent", 0) not in answers.logprobs


@pytest.mark.parametrize("step_tokens", [1, 2, 7, 16, 512])
def test_prompt_logprobs_are_the_references_however_it_is_chunked(tiny_model, reference, step_tokens):
    answers = Answers(tiny_engine(tiny_model, step_tokens=step_tokens))
    for length in (1, 2, 16, 17, 33):
        sampling = {"prompt_logprobs": 3, "logprobs": 1}
        answers.engine.submit(request(f"p{length}", prompt_of(length, seed=length), 3, sampling=sampling))
    answers.engine.submit(request("silent", prompt_of(20), 3))
    answers.run()
    for length in (1, 2, 16, 17, 33):
        prompt = prompt_of(length, seed=length)
        check_logprobs(answers.prompts[f"p{length}"], prompt[1:], reference.logits(prompt)[:-1], 3)
    assert "silent" not in answers.prompts


def test_prompt_logprobs_come_whole_where_the_prefix_is_cached(tiny_model):
    answers = Answers(tiny_engine(tiny_model))
    for name in ("first", "again"):
        answers.engine.submit(request(name, prompt_of(50), 2, sampling={"prompt_logprobs": 0}))
        answers.run()
    assert len(answers.prompts["again"]) == 49
    assert answers.prompts["again"] == answers.prompts["first"]


@pytest.mark.parametrize(
    "sampling", [{}, PENALTIES, {"logit_bias": ((5, 30.0), (9, -30.0))}, {**PENALTIES, "min_tokens": 8}]
)
def test_greedy_tokens_are_the_best_of_the_references_adjusted_logits(tiny_model, reference, eos, sampling):
    """Against transformers' repetition penalty and the OpenAI API's formulas, token by token."""
    prompt = prompt_of(25)
    bias = {"logit_bias": ((eos, 100.0),)} if "min_tokens" in sampling else {}
    answers = Answers(tiny_engine(tiny_model))
    answers.engine.submit(request("a", prompt, 30, sampling={**sampling, **bias}))
    tokens = answers.run().tokens["a", 0]
    logits = reference.logits((*prompt, *tokens))[24:-1]
    for place, token in enumerate(tokens):
        before = tokens[:place]
        ids = torch.LongTensor([[*prompt, *before]])
        penalty = RepetitionPenaltyLogitsProcessor(sampling.get("repetition_penalty", 1.0))
        row = penalty(ids, logits[place : place + 1].clone())[0]
        counts = torch.bincount(torch.tensor(before, dtype=torch.int64), minlength=VOCAB_SIZE)
        row -= counts * sampling.get("frequency_penalty", 0.0)
        row -= (counts > 0) * sampling.get("presence_penalty", 0.0)
        for biased, value in sampling.get("logit_bias", bias.get("logit_bias", ())):
            row[biased] += value
        if place < sampling.get("min_tokens", 0):
            row[eos] = -torch.inf
        assert row.max() - row[token] < NEAR_TIE
    assert len(tokens) == (9 if bias else 30)


@pytest.mark.parametrize("split", [0, 1, 5, 9])
@pytest.mark.parametrize("kind", ["drawn", "penalties", "grammar", "both"])
def test_a_continued_request_goes_on_with_the_same_tokens(tiny_model, date, kind, split):
    """Conformance 11 and 20: seeds, penalties and grammars follow from the tokens alone."""
    sampling = {**DRAWN, **(PENALTIES if kind in ("penalties", "both") else {})}
    grammar = {"grammar": date} if kind in ("grammar", "both") else {}
    whole = alone(tiny_model, prompt_of(20), 24, sampling, **grammar)
    generated = tuple(whole[:split])
    rest = alone(tiny_model, prompt_of(20), 24, sampling, generated=generated, **grammar)
    assert [*generated, *rest] == whole


def test_what_is_asked_of_others_in_the_step_changes_nothing(tiny_model, date):
    kinds: dict[str, dict] = {
        "plain": {"sampling": DRAWN},
        "greedy": {"sampling": {"ignore_eos": True}},
        "penalties": {"sampling": {**DRAWN, **PENALTIES}},
        "bias": {"sampling": {**DRAWN, "logit_bias": ((3, 4.0),), "logprobs": 4}},
        "grammar": {"sampling": DRAWN, "grammar": date},
        "both": {"sampling": {**DRAWN, **PENALTIES, "prompt_logprobs": 2}, "grammar": date},
    }
    together = Answers(tiny_engine(tiny_model, step_tokens=24))
    for name, fields in kinds.items():
        together.engine.submit(request(name, prompt_of(30, seed=len(name)), 16, **fields))
    together.run()
    for name, fields in kinds.items():
        assert together.tokens[name, 0] == alone(tiny_model, prompt_of(30, seed=len(name)), 16, **fields)


def test_sequences_that_gave_up_their_blocks_go_on_as_if_nothing_had_been(tiny_model, date):
    """Conformance 20."""
    answers = Answers(tiny_engine(tiny_model, kv_cache_bytes=100_000))
    fields = {"sampling": {**DRAWN, **PENALTIES, "prompt_logprobs": 1, "logprobs": 0}, "grammar": date}
    free = {**fields, "grammar": None}
    for n in range(6):
        asked = fields if n % 2 else free
        answers.engine.submit(request(f"r{n}", prompt_of(20, seed=n), 40, arrival_s=n, **asked))
    answers.run()
    assert answers.engine.load().num_preemptions > 0
    for n in range(6):
        asked = fields if n % 2 else free
        expected = alone(tiny_model, prompt_of(20, seed=n), 40, **asked)
        assert answers.tokens[f"r{n}", 0] == expected
        assert len(answers.logprobs[f"r{n}", 0]) == len(expected)
        assert len(answers.prompts[f"r{n}"]) == 19


def test_each_sample_has_penalties_and_grammar_of_its_own(tiny_model, date):
    """Conformance 10."""
    fields = {"sampling": {**DRAWN, **PENALTIES, "logprobs": 1, "prompt_logprobs": 1}, "grammar": date}
    answers = Answers(tiny_engine(tiny_model))
    several = {**fields, "sampling": {**fields["sampling"], "n": 4}}
    answers.engine.submit(request("a", prompt_of(20), 24, **several))
    answers.run()
    texts = [answers.tokens["a", sample] for sample in range(4)]
    assert texts == [alone(tiny_model, prompt_of(20), 24, sample=sample, **fields) for sample in range(4)]
    assert len(set(map(tuple, texts))) == 4
    assert [len(answers.logprobs["a", sample]) for sample in range(4)] == [len(text) for text in texts]
    assert len(answers.prompts["a"]) == 19


@pytest.mark.parametrize("step_tokens", [7, 512])
def test_through_a_hand_off_all_is_as_on_one_engine(tiny_model, reference, date, step_tokens):
    """Conformance 9: position 0 is the prefill side's, the rest the decode side's, none is missing."""
    wire = Wire()
    prefill = Answers(tiny_engine(tiny_model, wire, step_tokens=step_tokens))
    decode = Answers(tiny_engine(tiny_model))
    fields = {"sampling": {**DRAWN, **PENALTIES, "logprobs": 3, "prompt_logprobs": 2}, "grammar": date}
    prefill.engine.submit(request("a", prompt_of(40), 24, run_until=RunUntil.FIRST_TOKEN, **fields))
    decode.engine.submit(request("a", prompt_of(40), 24, kv_source=KVSource.HANDOFF, **fields))
    prefill.run()
    decode.engine.admit()
    wire.deliver(decode.engine)
    assert decode.engine.begin_decode(SequenceId("a"), prefill.first_tokens["a"]) == []
    decode.run()
    tokens = [*prefill.tokens["a", 0], *decode.tokens["a", 0]]
    assert tokens == alone(tiny_model, prompt_of(40), 24, **fields)
    logits = reference.logits((*prompt_of(40), *tokens))
    told = [*prefill.logprobs["a", 0], *decode.logprobs["a", 0]]
    check_logprobs(told, tokens, logits[39:-1], 3)
    check_logprobs(prefill.prompts["a"], prompt_of(40)[1:], logits[:39], 2)
    assert decode.prompts == {}


@pytest.fixture(scope="module")
def many(tiny_model: Path, compiler: GrammarCompiler) -> Answers:
    """Forty seeds of a schema and of a regex, at temperature 1, with and without the end ignored."""
    schema = compiler.compile(GrammarText(GrammarForm.JSON_SCHEMA, json.dumps(SCHEMA)))
    date = compiler.compile(GrammarText(GrammarForm.REGEX, DATE))
    answers = Answers(tiny_engine(tiny_model))
    for seed in range(40):
        for name, grammar in (("schema", schema), ("date", date)):
            sampling = {"temperature": 1.0, "seed": seed, "ignore_eos": seed % 2 == 0, "min_tokens": seed % 3}
            fields = {"sampling": sampling, "grammar": grammar}
            answers.engine.submit(request(f"{name} {seed}", prompt_of(9, seed=seed), 500, **fields))
    return answers.run()


@pytest.mark.parametrize("seed", range(40))
def test_what_is_drawn_under_a_schema_is_valid(many, tokenizer, seed):
    assert many.reasons[f"schema {seed}", 0] is FinishReason.STOP
    jsonschema.validate(json.loads(tokenizer.decode(many.tokens[f"schema {seed}", 0])), SCHEMA)


@pytest.mark.parametrize("seed", range(40))
def test_what_is_drawn_under_a_regex_matches_it(many, tokenizer, seed):
    assert re.fullmatch(DATE, tokenizer.decode(many.tokens[f"date {seed}", 0]))


def test_a_token_that_ends_a_grammar_is_the_models_own_end(many, eos):
    for (name, sample), reason in many.reasons.items():
        tokens = many.tokens[name, sample]
        assert (tokens[-1] == eos) == (reason is FinishReason.STOP)
        assert eos not in tokens[:-1]


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        ({"logit_bias": ((VOCAB_SIZE, 1.0),)}, "logit_bias"),
        ({"stop_token_ids": frozenset({VOCAB_SIZE})}, "stop_token_ids"),
        ({"stop_token_ids": frozenset({2**32 - 1})}, "stop_token_ids"),
    ],
)
def test_token_ids_beyond_the_vocabulary_are_refused_with_the_field(tiny_model, sampling, named):
    with pytest.raises(InvalidRequest, match=named):
        tiny_engine(tiny_model).submit(request("a", prompt_of(5), sampling=sampling))


def test_generated_tokens_that_the_grammar_forbids_are_refused(tiny_model, date):
    with pytest.raises(InvalidRequest, match="response_format"):
        tiny_engine(tiny_model).submit(request("a", prompt_of(5), generated=(300, 301), grammar=date))
