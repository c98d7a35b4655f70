"""The sender's connections: one control and one bulk channel for each life of a receiver."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass

import grpc

from engine.kv_layout import KVLayout
from kv_transfer.compatibility import PROTOCOL_VERSION, layout_to_proto
from kv_transfer.grpc_transport import GrpcSenderLink, bulk_channel, control_channel, link_broken
from kv_transfer.messages import DropCause, Open
from kv_transfer.transport import LinkBroken
from protos import kv_pb2, kv_pb2_grpc


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """A life of a receiver.

    Attributes:
        address: host:port of its gRPC server.
    """

    address: str
    epoch: int


class Peer:
    """A receiver that passed the handshake. Its channels close when it is retired and its last user left."""

    def __init__(self, control: grpc.aio.Channel, bulk: grpc.aio.Channel) -> None:
        self._control = control
        self._bulk = bulk
        self._users = 0
        self.retired = False

    def link(self, opening: Open) -> GrpcSenderLink:
        return GrpcSenderLink(self._control, self._bulk, opening)

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
            await self._control.close()
            await self._bulk.close()


class PeerPool:
    """Connects to receivers, shakes hands with each once, and rebuilds a connection that broke."""

    def __init__(
        self, layout: KVLayout, worker_id: str, epoch: int, *, handshake_limit_s: float = 10.0
    ) -> None:
        self.layout = layout
        self.worker_id = worker_id
        self.epoch = epoch
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
            if not peer.retired:
                peer.join()
                return peer

    async def release(self, peer: Peer) -> None:
        await peer.leave()

    async def discard(self, address: PeerAddress, peer: Peer) -> None:
        """Gives a broken connection back; the next `acquire` builds another."""
        await self._retire(address, peer)
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
        control, bulk = control_channel(address.address), bulk_channel(address.address)
        try:
            await self._shake_hands(address, control)
        except BaseException:
            await control.close()
            await bulk.close()
            raise
        await self._retire_other_lives(address)
        return Peer(control, bulk)

    async def _shake_hands(self, address: PeerAddress, control: grpc.aio.Channel) -> None:
        request = kv_pb2.HandshakeRequest(
            protocol_version=PROTOCOL_VERSION,
            worker_id=self.worker_id,
            epoch=self.epoch,
            layout=layout_to_proto(self.layout),
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

    def _forget_failed(self, address: PeerAddress, task: asyncio.Task[Peer]) -> None:
        if (task.cancelled() or task.exception() is not None) and self._peers.get(address) is task:
            del self._peers[address]

    async def _retire_other_lives(self, address: PeerAddress) -> None:
        for other, task in [*self._peers.items()]:
            if other.address == address.address and other != address and task.done():
                await self._retire(other, task.result())

    async def _retire(self, address: PeerAddress, peer: Peer) -> None:
        task = self._peers.get(address)
        if task is not None and task.done() and task.result() is peer:
            del self._peers[address]
        await peer.retire()
