"""Any body at the HTTP door: a clear 4xx, or a request that finds no worker; never a 500."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.errors import RequestError
from router.generation_request import TextPrompt
from router.grammar import JsonObject, JsonSchema, Regex
from router.openai_schema import ChatRequest, CompletionRequest, read_chat, read_completion
from router.strict_body import StrictBody
from router.token_schema import DetokenizeRequest, TokenizeRequest
from tests.unit.lonely_door import lonely_door

CHAT = {"messages": [{"role": "user", "content": "What?"}]}
TEXT = {"prompt": "a"}
ANSWERED_ALONE = ["/tokenize", "/detokenize", "/explain"]
PATHS = ["/v1/chat/completions", "/v1/completions", *ANSWERED_ALONE]


@pytest.fixture
async def door(tiny_model: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with lonely_door(tiny_model) as client:
        yield client


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 40)
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["text", "json_object", "json_schema", "function", "auto", "required", "user"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "json_schema", "schema", "name", "json", "regex", "function", "role", "content", "1"]
            )
            | st.text(max_size=4),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


TOKEN_IDS = st.integers(-1, 384)


def bodies(kind: type[StrictBody], base: dict) -> st.SearchStrategy[dict]:
    """Sound requests with some fields of the schema set to anything."""
    names = [info.alias or name for name, info in kind.model_fields.items()]
    wrong = st.dictionaries(st.sampled_from(names), JSON, max_size=4)
    return wrong.map(lambda fields: {**base, **fields})


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=bodies(ChatRequest, CHAT))
async def test_any_chat_is_refused_clearly_or_finds_no_worker(door: httpx.AsyncClient, body: dict) -> None:
    await check_answer(door, "/v1/chat/completions", body)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=bodies(CompletionRequest, TEXT) | bodies(CompletionRequest, {"prompt": ["a", "b"]}))
async def test_any_completion_is_refused_clearly_or_finds_no_worker(
    door: httpx.AsyncClient, body: dict
) -> None:
    await check_answer(door, "/v1/completions", body)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=bodies(TokenizeRequest, {}) | bodies(TokenizeRequest, TEXT) | bodies(TokenizeRequest, CHAT))
async def test_any_tokenize_is_refused_clearly_or_answered(door: httpx.AsyncClient, body: dict) -> None:
    await check_answer(door, "/tokenize", body)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    body=bodies(DetokenizeRequest, {"tokens": [1]}) | st.builds(dict, tokens=st.lists(st.integers(-1, 384)))
)
async def test_any_detokenize_is_refused_clearly_or_answered(door: httpx.AsyncClient, body: dict) -> None:
    await check_answer(door, "/detokenize", body)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """The text of a sound request, or of any, cut or with some bytes replaced."""
    text = json.dumps(draw(st.sampled_from([CHAT, TEXT, {"tokens": [1, 2]}]) | JSON)).encode()
    start = draw(st.integers(0, len(text)))
    end = draw(st.integers(start, len(text)))
    return text[:start] + draw(st.binary(max_size=6)) + text[end:]


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(PATHS), text=damaged())
async def test_a_damaged_body_is_refused_clearly_or_still_a_request(
    door: httpx.AsyncClient, path: str, text: bytes
) -> None:
    await check_text(door, path, text)


async def check_answer(door: httpx.AsyncClient, path: str, body: dict) -> None:
    await check_text(door, path, json.dumps(body).encode())


async def check_text(door: httpx.AsyncClient, path: str, text: bytes) -> None:
    answer = await door.post(path, content=text)
    if answer.status_code == 200:
        assert path in ANSWERED_ALONE
        return
    assert answer.status_code in (400, 404, 503), answer.text
    error = answer.json()["error"]
    assert error["message"]
    if answer.status_code == 400 and error["param"] is not None:
        assert error["message"].startswith(f"{error['param']}: ")


@pytest.mark.parametrize("number", ["1" * 400, "1" * 4000, "1" * 5000, "1e400", "-1e400", "NaN", "Infinity"])
@pytest.mark.parametrize("field", ["n", "seed", "max_tokens", "temperature", "logprobs", "min_p", "best_of"])
async def test_numbers_beyond_all_bounds_are_refused(
    door: httpx.AsyncClient, field: str, number: str
) -> None:
    answer = await door.post("/v1/completions", content=f'{{"prompt": "a", "{field}": {number}}}')
    assert answer.status_code == 400


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        ("chat/completions", {"echo": True}, "echo"),
        ("chat/completions", {"suffix": "x"}, "suffix"),
        ("chat/completions", {"best_of": 2, "n": 2}, "best_of"),
        ("chat/completions", {"functions": [{}]}, "functions"),
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", {"add_special_tokens": True}, "add_special_tokens"),
        ("chat/completions", {"add_generation_prompt": False}, "add_generation_prompt"),
        ("chat/completions", {"continue_final_message": True}, "continue_final_message"),
        ("chat/completions", {"chat_template": "{{ 1 }}"}, "chat_template"),
        ("chat/completions", {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ("chat/completions", {"top_logprobs": 0, "logprobs": False}, "top_logprobs"),
        ("chat/completions", {"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ("chat/completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("chat/completions", {"response_format": {"type": "json_schema"}}, "response_format"),
        (
            "chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format",
        ),
        (
            "chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format",
        ),
        (
            "chat/completions",
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
        ),
        ("completions", {"structured_outputs": {}}, "structured_outputs"),
        ("completions", {"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ("completions", {"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        ("completions", {"structured_outputs": {"regex": ""}}, "structured_outputs"),
        ("completions", {"structured_outputs": {"json": "{"}}, "structured_outputs"),
        ("completions", {"guided_regex": "a"}, "guided_regex"),
        ("completions", {"use_beam_search": True}, "use_beam_search"),
        ("completions", {"best_of": 2}, "best_of"),
        ("completions", {"best_of": 2, "n": 2, "stream": True}, "best_of"),
        ("completions", {"suffix": "x"}, "suffix"),
        ("completions", {"logprobs": 21}, "logprobs"),
        ("completions", {"logprobs": True}, "logprobs"),
        ("completions", {"logit_bias": {"-1": 1}}, "logit_bias"),
        ("completions", {"logit_bias": {"\u0661": 1}}, "logit_bias"),
        ("completions", {"logit_bias": {"384": 1}}, "logit_bias"),
        ("completions", {"logit_bias": {"1": 101}}, "logit_bias"),
        ("completions", {"logit_bias": {str(id_): 1 for id_ in range(2000)}}, "logit_bias"),
        ("completions", {"stop_token_ids": [1] * 3000}, "stop_token_ids"),
        ("completions", {"cache_salt": ""}, "cache_salt"),
        ("completions", {"cache_salt": "x" * 257}, "cache_salt"),
        ("completions", {"repetition_penalty": 0}, "repetition_penalty"),
        ("completions", {"min_tokens": 17}, "min_tokens"),
        ("completions", {"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
async def test_what_contradicts_itself_or_is_not_served_is_named(
    door: httpx.AsyncClient, path: str, fields: dict, field: str
) -> None:
    body = {**(CHAT if path.startswith("chat") else TEXT), **fields}
    answer = await door.post(f"/v1/{path}", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, JsonObject()),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"a": "\u00e9"}},
                }
            },
            JsonSchema('{"a":"\u00e9"}'),
        ),
        ({"structured_outputs": {"json": {"type": "object"}}}, JsonSchema('{"type":"object"}')),
        ({"structured_outputs": {"json": '{"type": "object"}'}}, JsonSchema('{"type": "object"}')),
        ({"structured_outputs": {"json_object": True}}, JsonObject()),
        ({"structured_outputs": {"regex": "a|b"}}, Regex("a|b")),
    ],
)
def test_a_grammar_can_be_asked_for_in_two_dialects(fields: dict, grammar: object) -> None:
    assert read_completion(json.dumps({**TEXT, **fields}).encode()).sampling().grammar == grammar


def test_echo_with_logprobs_wants_those_of_the_prompt_too() -> None:
    both = read_completion(json.dumps({**TEXT, "echo": True, "logprobs": 2}).encode()).sampling()
    assert (both.logprobs, both.prompt_logprobs) == (2, 2)
    plain = read_completion(json.dumps({**TEXT, "echo": True}).encode()).sampling()
    assert (plain.logprobs, plain.prompt_logprobs) == (None, None)


def test_a_chats_logprobs_are_a_switch_and_a_number() -> None:
    def asked(**fields: object) -> int | None:
        return read_chat(json.dumps({**CHAT, **fields}).encode()).sampling().logprobs

    assert (asked(), asked(logprobs=False), asked(logprobs=True)) == (None, None, 0)
    assert asked(logprobs=True, top_logprobs=5) == 5


def test_best_of_that_equals_n_is_taken() -> None:
    assert read_completion(json.dumps({**TEXT, "best_of": 3, "n": 3}).encode()).sampling().n == 3
    with pytest.raises(RequestError):
        read_completion(json.dumps({**TEXT, "best_of": 3, "n": 2}).encode())


def test_special_tokens_are_around_every_text_unless_they_are_not_wanted() -> None:
    def prompts(**fields: object) -> tuple:
        return read_completion(json.dumps({"prompt": ["a", "b"], **fields}).encode()).prompts()

    assert prompts() == prompts(add_special_tokens=True) == (TextPrompt("a", True), TextPrompt("b", True))
    assert prompts(add_special_tokens=False) == (TextPrompt("a", False), TextPrompt("b", False))
