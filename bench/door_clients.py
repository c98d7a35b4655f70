"""Many streams at once at a router's doors and at the bare servers: each counts what comes and when."""

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import grpc

from bench.bare_server import ECHO_METHOD, FASTAPI_PATH, Ticks
from protos import PROTOCOL_VERSION, inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc

PROMPT_TOKENS = 32
# Streams that share one HTTP/2 connection.
_STREAMS_PER_CHANNEL = 100
_DONE = b"data: [DONE]"
# What ends a body in chunks.
_LAST_CHUNK = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Shape:
    """What the clients do.

    Attributes:
        streams: at once.
        requests: of each stream, one after the other.
        tokens: of each answer.
        step_ms: between two of them.
    """

    streams: int
    requests: int
    tokens: int
    step_ms: float


@dataclass(slots=True)
class Tally:
    """What came. `messages`: that carried tokens."""

    messages: int = 0
    tokens: int = 0
    requests: int = 0
    ttft_s: list[float] = field(default_factory=list)


# One request of one stream.
Ask = Callable[[Tally], Awaitable[None]]


async def run_streams(asks: list[Ask], requests: int) -> Tally:
    tally = Tally()

    async def stream(ask: Ask) -> None:
        for _ in range(requests):
            await ask(tally)
            tally.requests += 1

    await asyncio.gather(*map(stream, asks))
    return tally


def _prompt() -> list[int]:
    return [random.randrange(1000, 4000) for _ in range(PROMPT_TOKENS)]


async def at_grpc_door(address: str, shape: Shape) -> Tally:
    channels = _channels(address, shape.streams)

    def asker(channel: grpc.aio.Channel) -> Ask:
        stub = inference_pb2_grpc.InferenceStub(channel)

        async def ask(tally: Tally) -> None:
            sampling = inference_pb2.SamplingParams(max_tokens=shape.tokens, ignore_eos=True)
            request = inference_pb2.GenerateRequest(
                token_ids=inference_pb2.TokenIds(ids=_prompt()), sampling=sampling
            )
            started = time.perf_counter()
            is_first = True
            async for response in stub.Generate(request):
                if response.token_ids:
                    tally.messages += 1
                    tally.tokens += len(response.token_ids)
                    if is_first:
                        tally.ttft_s.append(time.perf_counter() - started)
                        is_first = False

        return ask

    try:
        return await run_streams([asker(channel) for channel in _spread(channels, shape)], shape.requests)
    finally:
        await _close(channels)


async def at_echo(address: str, shape: Shape) -> Tally:
    channels = _channels(address, shape.streams)
    ticks = Ticks(shape.step_ms / 1e3)
    message = inference_pb2.GenerateResponse(request_id="r" * 36, index=7, token_ids=[1234], text=" token")

    def asker(channel: grpc.aio.Channel) -> Ask:
        echo = channel.stream_stream(
            ECHO_METHOD,
            request_serializer=inference_pb2.GenerateResponse.SerializeToString,
            response_deserializer=inference_pb2.GenerateResponse.FromString,
        )

        async def ask(tally: Tally) -> None:
            started = time.perf_counter()
            call = echo()
            for number in range(shape.tokens):
                if number:
                    await ticks.next()
                await call.write(message)
                await call.read()
                tally.messages += 1
                tally.tokens += 1
                if number == 0:
                    tally.ttft_s.append(time.perf_counter() - started)
            await call.done_writing()
            await call.code()

        return ask

    try:
        return await run_streams([asker(channel) for channel in _spread(channels, shape)], shape.requests)
    finally:
        await _close(channels)
        ticks.stop()


async def at_worker(address: str, shape: Shape) -> Tally:
    """One stream in a worker's session: what a router waits for between a request and its first token."""
    assert shape.streams == 1
    tally = Tally()
    async with grpc.aio.insecure_channel(address) as channel:
        call = worker_pb2_grpc.WorkerStub(channel).Connect()
        hello = worker_pb2.Hello(protocol_version=PROTOCOL_VERSION, session="bench")
        await call.write(worker_pb2.RouterMessage(hello=hello))
        for number in range(1, shape.requests + 1):
            submit = worker_pb2.Submit(attempt=worker_pb2.Attempt(number=number), prompt_token_ids=_prompt())
            submit.prefill.SetInParent()
            started = time.perf_counter()
            await call.write(worker_pb2.RouterMessage(submit=submit))
            while not (await call.read()).step.tokens:
                pass
            tally.ttft_s.append(time.perf_counter() - started)
        call.cancel()
    return tally


async def at_http_door(address: str, shape: Shape) -> Tally:
    def request() -> bytes:
        body = json.dumps(
            {
                "prompt": _prompt(),
                "max_tokens": shape.tokens,
                "ignore_eos": True,
                "stream": True,
            }
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {address}\r\ncontent-length: {len(body)}\r\n\r\n"
        return head.encode() + body

    # The last event says why it ended, and carries no token.
    return await _over_http(address, shape, request, idle_events=1)


async def at_sse_writer(address: str, shape: Shape, path: str = "/") -> Tally:
    query = f"tokens={shape.tokens}&step_ms={shape.step_ms}"
    request = f"GET {path}?{query} HTTP/1.1\r\nhost: {address}\r\n\r\n".encode()
    return await _over_http(address, shape, lambda: request, idle_events=0)


async def at_fastapi(address: str, shape: Shape) -> Tally:
    return await at_sse_writer(address, shape, FASTAPI_PATH)


async def _over_http(
    address: str, shape: Shape, new_request: Callable[[], bytes], *, idle_events: int
) -> Tally:
    host, port = address.split(":")
    connections = [await asyncio.open_connection(host, int(port)) for _ in range(shape.streams)]

    def asker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Ask:
        async def ask(tally: Tally) -> None:
            started = time.perf_counter()
            writer.write(new_request())
            events, tail, is_first = 0, b"", True
            while not (_DONE in tail and tail.endswith(_LAST_CHUNK)):
                data = await reader.read(1 << 16)
                if not data:
                    raise ConnectionError(f"{address} hung up after {tail!r}")
                events += data.count(b"data: ")
                tail = (tail + data)[-200:]
                if is_first and events:
                    tally.ttft_s.append(time.perf_counter() - started)
                    is_first = False
            tally.messages += events - 1 - idle_events
            tally.tokens += shape.tokens

        return ask

    try:
        return await run_streams([asker(*connection) for connection in connections], shape.requests)
    finally:
        for _, writer in connections:
            writer.close()


def _channels(address: str, streams: int) -> list[grpc.aio.Channel]:
    options = [("grpc.use_local_subchannel_pool", 1)]
    count = -(-streams // _STREAMS_PER_CHANNEL)
    return [grpc.aio.insecure_channel(address, options=options) for _ in range(count)]


def _spread(channels: list[grpc.aio.Channel], shape: Shape) -> list[grpc.aio.Channel]:
    return [channels[stream % len(channels)] for stream in range(shape.streams)]


async def _close(channels: list[grpc.aio.Channel]) -> None:
    for channel in channels:
        await channel.close()
