"""The receiver's gRPC service: Handshake, Push, and Frames or Bulk."""

import asyncio
import logging
import secrets

import grpc

from engine.kv_layout import KVLayout
from kv_transfer.bulk import BulkAcceptance, SlotTerms, TransportFailed
from kv_transfer.bulk_receiver import BulkContext, BulkInbox, BulkReceiver
from kv_transfer.compatibility import IncompatiblePeers, check_compatible, layout_from_proto
from kv_transfer.grpc_transport import (
    FRAMES_SERVICE,
    FramesContext,
    GrpcReceiverLink,
    PushContext,
    StreamFrameReader,
    read_frames_metadata,
    secrets_match,
)
from kv_transfer.inbound import HandoffInbound
from kv_transfer.messages import Drop, DropCause, Grant, Open, TransferId
from kv_transfer.sink import (
    HandoffDoor,
    HandoffRefused,
    HandoffSink,
    Leaving,
    NumberOver,
    UnknownSession,
    WrongEpoch,
    WrongSecret,
)
from kv_transfer.transport import LinkBroken
from kv_transfer.transport_choice import GRPC, NoCommonTransport, Transports
from kv_transfer.wire import MalformedMessage
from protos import kv_pb2, kv_pb2_grpc

log = logging.getLogger(__name__)

_CODE_OF_REFUSAL: dict[type[HandoffRefused], grpc.StatusCode] = {
    UnknownSession: grpc.StatusCode.NOT_FOUND,
    NumberOver: grpc.StatusCode.ABORTED,
    WrongSecret: grpc.StatusCode.PERMISSION_DENIED,
    WrongEpoch: grpc.StatusCode.FAILED_PRECONDITION,
    Leaving: grpc.StatusCode.UNAVAILABLE,
}


