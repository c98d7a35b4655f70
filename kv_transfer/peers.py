"""The sender's connections: for each life of a receiver its channels, and the way for frames."""

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass

import grpc

from engine.kv_layout import KVLayout
from kv_transfer.bulk import BulkOffer, Memory, TransportFailed
from kv_transfer.bulk_sender import BulkSender
from kv_transfer.compatibility import PROTOCOL_VERSION, layout_to_proto
from kv_transfer.grpc_transport import (
    BulkFrameWriter,
    GrpcSenderLink,
    StreamFrameWriter,
    bulk_channel,
    control_channel,
    link_broken,
)
from kv_transfer.messages import DropCause, Open
from kv_transfer.transport import LinkBroken, PeerLost
from kv_transfer.transport_choice import GRPC, Transports
from protos import kv_pb2, kv_pb2_grpc
from security.channel_security import ChannelSecurity, Plaintext

log = logging.getLogger(__name__)

# A way for frames that broke that often between two workers, without a hand-off in between, is left out.
_MOST_FAILURES = 2


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """A life of a receiver.

    Attributes:
        address: host:port of its gRPC server.
    """

    address: str
    epoch: int


class Peer:
    """A receiver that passed the handshake. All of it closes when it is retired and its last user left.

    Attributes:
        transport: the name of the way for frames.
        memory: where the payloads of frames must lie.
    """

    def __init__(
        self, control: grpc.aio.Channel, frames: grpc.aio.Channel | BulkSender, layout_id: int
    ) -> None:
        self._control = control
        self._frames = frames
        self._layout_id = layout_id
        self._users = 0
        self.retired = False
        self.transport = frames.transport if isinstance(frames, BulkSender) else GRPC
        self.memory = frames.memory if isinstance(frames, BulkSender) else Memory.HOST

    @property
    def is_usable(self) -> bool:
        is_broken = isinstance(self._frames, BulkSender) and self._frames.broken.done()
        return not self.retired and not is_broken

    def link(self, opening: Open) -> GrpcSenderLink:
        if isinstance(self._frames, BulkSender):
            writer = BulkFrameWriter(self._frames, opening.transfer)
        else:
            writer = StreamFrameWriter(self._frames, opening)
        return GrpcSenderLink(self._control, writer, self._layout_id)

    def join(self) -> None:
        self._users += 1

    async def leave(self) -> None:
        self._users -= 1
        await self._close_if_unused()

    async def retire(self) -> None:
        self.retired = True
        await self._close_if_unused()

    async def _close_if_unused(self) -> None:
        if self.retired and self._users == 0:
            await self._frames.close()
            await self._control.close()


