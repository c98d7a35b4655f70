"""The receiving process of bench/transfer.py: real pages behind the real service, no model."""

import asyncio
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

import grpc
import numpy as np
import torch
import uvloop

from engine.kv_cache import KVCache
from engine.kv_layout import KVLayout
from engine.kv_wire import KVWire, kv_wire
from kv_transfer import frame as frame_module
from kv_transfer.bulk import SlotTerms
from kv_transfer.frame import Bytes, KVSlice
from kv_transfer.messages import Drop, Grant, Open
from kv_transfer.servicer import KvTransferService
from kv_transfer.transport_choice import TransportName, transports_for

EPOCH = 1
TOKENS_METHOD = "/bench/Tokens"
TOKEN_INTERVAL_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What both processes are told.

    Attributes:
        has_checksum: False: checksums are neither taken nor compared, for the measurement only.
    """

    layout: KVLayout
    max_tokens: int
    transport: TransportName
    slots: SlotTerms
    terms: Grant
    has_checksum: bool
    core: int
    device: str


@dataclass(frozen=True, slots=True)
class Ports:
    """Where a receiver listens on loopback: its gRPC server, and a socket that only reads bytes."""

    grpc: int
    tcp: int


def wait_for(device: torch.device) -> None:
    """Returns when the device has done what this thread gave it."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def settle(core: int) -> None:
    """A core for this process, before any thread starts."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)


@contextmanager
def checksums(are_taken: bool) -> Iterator[None]:
    digest = frame_module._digest
    if not are_taken:
        frame_module._digest = _no_digest
    try:
        yield
    finally:
        frame_module._digest = digest


def _no_digest(fields: Bytes, parts: object) -> int:
    return 0


class PageSink:
    """One hand-off into pages (kv_transfer's HandoffSink), which one thread writes, as an engine's does."""

    def __init__(self, wire: KVWire, block_table: np.ndarray, engine: Executor, device: torch.device) -> None:
        self.dropped: asyncio.Future[Drop] = asyncio.get_running_loop().create_future()
        self._wire = wire
        self._block_table = block_table
        self._engine = engine
        self._device = device

    async def reserve(self) -> int:
        return 0

    async def scatter(self, slices: Sequence[KVSlice]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._engine, self._scatter, slices)

    def _scatter(self, slices: Sequence[KVSlice]) -> None:
        for layer, token_start, token_end, data in slices:
            self._wire.at(self._block_table, token_start, token_end).unpack(layer, data)
        wait_for(self._device)

    async def admit(self, first_tokens: tuple[int, ...], kv_bytes: int) -> None:
        """Nothing runs here."""

    def release(self, drop: Drop) -> None:
        """The sender tells."""


class PageDoor:
    """Lets every hand-off in; its session's name says what its block table is like."""

    def __init__(self, layout: KVLayout, max_tokens: int, device: torch.device) -> None:
        num_blocks = max_tokens // layout.block_size
        self._device = device
        self._wire = kv_wire(KVCache(layout, num_blocks, device), layout)
        self._engine = ThreadPoolExecutor(1)
        self._tables = {
            "contiguous": np.arange(num_blocks),
            "shuffled": np.random.default_rng(0).permutation(num_blocks),
        }

    async def authorize(self, opening: Open, layout: KVLayout) -> PageSink:
        return PageSink(self._wire, self._tables[opening.transfer.session], self._engine, self._device)


async def _send_tokens(request: bytes, context: grpc.aio.ServicerContext) -> None:
    """The time, every few milliseconds, as a decode worker sends tokens."""
    while True:
        await asyncio.sleep(TOKEN_INTERVAL_S)
        await context.write(str(time.monotonic()).encode())


def _drain(listener: socket.socket) -> None:
    """Plain TCP: reads as many bytes as it is told into memory that it has, and says when they are there."""
    memory = memoryview(bytearray(1 << 20))
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            while header := connection.recv(8, socket.MSG_WAITALL):
                left = int.from_bytes(header)
                while left:
                    left -= connection.recv_into(memory[: min(left, len(memory))])
                connection.sendall(b"\0")


async def _serve(setting: Setting, parent: Connection) -> None:
    device = torch.device(setting.device)
    service = KvTransferService(
        PageDoor(setting.layout, setting.max_tokens, device),
        setting.layout,
        setting.terms,
        worker_id="receiver",
        epoch=EPOCH,
        transports=transports_for(setting.transport, setting.slots, device=device),
    )
    server = grpc.aio.server(
        options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 64 << 20)]
    )
    service.add_to(server)
    tokens = grpc.unary_stream_rpc_method_handler(_send_tokens)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", {"Tokens": tokens}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_drain, args=(listener,), daemon=True).start()
        parent.send(Ports(port, listener.getsockname()[1]))
        await asyncio.to_thread(parent.poll, None)
        listener.shutdown(socket.SHUT_RDWR)
    await service.close()
    await server.stop(0)


def _run(setting: Setting, parent: Connection) -> None:
    if setting.device == "cpu":
        settle(setting.core)
    with checksums(setting.has_checksum):
        uvloop.run(_serve(setting, parent))


@contextmanager
def receiver(setting: Setting) -> Iterator[Ports]:
    """A process that receives hand-offs until the context ends."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(setting, theirs))
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        ours.close()
        process.join()
