"""What the router's doors are measured against: the libraries under them with nothing in between.

`python -m bench.bare_server` serves, and prints the addresses of, a grpc.aio echo (each message that comes is
written back) and an SSE writer (uvicorn; `GET /?tokens=N&step_ms=M` writes N events, one every M ms).
"""

import asyncio
import json
from collections.abc import AsyncIterator
from urllib.parse import parse_qs

import grpc
import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send

from protos import inference_pb2

ECHO_METHOD = "/baton.bench.Echo/Echo"
# As long as what the chat door writes for a token.
SSE_EVENT = (
    b'data: {"id":"0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1700000000,'
    b'"model":"smollm2-135m","choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,'
    b'"finish_reason":null}]}\n\n'
)


async def _echo(
    request_iterator: AsyncIterator[inference_pb2.GenerateResponse], context: grpc.aio.ServicerContext
) -> None:
    async for message in request_iterator:
        await context.write(message)


class Ticks:
    """All streams of one step length write in the same moments, as the tokens of an engine's step come."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._tick = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._step_s)
            tick, self._tick = self._tick, asyncio.Event()
            tick.set()

    async def next(self) -> None:
        await self._tick.wait()

    def stop(self) -> None:
        self._task.cancel()


class SseWriter:
    """An ASGI application."""

    def __init__(self) -> None:
        self._ticks: dict[float, Ticks] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        query = parse_qs(scope["query_string"].decode())
        step_s = float(query["step_ms"][0]) / 1e3
        ticks = self._ticks.get(step_s) or self._ticks.setdefault(step_s, Ticks(step_s))
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number in range(int(query["tokens"][0])):
            if number:
                await ticks.next()
            await send({"type": "http.response.body", "body": SSE_EVENT, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


async def serve() -> None:
    # As the router's: a burst of calls waits, it is not cut off.
    server = grpc.aio.server(
        options=[
            ("grpc.server.max_pending_requests", 1 << 20),
            ("grpc.server.max_pending_requests_hard_limit", 1 << 20),
        ]
    )
    handler = grpc.stream_stream_rpc_method_handler(
        _echo,
        request_deserializer=inference_pb2.GenerateResponse.FromString,
        response_serializer=inference_pb2.GenerateResponse.SerializeToString,
    )
    service, method = ECHO_METHOD.lstrip("/").split("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    grpc_port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    config = uvicorn.Config(SseWriter(), log_config=None, access_log=False, lifespan="off", port=0)
    socket = config.bind_socket()
    print(
        json.dumps({"grpc": f"127.0.0.1:{grpc_port}", "http": f"127.0.0.1:{socket.getsockname()[1]}"}),
        flush=True,
    )
    await uvicorn.Server(config).serve(sockets=[socket])


if __name__ == "__main__":
    uvloop.run(serve())