class PeerPool:
    """Connects to receivers, shakes hands with each once, and rebuilds a connection that broke.

    Args:
        layout: of what is handed off.
    """

    def __init__(
        self,
        layout: KVLayout,
        worker_id: str,
        epoch: int,
        *,
        transports: Transports = Transports(),
        security: ChannelSecurity = Plaintext(),
        handshake_limit_s: float = 10.0,
    ) -> None:
        self.layout = layout
        self.worker_id = worker_id
        self.epoch = epoch
        self._transports = transports
        self._failures: Counter[tuple[PeerAddress, str]] = Counter()
        self._pair_epochs: Counter[PeerAddress] = Counter()
        self._security = security
        self._handshake_limit_s = handshake_limit_s
        self._peers: dict[PeerAddress, asyncio.Task[Peer]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def acquire(self, address: PeerAddress) -> Peer:
        """The peer's connection, to be given back to `release` or `discard`.

        Raises:
            LinkBroken: INCOMPATIBLE with both values of what differs, or PUSH_BROKEN.
        """
        while True:
            task = self._peers.get(address)
            if task is None:
                task = asyncio.create_task(self._connect(address), name=f"connect {address}")
                task.add_done_callback(lambda done: self._forget_failed(address, done))
                self._peers[address] = task
            # Shielded: others may wait for the same handshake.
            peer = await asyncio.shield(task)
            if peer.is_usable:
                peer.join()
                return peer
            await self._fail(address, peer)

    async def release(self, address: PeerAddress, peer: Peer) -> None:
        del self._failures[address, peer.transport]
        await peer.leave()

    async def discard(self, address: PeerAddress, peer: Peer) -> None:
        """Gives a broken connection back; the next `acquire` builds another."""
        await self._fail(address, peer)
        await peer.leave()

    def spawn(self, work: Coroutine[None, None, None], name: str) -> None:
        """Runs what drives a hand-off; `close` waits for it."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Breaks every hand-off off and closes every connection."""
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        peers, self._peers = [*self._peers.values()], {}
        for task in peers:
            task.cancel()
        for peer in await asyncio.gather(*peers, return_exceptions=True):
            if isinstance(peer, Peer):
                await peer.retire()

    async def _connect(self, address: PeerAddress) -> Peer:
        control = control_channel(address.address, self._security)
        try:
            peer = await self._pair_up(address, control)
        except BaseException:
            await control.close()
            raise
        await self._retire_other_lives(address)
        log.info("%s: frames go by %s", address.address, peer.transport)
        return peer

    async def _pair_up(self, address: PeerAddress, control: grpc.aio.Channel) -> Peer:
        offers: dict[str, BulkOffer] = {}
        try:
            await self._make(offers, address)
            reply = await self._shake_hands(address, control, offers)
            name = reply.transport or GRPC
            if name == GRPC:
                return Peer(control, bulk_channel(address.address, self._security), reply.layout_id)
            if name not in offers:
                raise LinkBroken(DropCause.PUSH_BROKEN, f"the receiver chose {name}, which was not offered")
            bulk = await self._open_bulk(address, control, offers.pop(name))
            return Peer(control, bulk, reply.layout_id)
        finally:
            for offer in offers.values():
                offer.discard()

    async def _make(self, offers: dict[str, BulkOffer], address: PeerAddress) -> None:
        """By name, best first."""
        for transport in self._transports.bulk:
            is_tried = self._transports.grpc and self._failures[address, transport.name] >= _MOST_FAILURES
            offer = None if is_tried else await transport.offer(self.layout)
            if offer is not None:
                offers[transport.name] = offer

    async def _open_bulk(
        self, address: PeerAddress, control: grpc.aio.Channel, offer: BulkOffer
    ) -> BulkSender:
        self._pair_epochs[address] += 1
        opening = kv_pb2.BulkOpen(
            transport=offer.proto,
            sender_id=self.worker_id,
            sender_epoch=self.epoch,
            receiver_epoch=address.epoch,
            pair_epoch=self._pair_epochs[address],
        )
        try:
            return await BulkSender.open(control, offer, opening, self._handshake_limit_s)
        except TransportFailed as error:
            self._failures[address, offer.proto.name] += 1
            raise PeerLost(DropCause.PUSH_BROKEN, str(error)) from error

    async def _shake_hands(
        self, address: PeerAddress, control: grpc.aio.Channel, offers: dict[str, BulkOffer]
    ) -> kv_pb2.HandshakeReply:
        request = kv_pb2.HandshakeRequest(
            protocol_version=PROTOCOL_VERSION,
            worker_id=self.worker_id,
            epoch=self.epoch,
            layout=layout_to_proto(self.layout),
            transports=[
                *(offer.proto for offer in offers.values()),
                *(kv_pb2.TransportOffer(name=name) for name in self._transports.grpc),
            ],
        )
        try:
            reply = await kv_pb2_grpc.KvTransferStub(control).Handshake(
                request, timeout=self._handshake_limit_s
            )
        except grpc.aio.AioRpcError as error:
            raise link_broken(error.code(), error.details()) from error
        if reply.epoch != address.epoch:
            raise LinkBroken(
                DropCause.PUSH_BROKEN,
                f"epoch: {address.address} is {reply.epoch}, not {address.epoch}: another life answers there",
            )
        return reply

    def _forget_failed(self, address: PeerAddress, task: asyncio.Task[Peer]) -> None:
        if (task.cancelled() or task.exception() is not None) and self._peers.get(address) is task:
            del self._peers[address]

    async def _retire_other_lives(self, address: PeerAddress) -> None:
        for other, task in [*self._peers.items()]:
            if other.address == address.address and other != address and task.done():
                await self._retire(other, task.result())

    async def _fail(self, address: PeerAddress, peer: Peer) -> None:
        if not peer.retired:
            self._failures[address, peer.transport] += 1
        await self._retire(address, peer)

    async def _retire(self, address: PeerAddress, peer: Peer) -> None:
        task = self._peers.get(address)
        if task is not None and task.done() and task.result() is peer:
            del self._peers[address]
        await peer.retire()
