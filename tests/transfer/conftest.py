"""A receiver on a loopback port, and a sender's connections to it."""

import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc
import pytest
import torch

from engine.kv_layout import KVLayout
from kv_transfer.bulk import Memory, SlotTerms
from kv_transfer.messages import Accepted, Drop, Grant, TransferId
from kv_transfer.nixl_transport import is_available as has_nixl
from kv_transfer.outbound import HandoffOutbound, HandoffTicket
from kv_transfer.packer import KVPiece
from kv_transfer.peers import PeerAddress, PeerPool
from kv_transfer.sender import Closed
from kv_transfer.servicer import KvTransferService
from kv_transfer.transport_choice import TransportName, Transports, transports_for
from tests.device import DEVICE
from tests.transfer.prompts import Prompt, make_layout
from tests.transfer.proxy import Proxy
from tests.transfer.sinks import MemoryDoor, MemorySink

SESSION = "a-session"
EPOCH = 2**63 + 11
# Of a bulk of any kind: fewer than sixteen hand-offs have credits for, and no larger than one needs.
SLOTS = SlotTerms(6, 1 << 20)


@dataclass(slots=True)
class Receiver:
    """A service on a port."""

    door: MemoryDoor
    service: KvTransferService
    server: grpc.aio.Server
    port: int

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @classmethod
    async def start(
        cls,
        layout: KVLayout,
        transports: Transports = Transports(),
        *,
        epoch: int = EPOCH,
        terms: Grant | None = None,
        port: int = 0,
    ) -> "Receiver":
        door = MemoryDoor(epoch)
        service = KvTransferService(
            door,
            layout,
            terms or Grant(4, 1 << 20),
            worker_id="decode-1",
            epoch=epoch,
            transports=transports,
        )
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        service.add_to(server)
        bound = server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        await door.connect(SESSION)
        return cls(door, service, server, bound)

    async def stop(self) -> None:
        await self.service.close()
        await self.server.stop(None)


@dataclass(slots=True)
class Wire:
    """The two legs of hand-offs of one prompt.

    Attributes:
        address: of the receiver, as the sender is told it.
    """

    prompt: Prompt
    receiver: Receiver
    peers: PeerPool
    address: str
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(16))

    def make_sink(self) -> MemorySink:
        return MemorySink(self.prompt.layout, self.prompt.num_tokens)

    async def submit(self, number: int = 1, sink: MemorySink | None = None) -> MemorySink:
        """The receiver's leg of an attempt."""
        sink = sink or self.make_sink()
        await self.receiver.door.submit(TransferId(SESSION, number), self.secret, sink)
        return sink

    def outbound(
        self, number: int = 1, *, session: str = SESSION, epoch: int = EPOCH, secret: bytes | None = None
    ) -> HandoffOutbound:
        """The sender's leg."""
        return HandoffOutbound(
            self.peers,
            HandoffTicket(
                receiver=PeerAddress(self.address, epoch),
                transfer=TransferId(session, number),
                secret=self.secret if secret is None else secret,
                num_tokens=self.prompt.num_tokens,
            ),
        )

    def offer_all(self, outbound: HandoffOutbound, chunk_tokens: int = 16) -> None:
        for piece in self.prompt.pieces(chunk_tokens):
            offer(outbound, piece)

    async def hand_off(self, number: int = 1, *, epoch: int = EPOCH) -> Accepted | Drop | Closed:
        """All of the sender's leg."""
        outbound = self.outbound(number, epoch=epoch)
        await outbound.open()
        self.offer_all(outbound)
        outbound.commit((number,))
        outcome = await outbound.outcome
        await outbound.released
        return outcome


def offer(outbound: HandoffOutbound, piece: KVPiece) -> None:
    """Where the way for frames wants it."""
    data = piece.data
    if outbound.memory is Memory.DEVICE:
        data = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(DEVICE)
    outbound.offer(piece.layer, piece.token_start, piece.token_end, data)


WITH_NIXL = pytest.param("nixl", marks=pytest.mark.skipif(not has_nixl(), reason="the extra nixl is missing"))

TRANSPORTS = ["grpc", "shm", "ipc", "gloo", WITH_NIXL, *(["nccl"] if DEVICE.type == "cuda" else [])]


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> TransportName:
    """The way for frames; every test of hand-offs runs over each."""
    return request.param


@pytest.fixture
def transports(transport: TransportName) -> Transports:
    return transports_for(transport, SLOTS, device=DEVICE)


@pytest.fixture
def prompt() -> Prompt:
    return Prompt.random(make_layout(), 40)


@pytest.fixture
async def receiver(prompt: Prompt, transports: Transports) -> AsyncIterator[Receiver]:
    """Frames of a few rows, so that the prompt needs many."""
    receiver = await Receiver.start(prompt.layout, transports, terms=Grant(4, 700))
    yield receiver
    await receiver.stop()


@pytest.fixture
async def proxy(receiver: Receiver) -> AsyncIterator[Proxy]:
    proxy = Proxy(receiver.address)
    await proxy.start()
    yield proxy
    await proxy.die()


@pytest.fixture
async def peers(prompt: Prompt, transports: Transports) -> AsyncIterator[PeerPool]:
    peers = PeerPool(prompt.layout, "prefill-1", epoch=5, transports=transports)
    yield peers
    await peers.close()


@pytest.fixture
def wire(prompt: Prompt, receiver: Receiver, proxy: Proxy, peers: PeerPool) -> Wire:
    return Wire(prompt, receiver, peers, proxy.address)
