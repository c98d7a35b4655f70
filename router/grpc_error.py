"""How a gRPC call ends with an error."""

from typing import NoReturn

from grpc.aio import ServicerContext
from grpc_status import rpc_status

from router.errors import RequestError, grpc_code
from router.errors import rpc_status as error_status
from router.request_id import HEADER

_FIELD_PATHS = {
    "messages": "chat.messages",
    "response_format": "sampling.grammar",
    **{name: name for name in ("prompt", "stop", "model", "cache_salt", "token_ids")},
}


async def abort(context: ServicerContext, error: RequestError, request_id: str) -> NoReturn:
    path = None if error.field is None else _FIELD_PATHS.get(error.field, f"sampling.{error.field}")
    status = rpc_status.to_status(error_status(error, request_id, path))
    trailing = ((HEADER, request_id), *status.trailing_metadata)
    await context.abort(grpc_code(error), status.details, trailing)
    raise AssertionError("abort raises")
