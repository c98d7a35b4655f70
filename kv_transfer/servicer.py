"""The receiver's gRPC service: Handshake, Push and Frames."""

import asyncio
import logging

import grpc

from engine.kv_layout import KVLayout
from kv_transfer.compatibility import IncompatiblePeers, check_compatible, layout_from_proto
from kv_transfer.grpc_transport import (
    FRAMES_SERVICE,
    FramesContext,
    GrpcReceiverLink,
    PushContext,
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
        terms: of every grant; a frame that is being received and one that is being scattered both count.
    """

    def __init__(
        self, door: HandoffDoor, layout: KVLayout, terms: Grant, *, worker_id: str, epoch: int
    ) -> None:
        self._door = door
        self._layout = layout
        self._terms = terms
        self._worker_id = worker_id
        self._epoch = epoch
        self._live: dict[TransferId, tuple[Open, GrpcReceiverLink]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds the service and its undeclared method of raw bytes."""
        kv_pb2_grpc.add_KvTransferServicer_to_server(self, server)
        frames = grpc.stream_unary_rpc_method_handler(self.Frames)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(FRAMES_SERVICE, {"Frames": frames}),)
        )

    async def close(self) -> None:
        """Ends every hand-off and returns when each is admitted or released."""
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def Handshake(
        self,
        request: kv_pb2.HandshakeRequest,
        context: grpc.aio.ServicerContext[kv_pb2.HandshakeRequest, kv_pb2.HandshakeReply],
    ) -> kv_pb2.HandshakeReply:
        try:
            check_compatible(self._layout, layout_from_proto(request.layout), request.protocol_version)
        except IncompatiblePeers as error:
            log.warning("refused %s: %s", request.worker_id, error)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return kv_pb2.HandshakeReply(worker_id=self._worker_id, epoch=self._epoch)

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
        if not link.join(context):
            await context.abort(grpc.StatusCode.ABORTED, f"{transfer} has its frames' stream already")
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
            sink = await self._let_in(opening, link)
            self._live[opening.transfer] = (opening, link)
            try:
                await HandoffInbound(link, sink, self._layout, opening.num_tokens, self._terms).run()
            finally:
                del self._live[opening.transfer]
        except LinkBroken as broken:
            link.end(Drop(broken.cause, broken.detail))
        except HandoffRefused as refusal:
            link.end_with(_CODE_OF_REFUSAL.get(type(refusal), grpc.StatusCode.ABORTED), str(refusal))
        except Exception as error:
            log.exception("a Push failed at its receiver")
            link.end(Drop(DropCause.INTERNAL, repr(error)))

    async def _read_open(self, link: GrpcReceiverLink) -> Open:
        message = await link.receive()
        if not isinstance(message, Open):
            raise LinkBroken(DropCause.PUSH_BROKEN, f"{type(message).__name__} before Open")
        return message

    async def _let_in(self, opening: Open, link: GrpcReceiverLink) -> HandoffSink:
        """Waits for the door, as long as the sender does.

        Raises:
            LinkBroken: the sender went first.
            HandoffRefused: the door's.
        """
        asking = asyncio.ensure_future(self._door.authorize(opening))
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
