"""What the text of a request must be, and the limits of saying so. Workers compile it and may refuse it."""

import json
from dataclasses import dataclass

from router.errors import invalid

MAX_SCHEMA_CHARS = 64 << 10
MAX_REGEX_CHARS = 4 << 10
# What OpenAI's API calls it, and what workers say that refuse one.
FIELD = "response_format"


@dataclass(frozen=True, slots=True)
class JsonObject:
    """Any JSON object."""


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """A JSON schema, as text of at most `MAX_SCHEMA_CHARS`."""

    text: str


@dataclass(frozen=True, slots=True)
class Regex:
    """A regular expression of 1 to `MAX_REGEX_CHARS` characters that the whole text matches."""

    pattern: str


Grammar = JsonObject | JsonSchema | Regex


def check_grammar(grammar: Grammar | None) -> Grammar | None:
    """
    Raises:
        RequestError: INVALID_ARGUMENT, it is too long, empty, or a schema that is no JSON.
    """
    match grammar:
        case JsonSchema(text):
            if len(text) > MAX_SCHEMA_CHARS:
                raise invalid(FIELD, f"a schema has at most {MAX_SCHEMA_CHARS} characters, got {len(text)}")
            if not isinstance(_parsed(text), dict | bool):
                raise invalid(FIELD, "a schema is a JSON object")
        case Regex(pattern) if not 1 <= len(pattern) <= MAX_REGEX_CHARS:
            raise invalid(FIELD, f"a regex has 1 to {MAX_REGEX_CHARS} characters, got {len(pattern)}")
    return grammar


def _parsed(text: str) -> object:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise invalid(FIELD, f"the schema is no JSON: {error}") from error


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON value")
