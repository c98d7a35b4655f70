"""A TCP relay that keeps what passes: what a listener on the network would have."""

import asyncio
from typing import Self


class Relay:
    """Passes connections on to a server.

    Attributes:
        address: host:port to connect to instead of the server's.
        seen: all bytes of all connections, those of one direction of a connection in order.
    """

    def __init__(self, upstream: str) -> None:
        self.address = ""
        self._upstream = upstream
        self._seen: list[bytearray] = []
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None

    @property
    def seen(self) -> bytes:
        return b"".join(self._seen)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._pass_on, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self._upstream.rsplit(":", 1)
        there_reader, there_writer = await asyncio.open_connection(host, int(port))
        self._writers += [writer, there_writer]
        await asyncio.gather(self._copy(reader, there_writer), self._copy(there_reader, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen = bytearray()
        self._seen.append(seen)
        try:
            while data := await reader.read(1 << 16):
                seen += data
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            return
        finally:
            writer.close()
