"""The limits that every request is held to."""

from dataclasses import replace

import pytest

from router.errors import ErrorCode, RequestError
from router.generation_request import (
    MAX_CACHE_SALT_CHARS,
    MAX_STOP_CHARS,
    check_cache_salt,
    check_prompt,
    check_stop,
)
from router.grammar import MAX_REGEX_CHARS, MAX_SCHEMA_CHARS, Grammar, JsonObject, JsonSchema, Regex
from router.sampling_options import Limits, SamplingDraft, check_sampling

LIMITS = Limits(vocab_size=100, max_model_len=50)


def refused_field(draft: SamplingDraft) -> str | None:
    with pytest.raises(RequestError) as caught:
        check_sampling(draft, 10, LIMITS)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    return caught.value.field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.001),
        ("temperature", 2.001),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.001),
        ("top_p", float("nan")),
        ("top_k", -1),
        ("top_k", 2**31),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", float("nan")),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 41),
        ("max_tokens", 10**30),
        ("min_tokens", -1),
        ("min_tokens", 41),
        ("stop_token_ids", (100,)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (1,) * 129),
        ("presence_penalty", -2.001),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", 2.001),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 2.001),
        ("repetition_penalty", float("nan")),
        ("logit_bias", {100: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: 100.1}),
        ("logit_bias", {1: float("nan")}),
        ("n", 0),
        ("n", 17),
        ("n", 10**400),
        ("logprobs", -1),
        ("logprobs", 21),
        ("prompt_logprobs", 21),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field: str, value: object) -> None:
    assert refused_field(replace(SamplingDraft(), **{field: value})) == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.0),
        ("temperature", 2.0),
        ("top_p", 1.0),
        ("top_k", 0),
        ("min_p", 0.0),
        ("min_p", 1.0),
        ("seed", 0),
        ("seed", 2**64 - 1),
        ("max_tokens", 1),
        ("max_tokens", 40),
        ("min_tokens", 40),
        ("stop_token_ids", (0, 99)),
        ("presence_penalty", -2.0),
        ("frequency_penalty", 2.0),
        ("repetition_penalty", 2.0),
        ("logit_bias", {0: -100.0, 99: 100.0}),
        ("n", 1),
        ("n", 16),
        ("logprobs", 0),
        ("logprobs", 20),
        ("prompt_logprobs", 20),
    ],
)
def test_a_value_at_its_limit_is_taken(field: str, value: object) -> None:
    options = check_sampling(replace(SamplingDraft(), **{field: value}), 10, LIMITS)
    assert getattr(options, field) == value


def test_a_negative_seed_is_the_same_bits_without_a_sign() -> None:
    assert check_sampling(SamplingDraft(seed=-1), 10, LIMITS).seed == 2**64 - 1


def test_max_tokens_is_by_default_what_the_context_leaves() -> None:
    assert check_sampling(SamplingDraft(), 10, LIMITS).max_tokens == 40


@pytest.mark.parametrize("length", [1, 48, 49])
def test_a_prompt_that_leaves_room_for_a_token_is_taken(length: int) -> None:
    assert check_prompt("prompt", [1] * length, LIMITS) == (1,) * length


@pytest.mark.parametrize("token_ids", [[], [1] * 50, [1] * 51, [100], [-1]])
def test_a_prompt_that_cannot_run_is_refused(token_ids: list[int]) -> None:
    with pytest.raises(RequestError) as caught:
        check_prompt("messages", token_ids, LIMITS)
    assert caught.value.field == "messages"


@pytest.mark.parametrize("stop", [["x"] * 17, [""], ["ok", ""], ["x" * (MAX_STOP_CHARS + 1)]])
def test_stop_strings_over_their_limits_are_refused(stop: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        check_stop(stop)
    assert caught.value.field == "stop"


@pytest.mark.parametrize(
    "grammar",
    [
        Regex(""),
        Regex("a" * (MAX_REGEX_CHARS + 1)),
        JsonSchema(""),
        JsonSchema("{"),
        JsonSchema("[]"),
        JsonSchema('{"minimum": NaN}'),
        JsonSchema("[" * 60_000),
        JsonSchema(f'{{"title": "{"a" * MAX_SCHEMA_CHARS}"}}'),
    ],
)
def test_a_grammar_that_cannot_be_is_refused(grammar: Grammar) -> None:
    assert refused_field(SamplingDraft(grammar=grammar)) == "response_format"


@pytest.mark.parametrize("grammar", [JsonObject(), JsonSchema('{"type": "object"}'), Regex("a|b"), None])
def test_a_grammar_within_its_limits_is_taken(grammar: Grammar | None) -> None:
    assert check_sampling(SamplingDraft(grammar=grammar), 10, LIMITS).grammar == grammar


def test_too_many_biases_are_refused() -> None:
    limits = Limits(vocab_size=5000, max_model_len=50)
    with pytest.raises(RequestError) as caught:
        check_sampling(SamplingDraft(logit_bias=dict.fromkeys(range(1025), 1.0)), 10, limits)
    assert caught.value.field == "logit_bias"


def test_a_cache_salt_over_its_limit_is_refused() -> None:
    assert check_cache_salt("x" * MAX_CACHE_SALT_CHARS)
    with pytest.raises(RequestError) as caught:
        check_cache_salt("x" * (MAX_CACHE_SALT_CHARS + 1))
    assert caught.value.field == "cache_salt"
