"""A gRPC proxy that alters messages or dies: faults of the wire without a change to either end."""

import asyncio
from collections.abc import Callable
from functools import partial

import grpc

Alter = Callable[[bytes], bytes]


class Cut(Exception):
    """Raised by what alters a message: the call breaks instead of passing it on."""


class Hold(Exception):
    """Raised by what alters a message: neither it nor what follows in the call is ever passed on."""


class Proxy(grpc.GenericRpcHandler):
    """Passes every method of a server on as raw bytes.

    Attributes:
        address: host:port to connect to instead of the server's.
        alter: by method name ("Frames"), what is done to each request message of it.
        drop_replies: method names whose replies never come back.
        flowing: cleared, nothing passes any more, either way, and nobody is told: a process that is stopped.
    """

    def __init__(self, upstream: str) -> None:
        self._channel = grpc.aio.insecure_channel(
            upstream,
            options=[("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)],
        )
        self._server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
        self._server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self.alter: dict[str, Alter] = {}
        self.drop_replies: set[str] = set()
        self.flowing = asyncio.Event()
        self.flowing.set()

    async def start(self) -> None:
        await self._server.start()

    async def die(self) -> None:
        """Both ends see their connections break. May be called twice."""
        await self._server.stop(None)
        await self._channel.close()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.stream_stream_rpc_method_handler(partial(self._pass_on, handler_call_details.method))

    async def _pass_on(self, method: str, _requests: object, context: grpc.aio.ServicerContext) -> None:
        call = self._channel.stream_stream(method)(metadata=context.invocation_metadata())
        requests = asyncio.create_task(self._pass_requests(method.rpartition("/")[2], context, call))
        try:
            while (reply := await call.read()) is not grpc.aio.EOF:
                await self.flowing.wait()
                if method.rpartition("/")[2] not in self.drop_replies:
                    await context.write(reply)
            code, detail = await call.code(), await call.details()
        except grpc.aio.AioRpcError as error:
            code, detail = error.code(), error.details()
        finally:
            requests.cancel()
            call.cancel()
        if code is not grpc.StatusCode.OK:
            await context.abort(code, detail or "")

    async def _pass_requests(
        self, name: str, context: grpc.aio.ServicerContext, call: grpc.aio.StreamStreamCall
    ) -> None:
        alter = self.alter.get(name, bytes)
        try:
            while (request := await context.read()) is not grpc.aio.EOF:
                await self.flowing.wait()
                await call.write(alter(request))
            await call.done_writing()
        except Cut:
            call.cancel()
        except Hold:
            await asyncio.Event().wait()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader of the replies tells why
