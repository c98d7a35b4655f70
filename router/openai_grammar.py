"""How clients of OpenAI's API and of vLLM say what a text must be."""

import json
from typing import Annotated, Literal

from pydantic import Field, JsonValue

from router import grammar
from router.errors import invalid
from router.grammar import Grammar, JsonObject, JsonSchema, Regex
from router.strict_body import StrictBody

RESPONSE_FORMAT = grammar.FIELD
STRUCTURED_OUTPUTS = "structured_outputs"


class NamedSchema(StrictBody):
    """Strict or not: the text follows the schema in both cases."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    schema_field: Annotated[dict[str, JsonValue] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(StrictBody):
    """OpenAI's."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: NamedSchema | None = None

    def grammar(self) -> Grammar | None:
        match self.type:
            case "text":
                return None
            case "json_object":
                return JsonObject()
            case "json_schema":
                if self.json_schema is None or self.json_schema.schema_field is None:
                    raise invalid(RESPONSE_FORMAT, "json_schema.schema must be given")
                return JsonSchema(_schema_text(self.json_schema.schema_field, RESPONSE_FORMAT))


class StructuredOutputs(StrictBody):
    """vLLM's, one of its forms: `json` (a schema, or its text), `json_object`, `regex`."""

    json_field: Annotated[dict[str, JsonValue] | str | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: object = None
    grammar_field: Annotated[object, Field(alias="grammar")] = None
    structural_tag: object = None

    def grammar(self) -> Grammar:
        if not (self.choice is self.grammar_field is self.structural_tag is None):
            raise invalid(STRUCTURED_OUTPUTS, "json, json_object and regex are served, nothing else")
        forms: list[Grammar] = []
        if isinstance(self.json_field, str):
            forms.append(JsonSchema(self.json_field))
        elif self.json_field is not None:
            forms.append(JsonSchema(_schema_text(self.json_field, STRUCTURED_OUTPUTS)))
        if self.json_object:
            forms.append(JsonObject())
        if self.regex is not None:
            forms.append(Regex(self.regex))
        if len(forms) != 1:
            raise invalid(STRUCTURED_OUTPUTS, "must have one of json, json_object, regex")
        return forms[0]


def read_grammar(format_: ResponseFormat | None, structured: StructuredOutputs | None) -> Grammar | None:
    """
    Raises:
        RequestError: INVALID_ARGUMENT, a form is incomplete, or both ask for one.
    """
    asked = None if format_ is None else format_.grammar()
    if structured is None:
        return asked
    if asked is not None:
        raise invalid(STRUCTURED_OUTPUTS, f"is not allowed with {RESPONSE_FORMAT}")
    return structured.grammar()


def _schema_text(schema: dict[str, JsonValue], field: str) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (ValueError, RecursionError) as error:
        raise invalid(field, f"the schema is no JSON: {error}") from error
