"""What the router's doors are measured against: the libraries under them with nothing in between.

`python -m bench.bare_server` serves, and prints the addresses of, a grpc.aio echo (each message that comes is
written back) and a uvicorn that writes N events, one every M ms: `GET /?tokens=N&step_ms=M` the same bytes
over and over, `GET /fastapi?tokens=N&step_ms=M` as is usual in FastAPI, each event's JSON made for it.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from urllib.parse import parse_qs

import grpc
import uvicorn
import uvloop
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from protos import inference_pb2

ECHO_METHOD = "/baton.bench.Echo/Echo"
FASTAPI_PATH = "/fastapi"
# As long as what the chat door writes for a token.
EVENT_BODY = {
    "id": "0123456789abcdef0123456789abcdef",
    "object": "chat.completion.chunk",
    "created": 1700000000,
    "model": "smollm2-135m",
    "choices": [{"index": 0, "delta": {"content": " token"}, "logprobs": None, "finish_reason": None}],
}
SSE_EVENT = f"data: {json.dumps(EVENT_BODY, separators=(',', ':'))}\n\n".encode()


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


class AllTicks:
    """By the step's length."""

    def __init__(self) -> None:
        self._ticks: dict[float, Ticks] = {}

    def of(self, step_s: float) -> Ticks:
        return self._ticks.get(step_s) or self._ticks.setdefault(step_s, Ticks(step_s))


def fastapi_writer(all_ticks: AllTicks) -> FastAPI:
    """The usual way to write events in FastAPI, each one's JSON made for it."""
    app = FastAPI()

    async def events(tokens: int, ticks: Ticks) -> AsyncIterator[str]:
        for number in range(tokens):
            if number:
                await ticks.next()
            yield f"data: {json.dumps(EVENT_BODY)}\n\n"
        yield "data: [DONE]\n\n"

    @app.get(FASTAPI_PATH)
    async def stream(tokens: int, step_ms: float) -> StreamingResponse:
        return StreamingResponse(events(tokens, all_ticks.of(step_ms / 1e3)), media_type="text/event-stream")

    return app


class SseWriter:
    """An ASGI application: the same bytes over and over, but where it is asked for FastAPI's way."""

    def __init__(self) -> None:
        self._ticks = AllTicks()
        self._fastapi = fastapi_writer(self._ticks)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == FASTAPI_PATH:
            await self._fastapi(scope, receive, send)
            return
        query = parse_qs(scope["query_string"].decode())
        ticks = self._ticks.of(float(query["step_ms"][0]) / 1e3)
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
    # Who connects before uvicorn accepts waits.
    socket.listen(config.backlog)
    print(
        json.dumps({"grpc": f"127.0.0.1:{grpc_port}", "http": f"127.0.0.1:{socket.getsockname()[1]}"}),
        flush=True,
    )
    await uvicorn.Server(config).serve(sockets=[socket])


if __name__ == "__main__":
    uvloop.run(serve())
