"""Tools in a request: what is refused, and the schema that a required call must fit."""

import json
from typing import Any

import pytest
import xgrammar
from xgrammar.testing import _is_grammar_accept_string

from router.errors import ErrorCode, RequestError
from router.openai_schema import ChatRequest, read_chat
from router.tool_grammar import call_schema
from router.tool_style import HERMES, LLAMA3, ToolStyle, plan_calls
from tests.tool_templates import TIME, WEATHER

USER = {"role": "user", "content": "Hi"}


def function(**fields: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": "f", **fields}}


def called(**fields: object) -> dict[str, object]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}, **fields}
    return {"role": "assistant", "tool_calls": [call]}


def read(**fields: object) -> ChatRequest:
    request = read_chat(json.dumps({"messages": [USER], **fields}).encode())
    request.chat_messages()
    request.tool_use()
    return request


@pytest.mark.parametrize(
    ("fields", "field", "place"),
    [
        ({"tools": "f"}, "tools", ""),
        ({"tools": [function(), {"type": "function"}]}, "tools", "1.function"),
        ({"tools": [{"type": "browser", "function": {"name": "f"}}]}, "tools", "0.type"),
        ({"tools": [function(name="no spaces")]}, "tools", "0.function.name"),
        ({"tools": [function(name="")]}, "tools", "0.function.name"),
        ({"tools": [function(name="f\n")]}, "tools", "0.function.name"),
        ({"tools": [function(name=1)]}, "tools", "0.function.name"),
        ({"tools": [function(parameters=[])]}, "tools", "0.function.parameters"),
        ({"tools": [function(parameters={"type": "string"})]}, "tools", "0.function.parameters.type"),
        ({"tools": [function(), function()]}, "tools", "1.function.name"),
        ({"tools": [function(name=f"f{i}") for i in range(129)]}, "tools", "at most 128"),
        ({"tools": [function()], "tool_choice": "any"}, "tool_choice", ""),
        ({"tools": [function()], "tool_choice": {"type": "function"}}, "tool_choice", ""),
        (
            {"tools": [function()], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
            "'g'",
        ),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [function()], "parallel_tool_calls": "no"}, "parallel_tool_calls", ""),
        ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages", "1.tool_call_id"),
        ({"messages": [{**called(), "role": "user"}]}, "messages", "0.tool_calls"),
        ({"messages": [called(id="")]}, "messages", "0.tool_calls.0.id"),
        ({"messages": [called(type="x")]}, "messages", "0.tool_calls.0.type"),
        ({"messages": [called(function={"name": "f"})]}, "messages", "0.tool_calls.0.function.arguments"),
        *(
            (
                {"messages": [called(function={"name": "f", "arguments": arguments})]},
                "messages",
                "0.tool_calls.0.function.arguments",
            )
            for arguments in ("{", "[]", '"{}"', '{"a": NaN}', "[" * 10_000, {"a": 1})
        ),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, object], field: str, place: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(**fields)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert caught.value.field == field
    assert place in caught.value.message


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": None, "tool_choice": None, "parallel_tool_calls": None},
        {"tools": [], "tool_choice": "auto"},
        {"tool_choice": "none"},
        {"tools": [function(name="a.b-c_d", strict=True, description=None)]},
        {"messages": [called(function={"name": "f", "arguments": ""})]},
    ],
)
def test_what_clients_send_without_a_meaning_is_taken(fields: dict[str, object]) -> None:
    read(**fields)


@pytest.mark.parametrize(("choice", "wanted"), [(None, "tools"), ("auto", "tools"), ("none", None)])
def test_tools_are_refused_unless_their_calls_can_be_read(choice: str | None, wanted: str | None) -> None:
    use = read(tools=[function()], tool_choice=choice).tool_use()
    if wanted is None:
        assert plan_calls(use, None).tools == ()
    else:
        with pytest.raises(RequestError) as caught:
            plan_calls(use, None)
        assert caught.value.field == wanted


REFERRING = {
    "type": "object",
    "properties": {
        "at": {"$ref": "#/$defs/place"},
        "default": {"$ref": "#/$defs/place"},
        "kind": {"enum": ["$ref"]},
    },
    "required": ["at"],
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "inner": {"$ref": "#/$defs/place"}},
            "required": ["x"],
        }
    },
}
FUNCTIONS: dict[str, dict[str, Any]] = {
    "go": REFERRING,
    "stop": {"type": "object", "properties": {}},
    "nest": {"properties": {"inner": {"$ref": "#"}, "n": {"type": "integer"}}},
}


@pytest.mark.parametrize(
    ("call", "fits"),
    [
        ('{"name": "go", "arguments": {"at": {"x": 1, "inner": {"x": 2}}}}', True),
        ('{"name": "go", "arguments": {"at": {"x": 1}, "default": {"x": 2}, "kind": "$ref"}}', True),
        ('{"name": "go", "arguments": {"at": {"x": "1"}}}', False),
        ('{"name": "go", "arguments": {}}', False),
        ('{"name": "go"}', False),
        ('{"name": "stop", "arguments": {}}', True),
        ('{"name": "stop", "arguments": {"at": {"x": 1}}}', False),
        ('{"name": "nest", "arguments": {"inner": {"inner": {}, "n": 3}}}', True),
        ('{"name": "nest", "arguments": {"inner": 3}}', False),
        ('{"name": "fly", "arguments": {}}', False),
        ('{"arguments": {}, "name": "stop"}', False),
    ],
)
def test_only_calls_with_fitting_arguments_fit_the_grammar(call: str, fits: bool) -> None:
    grammar = xgrammar.Grammar.from_json_schema(call_schema(FUNCTIONS, "arguments"))
    assert _is_grammar_accept_string(grammar, call) is fits


@pytest.mark.parametrize(("style", "member"), [(HERMES, "arguments"), (LLAMA3, "parameters")])
@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", ["get_weather", "get_time"]),
        ({"type": "function", "function": {"name": "get_time"}}, ["get_time"]),
    ],
)
def test_a_required_call_is_of_a_tool_that_was_chosen(
    style: ToolStyle, member: str, choice: object, names: list[str]
) -> None:
    plan = plan_calls(read(tools=[WEATHER, TIME], tool_choice=choice).tool_use(), style)
    schema = json.loads(plan.json_schema)
    calls = schema.get("anyOf", [schema])
    assert [call["properties"]["name"]["const"] for call in calls] == names
    assert all(list(call["properties"]) == ["name", member] for call in calls)
