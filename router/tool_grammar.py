"""A JSON schema that only a call of given functions fits."""

import json
from collections.abc import Mapping

# Members of a schema whose values are data, not schemas.
_DATA = ("const", "enum", "default", "examples")
# Members that hold schemas under names of the client's choice.
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def call_schema(functions: Mapping[str, Mapping[str, object]], arguments_member: str) -> str:
    """Of {"name": ..., `arguments_member`: ...}, the name first.

    Args:
        functions: name to the JSON schema of its arguments, an object's.
    """
    names = list(functions)
    places = [f"arguments_{index}" for index in range(len(names))]
    definitions = {
        place: {"type": "object", **_moved(functions[name], f"#/$defs/{place}")}
        for place, name in zip(places, names, strict=True)
    }
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, arguments_member: {"$ref": f"#/$defs/{place}"}},
            "required": ["name", arguments_member],
            "additionalProperties": False,
        }
        for name, place in zip(names, places, strict=True)
    ]
    whole = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return json.dumps({**whole, "$defs": definitions}, ensure_ascii=False)


def _moved(schema: Mapping[str, object], place: str) -> dict[str, object]:
    """The schema as it stands at `place` of another: its references to itself begin there."""
    return {key: value if key in _DATA else _moved_value(key, value, place) for key, value in schema.items()}


def _moved_value(key: str, value: object, place: str) -> object:
    match value:
        case str() if key == "$ref" and value.startswith("#"):
            return place + value[1:]
        case dict() if key in _NAMED:
            return {name: _moved_value("", inner, place) for name, inner in value.items()}
        case dict():
            return _moved(value, place)
        case list():
            return [_moved_value("", inner, place) for inner in value]
        case _:
            return value
