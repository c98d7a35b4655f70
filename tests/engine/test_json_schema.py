import json

import pytest

from engine.json_schema import MAX_DEPTH, check_json_schema
from engine.request import InvalidRequest


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"if": {}, "then": {}}, "if"),
        ({"type": "array", "items": {}, "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {}}, "contains"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"allOf": [{"type": "integer"}, {"minimum": 2}]}, "allOf"),
        ({"anyOf": [{"type": "integer"}], "properties": {}}, "properties beside anyOf"),
        ({"$ref": "#/$defs/a", "minimum": 3}, "minimum beside"),
        ({"enum": [1, 2], "minimum": 2}, "minimum beside enum"),
        ({"$ref": "https://example.com/schema"}, "ref"),
        ({"minimum": 5}, "minimum needs the type number"),
        ({"type": "object", "minLength": 5}, "minLength needs the type string"),
        ({"type": "number", "multipleOf": 0.1}, "multipleOf"),
        ({"type": "string", "pattern": "a+", "maxLength": 3}, "pattern"),
        ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, "'b'"),
        ({"type": "string", "format": "json-pointer"}, "format json-pointer"),
        ({"type": "string", "pattern": '^"$'}, "pattern"),
        ({"type": "string", "pattern": r"^\\$"}, "pattern"),
        ({"type": "object", "patternProperties": {r"\x22": {}}}, "pattern"),
    ],
)
def test_what_could_not_be_kept_is_refused_at_any_depth_with_its_name(schema, named):
    inner = {"type": "object", "properties": {"x": {"type": "array", "items": schema}}}
    for each in (schema, inner, {"$defs": {"d": schema}, "type": "string"}):
        with pytest.raises(InvalidRequest, match=f"response_format.*{named}"):
            check_json_schema(json.dumps(each))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        '"object"',
        "null",
        '{"a":' * 100_000,
        "[" * 100_000,
        '{"items":' * 80 + "{}" + "}" * 80,
    ],
)
def test_what_is_no_schema_is_refused(text):
    with pytest.raises(InvalidRequest, match="response_format"):
        check_json_schema(text)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": ["integer", "null"], "minimum": 2},
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        {"type": "string", "enum": ["a", "b"], "description": "one of two"},
        {"$defs": {"a": {"type": "integer"}}, "$ref": "#/$defs/a", "title": "A"},
        {"properties": {"not": {"type": "string"}, "minimum": {"type": "integer"}}},
        {"type": "string", "pattern": r"^\d+\.\d+$"},
        {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}},
        {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        {"required": [{}], "properties": {}},
    ],
)
def test_what_can_be_kept_passes(schema):
    check_json_schema(json.dumps(schema))


def test_the_limit_of_nesting_is_told():
    schema: dict = {}
    for _ in range(MAX_DEPTH + 1):
        schema = {"items": schema}
    with pytest.raises(InvalidRequest, match=f"deeper than {MAX_DEPTH}"):
        check_json_schema(json.dumps(schema))
