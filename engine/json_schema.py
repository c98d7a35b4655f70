"""Which JSON schemas a text can be held to: what the grammar compiler would ignore is refused here."""

import json
import re
from collections.abc import Iterator

from engine.request import InvalidRequest

MAX_DEPTH = 64

Json = bool | int | float | str | None | list["Json"] | dict[str, "Json"]
Schema = dict[str, Json]

_REFUSED = frozenset(
    [
        "not",
        "if",
        "then",
        "else",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "contains",
        "minContains",
        "maxContains",
        "$dynamicRef",
        "$recursiveRef",
    ]
)
_ANNOTATIONS = frozenset(
    [
        "$schema",
        "$id",
        "$anchor",
        "$comment",
        "$defs",
        "definitions",
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "discriminator",
        "nullable",
    ]
)
# These decide alone; what stands beside them would be ignored.
_ALONE = ("$ref", "anyOf", "oneOf", "allOf")
_VALUES = ("enum", "const")
_OF_TYPE = {
    "number": frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]),
    "string": frozenset(["minLength", "maxLength", "pattern", "format"]),
    "array": frozenset(["items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"]),
    "object": frozenset(
        [
            "properties",
            "required",
            "additionalProperties",
            "patternProperties",
            "propertyNames",
            "minProperties",
            "maxProperties",
            "unevaluatedProperties",
        ]
    ),
}
_FORMATS = frozenset(
    ["date", "time", "date-time", "duration", "uuid", "ipv4", "ipv6", "email", "hostname", "uri"]
)
# What a pattern would write into a string as it stands, and break it: a quote or a backslash.
_UNESCAPED = re.compile(r'"|\\\\|\\x22|\\x5c|\\u0022|\\u005c', re.IGNORECASE)
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_SINGLE = ("items", "additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties")


def check_json_schema(text: str) -> None:
    """`oneOf` passes and means `anyOf`; a property or item that the schema does not speak of cannot come.

    Raises:
        InvalidRequest: the text is no JSON schema, or one that could not be kept; it names the keyword.
    """
    try:
        root = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refused("", f"is no JSON ({error})") from error
    if not isinstance(root, dict | bool):
        raise _refused("", "is an object or true")
    pending: list[tuple[str, Json, int]] = [("", root, 0)]
    while pending:
        at, schema, depth = pending.pop()
        if not isinstance(schema, dict):
            continue
        if depth > MAX_DEPTH:
            raise _refused(at, f"is nested deeper than {MAX_DEPTH}")
        _check(at, schema)
        pending += ((below, child, depth + 1) for below, child in _children(at, schema))


def _children(at: str, schema: Schema) -> Iterator[tuple[str, Json]]:
    for key in _MAPS:
        if isinstance(named := schema.get(key), dict):
            yield from ((f"{at}/{key}/{name}", child) for name, child in named.items())
    for key in _LISTS:
        if isinstance(children := schema.get(key), list):
            yield from ((f"{at}/{key}/{place}", child) for place, child in enumerate(children))
    for key in _SINGLE:
        if key in schema:
            yield f"{at}/{key}", schema[key]


def _check(at: str, schema: Schema) -> None:
    """One schema, without those inside it."""
    for key in schema:
        if key in _REFUSED:
            raise _refused(at, f"{key} is not supported")
    if schema.get("uniqueItems"):
        raise _refused(at, "uniqueItems is not supported")
    ref = schema.get("$ref")
    if ref is not None and not (isinstance(ref, str) and (ref == "#" or ref.startswith("#/"))):
        raise _refused(at, "$ref is # or begins with #/")
    if isinstance(all_of := schema.get("allOf"), list) and len(all_of) > 1:
        raise _refused(at, "allOf of more than one schema is not supported")
    _check_neighbours(at, schema)
    _check_types(at, schema)
    _check_string(at, schema)
    _check_required(at, schema)
    for pattern in _names(schema.get("patternProperties")):
        _check_pattern(at, pattern)


def _check_neighbours(at: str, schema: Schema) -> None:
    decisive = [key for key in (*_ALONE, *_VALUES) if key in schema]
    if not decisive:
        return
    allowed = _ANNOTATIONS | {decisive[0]} | ({"type"} if decisive[0] in _VALUES else set())
    known = set(_ALONE) | set(_VALUES) | {"type"} | frozenset().union(*_OF_TYPE.values())
    for key in schema:
        if key in known and key not in allowed:
            raise _refused(at, f"{key} beside {decisive[0]} is not supported")


def _check_types(at: str, schema: Schema) -> None:
    """A constraint on a type that is not named, or is one of several, would be ignored."""
    named = schema.get("type")
    for of_type, keywords in _OF_TYPE.items():
        constraints = keywords & schema.keys()
        is_clear = of_type in ("object", "array") or at.endswith("/propertyNames")
        if not constraints or (named is None and is_clear):
            continue
        matches = (of_type, "integer") if of_type == "number" else (of_type,)
        several = named if isinstance(named, list) else [named]
        if not any(match in several for match in matches):
            raise _refused(at, f"{min(constraints)} needs the type {of_type}")
    if "multipleOf" in schema and schema["type"] != "integer":
        raise _refused(at, "multipleOf needs the type integer")


def _check_string(at: str, schema: Schema) -> None:
    if "pattern" in schema and ("minLength" in schema or "maxLength" in schema):
        raise _refused(at, "pattern and a length together are not supported")
    if isinstance(pattern := schema.get("pattern"), str):
        _check_pattern(at, pattern)
    if isinstance(form := schema.get("format"), str) and form not in _FORMATS:
        raise _refused(at, f"format {form} is not supported")


def _check_pattern(at: str, pattern: str) -> None:
    if _UNESCAPED.search(pattern):
        raise _refused(at, "a pattern with a quote or a backslash of its own is not supported")


def _names(value: Json) -> list[str]:
    return list(value) if isinstance(value, dict) else []


def _check_required(at: str, schema: Schema) -> None:
    """What a schema requires it must also describe."""
    required, properties = schema.get("required"), schema.get("properties", {})
    if not isinstance(required, list) or not isinstance(properties, dict):
        return
    if missing := [name for name in required if isinstance(name, str) and name not in properties]:
        raise _refused(at, f"required names {missing[0]!r}, which is not among the properties")


def _refused(at: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"response_format: json_schema: {at or 'the schema'} {reason}")
