"""The gRPC door's lock."""

from collections.abc import Awaitable, Callable

import grpc
from grpc.aio import ServicerContext

from router.doorkeeper import Doorkeeper, authorization_of
from router.errors import RequestError
from router.grpc_error import abort
from router.request_id import metadata_request_id, request_id_from

# For those who watch over the router.
_OPEN_SERVICE = "/grpc.health.v1.Health/"

_Handler = grpc.RpcMethodHandler | None


class GrpcKeys(grpc.aio.ServerInterceptor):
    """Ends a call with UNAUTHENTICATED before its method runs, whatever the method is."""

    def __init__(self, doorkeeper: Doorkeeper) -> None:
        self._doorkeeper = doorkeeper

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        if not handler_call_details.method.startswith(_OPEN_SERVICE):
            try:
                self._doorkeeper.admit(authorization_of(handler_call_details.invocation_metadata))
            except RequestError as error:
                given = metadata_request_id(handler_call_details.invocation_metadata)
                return _refusal(error, request_id_from(given))
        return await continuation(handler_call_details)


def _refusal(error: RequestError, request_id: str) -> grpc.RpcMethodHandler:
    async def refuse(_request: bytes, context: ServicerContext) -> None:
        await abort(context, error, request_id)

    return grpc.unary_unary_rpc_method_handler(refuse)
