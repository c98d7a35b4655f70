"""The sending side of bench/transfer.py: hand-offs from memory that holds the KV of a long prompt."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import numpy as np

from bench.transfer_receiver import EPOCH, TOKENS_METHOD, Ports, Setting, checksums, receiver
from kv_transfer.messages import Accepted, TransferId
from kv_transfer.outbound import HandoffOutbound, HandoffTicket
from kv_transfer.peers import PeerAddress, PeerPool
from kv_transfer.transport_choice import transports_for


@dataclass(frozen=True, slots=True)
class Handoff:
    """Seconds until the commit was accepted.

    Attributes:
        whole_s: since the first layer was offered.
        exposed_s: since the last one was.
    """

    whole_s: float
    exposed_s: float


@dataclass(slots=True)
class Sender:
    """One pair: this process, and the receiver's."""

    peers: PeerPool
    ports: Ports
    memory: memoryview
    number: int = 0

    async def hand_off(self, num_tokens: int, table: str = "contiguous", layer_s: float = 0.0) -> Handoff:
        """
        Args:
            layer_s: how long each layer is "computed" before it is offered.
        """
        outbound = HandoffOutbound(self.peers, self._ticket(num_tokens, table))
        await outbound.open()
        layout = self.peers.layout
        first = last = time.perf_counter() + layer_s
        for layer in range(len(layout.layers)):
            if layer_s:
                await asyncio.sleep(layer_s)
            last = time.perf_counter()
            size = layout.layer_token_bytes(layer) * num_tokens
            outbound.offer(layer, 0, num_tokens, self.memory[layer * size : (layer + 1) * size])
        outbound.commit((0,))
        outcome = await outbound.outcome
        accepted = time.perf_counter()
        if not isinstance(outcome, Accepted):
            raise RuntimeError(f"a hand-off of the bench failed: {outcome}")
        await outbound.released
        return Handoff(accepted - first, accepted - last)

    def _ticket(self, num_tokens: int, table: str) -> HandoffTicket:
        self.number += 1
        return HandoffTicket(
            receiver=PeerAddress(f"127.0.0.1:{self.ports.grpc}", EPOCH),
            transfer=TransferId(table, self.number),
            secret=b"",
            num_tokens=num_tokens,
        )

    async def token_delays(self, count: int) -> list[float]:
        """Seconds from a token's leaving the receiver's process to its arrival here."""
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.ports.grpc}") as channel:
            call = channel.unary_stream(TOKENS_METHOD)(b"")
            delays: list[float] = []
            async for sent in call:
                delays.append(time.monotonic() - float(sent))
                if len(delays) == count:
                    break
            call.cancel()
            return delays


@asynccontextmanager
async def sender_to(setting: Setting) -> AsyncIterator[Sender]:
    """A receiving process, and what sends to it."""
    size = setting.max_tokens * setting.layout.token_bytes
    memory = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    with receiver(setting) as ports, checksums(setting.has_checksum):
        transports = transports_for(setting.transport, setting.slots)
        peers = PeerPool(setting.layout, "sender", 2, transports=transports)
        try:
            yield Sender(peers, ports, memory.data)
        finally:
            await peers.close()


def tcp_s(ports: Ports, memory: memoryview, piece_bytes: int = 1 << 20) -> float:
    """Seconds for `memory` over one TCP connection, to a receiver that only reads it."""
    with socket.create_connection(("127.0.0.1", ports.tcp)) as connection:
        started = time.perf_counter()
        connection.sendall(memory.nbytes.to_bytes(8))
        for start in range(0, memory.nbytes, piece_bytes):
            connection.sendall(memory[start : start + piece_bytes])
        connection.recv(1)
        return time.perf_counter() - started


def memcpy_s(memory: memoryview, target: np.ndarray) -> float:
    """Seconds for one thread to copy `memory` into memory that it has written before."""
    source = np.frombuffer(memory, np.uint8)
    started = time.perf_counter()
    np.copyto(target[: len(source)], source)
    return time.perf_counter() - started
