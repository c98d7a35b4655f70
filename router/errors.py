"""Every error that a client can get, and how each door says it."""

from dataclasses import dataclass
from enum import Enum

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import code_pb2, error_details_pb2, status_pb2

DOMAIN = "baton"


@dataclass(frozen=True, slots=True)
class _Spoken:
    """One code in the words of HTTP, OpenAI and gRPC."""

    http_status: int
    openai_type: str
    rpc_code: int


class ErrorCode(Enum):
    INVALID_ARGUMENT = _Spoken(400, "invalid_request_error", code_pb2.INVALID_ARGUMENT)
    UNAUTHENTICATED = _Spoken(401, "authentication_error", code_pb2.UNAUTHENTICATED)
    NOT_FOUND = _Spoken(404, "not_found_error", code_pb2.NOT_FOUND)
    RESOURCE_EXHAUSTED = _Spoken(429, "rate_limit_error", code_pb2.RESOURCE_EXHAUSTED)
    DEADLINE_EXCEEDED = _Spoken(504, "timeout_error", code_pb2.DEADLINE_EXCEEDED)
    UNAVAILABLE = _Spoken(503, "service_unavailable_error", code_pb2.UNAVAILABLE)
    INTERNAL = _Spoken(500, "server_error", code_pb2.INTERNAL)

    @property
    def http_status(self) -> int:
        return self.value.http_status

    @property
    def openai_type(self) -> str:
        return self.value.openai_type

    @property
    def rpc_code(self) -> int:
        """A value of google.rpc.Code."""
        return self.value.rpc_code


class RequestError(Exception):
    """Why a request gets no answer. Raised where it is known, told once, at the door.

    Attributes:
        message: for the client, complete by itself.
        field: the request's field that is wrong, in the names of OpenAI's API.
        retry_after_s: when another try makes sense.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        field: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s

    def with_field(self, field: str) -> "RequestError":
        """The same, in the words of a client that calls the wrong field so."""
        message = self.message.removeprefix(f"{self.field}: ")
        return RequestError(self.code, f"{field}: {message}", field=field, retry_after_s=self.retry_after_s)


def invalid(field: str, message: str) -> RequestError:
    """A field that is wrong."""
    return RequestError(ErrorCode.INVALID_ARGUMENT, f"{field}: {message}", field=field)


def unavailable(message: str) -> RequestError:
    """Nothing can answer now; soon something may."""
    return RequestError(ErrorCode.UNAVAILABLE, message, retry_after_s=1.0)


def openai_body(error: RequestError, request_id: str) -> dict[str, dict[str, str | None]]:
    """The JSON of an error as OpenAI's clients read it, and whose it is."""
    return {
        "error": {
            "message": error.message,
            "type": error.code.openai_type,
            "param": error.field,
            "code": error.code.name.lower(),
            "request_id": request_id,
        }
    }


def rpc_status(error: RequestError, request_id: str, field_path: str | None) -> status_pb2.Status:
    """The error as google.rpc.Status: ErrorInfo and RequestInfo, BadRequest and RetryInfo where they fit.

    Args:
        field_path: of the wrong field in the protobuf request.
    """
    status = status_pb2.Status(code=error.code.rpc_code, message=error.message)
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.code.name, domain=DOMAIN))
    status.details.add().Pack(error_details_pb2.RequestInfo(request_id=request_id))
    if field_path is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=field_path, description=error.message)
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def grpc_code(error: RequestError) -> grpc.StatusCode:
    return grpc.StatusCode[error.code.name]