class KvTransferService(kv_pb2_grpc.KvTransferServicer):
    """Lets hand-offs in through a door, and runs them.

    Args:
        layout: of the engine behind the door.
        converts: whether K and V may come in other dtypes. Another block size is always right.
        terms: of every grant; a frame that is being received and one that is being scattered both count.
        transports: the ways for frames that senders may go.
    """

    def __init__(
        self,
        door: HandoffDoor,
        layout: KVLayout,
        terms: Grant,
        *,
        worker_id: str,
        epoch: int,
        transports: Transports = Transports(),
        converts: bool = False,
    ) -> None:
        self._door = door
        # What may come, by its id. Few: they differ in dtypes and block size only.
        self._layouts = [layout]
        self._converts = converts
        self._terms = terms
        self._worker_id = worker_id
        self._epoch = epoch
        self._transports = transports
        self._live: dict[TransferId, tuple[Open, GrpcReceiverLink]] = {}
        # By token.
        self._bulks: dict[bytes, BulkReceiver] = {}
        # Those that the sender may take for connected before this end does.
        self._forming: dict[bytes, asyncio.Event] = {}
        self._running_bulks: set[asyncio.Task[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds the service and its undeclared method of raw bytes."""
        kv_pb2_grpc.add_KvTransferServicer_to_server(self, server)
        frames = grpc.stream_unary_rpc_method_handler(self.Frames)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(FRAMES_SERVICE, {"Frames": frames}),)
        )

    async def close(self) -> None:
        """Ends every hand-off and returns when each is admitted or released. Then it ends every bulk."""
        for tasks in (self._tasks, self._running_bulks):
            ending = [*tasks]
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)

    async def Handshake(
        self,
        request: kv_pb2.HandshakeRequest,
        context: grpc.aio.ServicerContext[kv_pb2.HandshakeRequest, kv_pb2.HandshakeReply],
    ) -> kv_pb2.HandshakeReply:
        try:
            layout = layout_from_proto(request.layout)
            check_compatible(self._layouts[0], layout, request.protocol_version, converts=self._converts)
            offers = request.transports or [kv_pb2.TransportOffer(name=GRPC)]
            transport = await self._transports.choose(offers)
        except (IncompatiblePeers, NoCommonTransport) as error:
            log.warning("refused %s: %s", request.worker_id, error)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        log.info("%s: its frames come by %s", request.worker_id, transport)
        return kv_pb2.HandshakeReply(
            worker_id=self._worker_id,
            epoch=self._epoch,
            transport=transport,
            layout_id=self._layout_id(layout),
        )

    def _layout_id(self, layout: KVLayout) -> int:
        if layout not in self._layouts:
            self._layouts.append(layout)
        return self._layouts.index(layout)

    async def Bulk(self, request_iterator: object, context: BulkContext) -> None:
        try:
            token = secrets.token_bytes(16)
            await self._form_bulk(token, context)
            await self._run_bulk(token, context)
        except TransportFailed as error:
            log.warning("a pair broke: %s", error)
            await context.abort(grpc.StatusCode.ABORTED, str(error))

    async def _form_bulk(self, token: bytes, context: BulkContext) -> None:
        """
        Raises:
            TransportFailed: see BulkTransport.
        """
        accepted = await self._accept_bulk(context)
        ready = accepted.ready
        ready.token = token
        self._forming[token] = asyncio.Event()
        try:
            await context.write(kv_pb2.BulkReply(ready=ready))
            reader = await accepted.connect()
            self._bulks[token] = BulkReceiver(reader, SlotTerms(ready.num_slots, ready.slot_bytes))
        finally:
            accepted.discard()
            self._forming.pop(token).set()

    async def _run_bulk(self, token: bytes, context: BulkContext) -> None:
        """
        Raises:
            TransportFailed: see BulkReceiver, or this worker closes.
        """
        running = asyncio.create_task(self._bulks[token].run(context))
        self._running_bulks.add(running)
        try:
            await asyncio.wait({running})
        finally:
            running.cancel()
            del self._bulks[token]
            self._running_bulks.discard(running)
        if running.cancelled():
            raise TransportFailed("the receiver stops")
        running.result()

    async def _accept_bulk(self, context: BulkContext) -> BulkAcceptance:
        """
        Raises:
            TransportFailed: see BulkTransport.
        """
        message = await context.read()
        if not isinstance(message, kv_pb2.BulkMessage) or message.open.receiver_epoch != self._epoch:
            raise TransportFailed("the stream Bulk is meant for another life of this worker")
        transport = self._transports.named(message.open.transport.name)
        if transport is None:
            raise TransportFailed(f"{message.open.transport.name} is not among {self._transports.names}")
        return await transport.accept(message.open)

    async def Push(self, request_iterator: object, context: PushContext) -> None:
        link = GrpcReceiverLink(context)
        # A task of its own: gRPC cancels this method with its call, the hand-off must end in order.
        task = asyncio.create_task(self._serve(link))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            code, detail = await asyncio.shield(link.ended)
        except asyncio.CancelledError:
            link.break_off("the sender's call ended")
            raise
        if code is not grpc.StatusCode.OK:
            await context.abort(code, detail)

    async def Frames(self, request_iterator: object, context: FramesContext) -> bytes:
        try:
            transfer, secret = read_frames_metadata(context.invocation_metadata() or ())
        except MalformedMessage as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        live = self._live.get(transfer)
        if live is None:
            await context.abort(grpc.StatusCode.ABORTED, f"{transfer} is not under way")
        opening, link = live
        if not secrets_match(opening.secret, secret):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"wrong secret for {transfer}")
        if not link.join(StreamFrameReader(context)):
            await context.abort(grpc.StatusCode.ABORTED, f"{transfer} has a way for its frames already")
        try:
            code, detail = await asyncio.shield(link.ended)
        except asyncio.CancelledError:
            link.break_off("the sender's stream of frames ended")
            raise
        if code is not grpc.StatusCode.OK:
            await context.abort(code, detail)
        return b""

    async def _serve(self, link: GrpcReceiverLink) -> None:
        try:
            opening = await self._read_open(link)
            if (forming := self._forming.get(opening.bulk_token)) is not None:
                await forming.wait()
            if opening.layout_id >= len(self._layouts):
                raise LinkBroken(DropCause.PUSH_BROKEN, f"no handshake named a layout {opening.layout_id}")
            layout = self._layouts[opening.layout_id]
            sink = await self._let_in(opening, layout, link)
            inbox = self._join_bulk(opening, link)
            self._live[opening.transfer] = (opening, link)
            try:
                await HandoffInbound(link, sink, layout, opening.num_tokens, self._terms).run()
            finally:
                del self._live[opening.transfer]
                if inbox is not None:
                    inbox.close()
        except LinkBroken as broken:
            link.end(Drop(broken.cause, broken.detail))
        except HandoffRefused as refusal:
            link.end_with(_CODE_OF_REFUSAL.get(type(refusal), grpc.StatusCode.ABORTED), str(refusal))
        except Exception as error:
            log.exception("a Push failed at its receiver")
            link.end(Drop(DropCause.INTERNAL, repr(error)))

    def _join_bulk(self, opening: Open, link: GrpcReceiverLink) -> BulkInbox | None:
        """None: the frames come by a stream `Frames`, or the pair is broken and so is the link."""
        if not opening.bulk_token:
            return None
        bulk = self._bulks.get(opening.bulk_token)
        if bulk is None:
            link.end_with(grpc.StatusCode.UNAVAILABLE, "the pair is broken")
            link.break_off("the pair is broken")
            return None
        inbox = bulk.attach(opening.transfer)
        link.join_bulk(inbox)
        return inbox

    async def _read_open(self, link: GrpcReceiverLink) -> Open:
        message = await link.receive()
        if not isinstance(message, Open):
            raise LinkBroken(DropCause.PUSH_BROKEN, f"{type(message).__name__} before Open")
        return message

    async def _let_in(self, opening: Open, layout: KVLayout, link: GrpcReceiverLink) -> HandoffSink:
        """Waits for the door, as long as the sender does.

        Raises:
            LinkBroken: the sender went first.
            HandoffRefused: the door's.
        """
        asking = asyncio.ensure_future(self._door.authorize(opening, layout))
        try:
            await asyncio.wait({asking, link.broken}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self._take_back(asking)
            raise
        if not asking.done():
            await self._take_back(asking)
            raise LinkBroken(DropCause.PUSH_BROKEN, "the sender went before it was let in")
        return asking.result()

    async def _take_back(self, asking: asyncio.Future[HandoffSink]) -> None:
        """A sink that the door gave all the same is released."""
        asking.cancel()
        await asyncio.wait({asking})
        if not asking.cancelled() and asking.exception() is None:
            asking.result().release(Drop(DropCause.PUSH_BROKEN, "the sender went before it was let in"))
