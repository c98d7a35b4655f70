"""The sending side of bench/transfer.py: hand-offs from memory that holds the KV of a long prompt."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import numpy as np
import torch
from torch import Tensor

from bench.transfer_receiver import EPOCH, TOKENS_METHOD, Ports, Setting, checksums, receiver, wait_for
from kv_transfer.bulk import Memory
from kv_transfer.frame import Payload
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
    """One pair: this process, and the receiver's.

    Attributes:
        memory: [num_bytes] uint8, the K and V.
        pinned: of the host, as long; memory itself if that is of the host.
    """

    peers: PeerPool
    ports: Ports
    memory: Tensor
    pinned: Tensor
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
            outbound.offer(layer, 0, num_tokens, self._computed(layer * size, size, outbound.memory))
        outbound.commit((0,))
        outcome = await outbound.outcome
        accepted = time.perf_counter()
        if not isinstance(outcome, Accepted):
            raise RuntimeError(f"a hand-off of the bench failed: {outcome}")
        await outbound.released
        return Handoff(accepted - first, accepted - last)

    def _computed(self, start: int, num_bytes: int, memory: Memory) -> Payload:
        """A layer, where the way for frames wants it; brought to the host if need be, as a worker does it."""
        part = self.memory[start : start + num_bytes]
        if memory is Memory.DEVICE:
            return part
        if part.device.type == "cpu":
            return part.numpy().data
        in_host = self.pinned[start : start + num_bytes]
        in_host.copy_(part)
        return in_host.numpy().data

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
    device = torch.device(setting.device)
    in_host = torch.from_numpy(np.random.default_rng(0).integers(0, 256, size, np.uint8))
    memory = in_host.to(device)
    pinned = in_host if device.type == "cpu" else in_host.pin_memory()
    with receiver(setting) as ports, checksums(setting.has_checksum):
        transports = transports_for(setting.transport, setting.slots, device=device)
        peers = PeerPool(setting.layout, "sender", 2, transports=transports)
        try:
            yield Sender(peers, ports, memory, pinned)
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


def copy_s(memory: Tensor, target: Tensor) -> float:
    """Seconds for one thread, or the device, to copy `memory` into memory that was written before."""
    started = time.perf_counter()
    target.copy_(memory)
    wait_for(memory.device)
    return time.perf_counter() - started
