"""What uvicorn does with our connections, before applications that write past `send`."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import uvicorn
from starlette.types import Message, Receive, Scope, Send

from router.event_stream import EventStream
from router.http_connection import BODY_WRITER, BodyWriter, HttpConnection

DEADLINE_S = 20.0
START = {"type": "http.response.start", "status": 200, "headers": []}

# An application's answer: what it writes with, and `send`.
Answer = Callable[[BodyWriter, Send], Awaitable[None]]


def part(body: bytes, *, more: bool = True) -> dict[str, object]:
    return {"type": "http.response.body", "body": body, "more_body": more}


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[str]:
    """host:port of a server whose every answer this is."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["more_body"]:
            pass
        await answer(scope["extensions"][BODY_WRITER]["writer"], send)

    config = uvicorn.Config(app, http=HttpConnection, log_config=None, lifespan="off", port=0)
    listening = config.bind_socket()
    listening.listen()
    server = uvicorn.Server(config)
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        running = group.create_task(server.serve(sockets=[listening]))
        host, port = listening.getsockname()
        yield f"{host}:{port}"
        server.should_exit = True
        await running


async def test_what_is_written_and_what_is_sent_come_in_order_and_the_connection_is_kept() -> None:
    async def answer(writer: BodyWriter, send: Send) -> None:
        assert not writer.is_open
        await send(START)
        for each in (b"a", b"b", b"c"):
            assert writer.is_open
            writer.write(each)
        writer.flush()
        await send(part(b"d"))
        writer.write(b"e")
        writer.flush()
        await send(part(b"f", more=False))
        assert not writer.is_open

    async with serving(answer) as address, httpx.AsyncClient() as client:
        bodies: list[bytes] = []
        connections: set[object] = set()
        for _ in range(2):
            async with client.stream("POST", f"http://{address}/", content=b"x") as answered:
                bodies.append(await answered.aread())
                connections.add(answered.extensions["network_stream"].get_extra_info("client_addr"))
    assert bodies == [b"abcdef"] * 2
    assert len(connections) == 1


async def test_of_a_stream_of_events_only_the_head_passes_middleware() -> None:
    heard: list[str] = []

    async def answer(writer: BodyWriter, send: Send) -> None:
        async def wrapped(message: Message) -> None:
            heard.append(message["type"])
            await send(message)

        stream = EventStream({"extensions": {BODY_WRITER: {"writer": writer}}}, wrapped)
        await stream.begin()
        await stream.send(["1"])
        stream.write(["2"])
        await stream.end(["3"])

    async with serving(answer) as address, httpx.AsyncClient() as client:
        answered = await client.post(f"http://{address}/")
    assert answered.text == "data: 1\n\ndata: 2\n\ndata: 3\n\n"
    assert heard == ["http.response.start"]


async def test_a_head_leaves_with_the_first_part_however_that_comes() -> None:
    ways: list[str] = []

    async def answer(writer: BodyWriter, send: Send) -> None:
        await send(START)
        assert writer.is_open
        way = ("written", "sent", "nothing")[len(ways)]
        ways.append(way)
        if way == "sent":
            await send(part(b"a"))
        else:
            writer.write(b"a" if way == "written" else b"")
            writer.flush()
        await send(part(b"b", more=False))

    async with serving(answer) as address:
        host, port = address.split(":")
        answers: list[bytes] = []
        for _ in range(3):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 0\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK\r\n")
            answers.append(await reader.readuntil(b"0\r\n\r\n"))
            writer.close()
    assert answers == [b"1\r\na\r\n1\r\nb\r\n0\r\n\r\n"] * 2 + [b"1\r\nb\r\n0\r\n\r\n"]


async def test_a_head_that_is_kept_can_be_taken_back_and_another_be_sent() -> None:
    async def answer(writer: BodyWriter, send: Send) -> None:
        await send(START)
        writer.take_back()
        assert not writer.is_open
        body = b"wrong"
        headers = [(b"content-length", b"5")]
        await send({"type": "http.response.start", "status": 400, "headers": headers})
        await send(part(body, more=False))

    async with serving(answer) as address, httpx.AsyncClient() as client:
        for _ in range(2):
            answered = await client.post(f"http://{address}/")
            assert (answered.status_code, answered.content) == (400, b"wrong")
            assert "transfer-encoding" not in answered.headers


async def test_a_client_that_does_not_read_closes_the_writer_and_loses_nothing() -> None:
    block = b"x" * (1 << 16)
    written = 0
    is_closed = asyncio.Event()

    async def answer(writer: BodyWriter, send: Send) -> None:
        nonlocal written
        await send(START)
        await send(part(b"begin"))
        # Ends: what is buffered for a client is bounded.
        while writer.is_open:
            writer.write(block)
            written += 1
            await asyncio.sleep(0)
        is_closed.set()
        await send(part(b"end", more=False))

    async with (
        serving(answer) as address,
        httpx.AsyncClient() as client,
        client.stream("POST", f"http://{address}/") as answered,
    ):
        await is_closed.wait()
        body = await answered.aread()
    assert body == b"begin" + block * written + b"end"


async def test_a_client_that_hangs_up_closes_the_writer() -> None:
    is_closed = asyncio.Event()

    async def answer(writer: BodyWriter, send: Send) -> None:
        await send(START)
        await send(part(b"begin"))
        while writer.is_open:
            writer.write(b"x")
            await asyncio.sleep(0)
        is_closed.set()

    async with serving(answer) as address:
        async with httpx.AsyncClient() as client, client.stream("POST", f"http://{address}/"):
            pass
        await is_closed.wait()


async def test_a_client_that_asks_before_it_sends_is_told_to_go_on() -> None:
    async def answer(writer: BodyWriter, send: Send) -> None:
        await send(START)
        await send(part(b"done", more=False))

    async with serving(answer) as address:
        host, port = address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST / HTTP/1.1\r\nhost: h\r\nexpect: 100-continue\r\ncontent-length: 1\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"x")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
        assert await reader.readuntil(b"0\r\n\r\n") == b"4\r\ndone\r\n0\r\n\r\n"
        writer.close()
