"""How the JSON of a request is read."""

from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from router.errors import ErrorCode, RequestError, invalid


class StrictBody(BaseModel):
    """Types are strict and unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, protected_namespaces=())


Body = TypeVar("Body", bound=StrictBody)


def parse(kind: type[Body], text: bytes) -> Body:
    """
    Raises:
        RequestError: INVALID_ARGUMENT, naming the field that is wrong.
    """
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise _first_error(error) from error


def _first_error(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if not first["loc"]:
        return RequestError(ErrorCode.INVALID_ARGUMENT, f"the body is not a request: {first['msg']}")
    field = str(first["loc"][0])
    inner = ".".join(str(part) for part in first["loc"][1:])
    return invalid(field, f"{inner}: {first['msg']}" if inner else first["msg"])
