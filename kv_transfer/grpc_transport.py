"""The links of a hand-off: `Push` for control; for the frames a gRPC stream of raw bytes, on a channel of its
own, or the pair's bulk."""

import asyncio
import hmac
from collections.abc import Iterable
from dataclasses import replace
from typing import NoReturn, Protocol

import grpc

from kv_transfer.bulk import TransportFailed
from kv_transfer.bulk_receiver import BulkInbox
from kv_transfer.bulk_sender import BulkSender
from kv_transfer.frame import HEADER_BYTES, Frame, decode, encode
from kv_transfer.messages import (
    Drop,
    DropCause,
    Grant,
    Open,
    ReceiverMessage,
    SenderMessage,
    TransferId,
)
from kv_transfer.transport import Arrival, LinkBroken, PeerLost
from kv_transfer.wire import (
    MalformedMessage,
    receiver_message_from_proto,
    receiver_message_to_proto,
    sender_message_from_proto,
    sender_message_to_proto,
)
from protos import kv_pb2, kv_pb2_grpc
from security.channel_security import ChannelSecurity

FRAMES_SERVICE = "baton.v1.KvTransfer"
FRAMES_METHOD = f"/{FRAMES_SERVICE}/Frames"

# Up to here a longer message makes a stream faster.
_LARGEST_MESSAGE_BYTES = (1 << 20) + HEADER_BYTES

# The server must allow pings this often: grpc.http2.min_recv_ping_interval_without_data_ms.
KEEPALIVE_S = 10

_CONTROL_OPTIONS = (
    # Without it two channels to one address share a connection.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_S * 1000),
    ("grpc.http2.max_pings_without_data", 0),
)
_BULK_OPTIONS = (
    *_CONTROL_OPTIONS,
    ("grpc.max_send_message_length", -1),
)

_CODE_OF_CAUSE = {
    DropCause.DAMAGED: grpc.StatusCode.DATA_LOSS,
    DropCause.INCOMPATIBLE: grpc.StatusCode.FAILED_PRECONDITION,
    DropCause.DRAINING: grpc.StatusCode.UNAVAILABLE,
}
_CAUSE_OF_CODE = {
    grpc.StatusCode.DATA_LOSS: DropCause.DAMAGED,
    grpc.StatusCode.FAILED_PRECONDITION: DropCause.INCOMPATIBLE,
}

# A write into a call that has ended gives INTERNAL when the end's own status has not been read yet.
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL)
# How long after a stream of frames the control stream may end, to tell why.
_CAUSE_LIMIT_S = 1.0

PushContext = grpc.aio.ServicerContext[kv_pb2.PushMessage, kv_pb2.PushReply]
FramesContext = grpc.aio.ServicerContext[bytes, bytes]
FramesMetadata = tuple[tuple[str, str | bytes], ...]


def control_channel(address: str, security: ChannelSecurity) -> grpc.aio.Channel:
    return security.connect(address, _CONTROL_OPTIONS)


def bulk_channel(address: str, security: ChannelSecurity) -> grpc.aio.Channel:
    return security.connect(address, _BULK_OPTIONS)


def link_broken(code: grpc.StatusCode, detail: str | None) -> LinkBroken:
    """What a status that ended a call means."""
    kind = PeerLost if code in _LOST else LinkBroken
    return kind(_CAUSE_OF_CODE.get(code, DropCause.PUSH_BROKEN), f"{code.name}: {detail or 'no detail'}")


def frames_metadata(transfer: TransferId, secret: bytes) -> FramesMetadata:
    """Names the transfer of a `Frames` stream, and proves that it is the sender's."""
    return (
        ("baton-session-bin", transfer.session.encode()),
        ("baton-number", str(transfer.number)),
        ("baton-secret-bin", secret),
    )


def read_frames_metadata(metadata: Iterable[tuple[str, str | bytes]]) -> tuple[TransferId, bytes]:
    """
    Raises:
        MalformedMessage: a field is missing or no number.
    """
    values = dict(metadata)
    try:
        session, secret = values["baton-session-bin"], values["baton-secret-bin"]
        if not isinstance(session, bytes) or not isinstance(secret, bytes):
            raise ValueError("not bytes")
        return TransferId(session.decode(), int(values["baton-number"])), secret
    except (KeyError, ValueError) as error:
        raise MalformedMessage(f"the metadata of Frames: {error!r}") from error


class FrameWriter(Protocol):
    """How the frames of one hand-off leave.

    Attributes:
        max_frame_bytes: of an encoded frame, header included.
        bulk_token: of the bulk that they go by, or empty.
    """

    @property
    def max_frame_bytes(self) -> int: ...

    @property
    def bulk_token(self) -> bytes: ...

    async def write(self, frame: Frame) -> asyncio.Future[None]:
        """Begins to send a frame.

        Returns:
            Ends when the frame's memory is read no more, or with TransportFailed. Not to be cancelled.

        Raises:
            TransportFailed: no frame gets through any more.
        """
        ...

    async def finish(self) -> None: ...

    def abort(self) -> None: ...


class StreamFrameWriter:
    """Frames as raw messages of a call of their own, which begins with the first frame."""

    max_frame_bytes = _LARGEST_MESSAGE_BYTES
    bulk_token = b""

    def __init__(self, bulk: grpc.aio.Channel, opening: Open) -> None:
        self._bulk = bulk
        self._metadata = frames_metadata(opening.transfer, opening.secret)
        self._call: grpc.aio.StreamUnaryCall | None = None

    async def write(self, frame: Frame) -> asyncio.Future[None]:
        if self._call is None:
            self._call = self._bulk.stream_unary(FRAMES_METHOD)(metadata=self._metadata)
        try:
            await self._call.write(encode(frame))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise TransportFailed("the stream of frames broke") from error
        # What gRPC has taken is a copy.
        left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        left.set_result(None)
        return left

    async def finish(self) -> None:
        if self._call is not None:
            await self._call.done_writing()

    def abort(self) -> None:
        if self._call is not None:
            self._call.cancel()


class BulkFrameWriter:
    """Frames by the pair's bulk."""

    def __init__(self, bulk: BulkSender, transfer: TransferId) -> None:
        self._bulk = bulk
        self._transfer = transfer
        self.max_frame_bytes = bulk.terms.slot_bytes + HEADER_BYTES
        self.bulk_token = bulk.token

    async def write(self, frame: Frame) -> asyncio.Future[None]:
        return await self._bulk.write(self._transfer, frame)

    async def finish(self) -> None:
        self._bulk.finish(self._transfer)

    def abort(self) -> None:
        """What is announced goes to scrap at the receiver."""


class GrpcSenderLink:
    """A SenderLink over a `Push` call and whatever its frames leave by."""

    def __init__(self, control: grpc.aio.Channel, frames: FrameWriter, layout_id: int) -> None:
        self._push = kv_pb2_grpc.KvTransferStub(control).Push()
        self._frames = frames
        self._layout_id = layout_id

    async def send(self, message: SenderMessage) -> None:
        if isinstance(message, Open):
            message = replace(message, bulk_token=self._frames.bulk_token, layout_id=self._layout_id)
        try:
            await self._push.write(sender_message_to_proto(message))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._raise_end(self._push)

    async def receive(self) -> ReceiverMessage:
        try:
            message = await self._push.read()
        except grpc.aio.AioRpcError:
            await self._raise_end(self._push)
        if not isinstance(message, kv_pb2.PushReply):
            await self._raise_end(self._push)
        try:
            return self._limited(receiver_message_from_proto(message))
        except MalformedMessage as error:
            raise LinkBroken(DropCause.PUSH_BROKEN, str(error)) from error

    def _limited(self, message: ReceiverMessage) -> ReceiverMessage:
        """A grant for frames that the way for them can carry."""
        if not isinstance(message, Grant):
            return message
        return replace(message, max_frame_bytes=min(message.max_frame_bytes, self._frames.max_frame_bytes))

    async def write_frame(self, frame: Frame) -> asyncio.Future[None]:
        try:
            moving = await self._frames.write(frame)
        except TransportFailed as error:
            await self._raise_end_of_frames(str(error))
        if moving.done() and moving.exception() is None:
            return moving
        return asyncio.ensure_future(self._see_off(moving))

    async def _see_off(self, moving: asyncio.Future[None]) -> None:
        try:
            await asyncio.shield(moving)
        except TransportFailed as error:
            await self._raise_end_of_frames(str(error))

    async def finish_frames(self) -> None:
        await self._frames.finish()

    def abort(self) -> None:
        self._push.cancel()
        self._frames.abort()

    async def _raise_end_of_frames(self, detail: str) -> NoReturn:
        """The receiver ends both ways for one cause, which the control stream tells more surely."""
        ended = asyncio.ensure_future(self._push.code())
        done, _ = await asyncio.wait({ended}, timeout=_CAUSE_LIMIT_S)
        if done:
            await self._raise_end(self._push)
        ended.cancel()
        raise LinkBroken(DropCause.PUSH_BROKEN, detail)

    async def _raise_end(self, call: grpc.aio.Call) -> NoReturn:
        raise link_broken(await call.code(), await call.details())


class StreamArrival:
    """A frame whose bytes are the receiver's own: they were checked when it was decoded (an Arrival)."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame

    async def check(self) -> None:
        """Nobody can have changed it since."""

    def release(self) -> None:
        """Its memory goes with it."""


class FrameReader(Protocol):
    """How the frames of one hand-off arrive."""

    async def read(self) -> Arrival | None:
        """The next, or None after the last one.

        Raises:
            DamagedFrame, TransportFailed: see there.
        """
        ...


class StreamFrameReader:
    """Frames as raw messages of a call of their own."""

    def __init__(self, context: FramesContext) -> None:
        self._context = context

    async def read(self) -> StreamArrival | None:
        try:
            message = await self._context.read()
        except grpc.aio.BaseError as error:
            raise TransportFailed(f"the stream of frames broke: {error}") from error
        return StreamArrival(decode(message)) if isinstance(message, bytes) else None


class GrpcReceiverLink:
    """A ReceiverLink over a `Push` call and the way for frames that joins it. See ReceiverLink.

    Attributes:
        ended: with what status the call, and a `Frames` call, must end. Both servicer methods wait for it.
    """

    def __init__(self, push: PushContext) -> None:
        loop = asyncio.get_running_loop()
        self.broken: asyncio.Future[str] = loop.create_future()
        self.ended: asyncio.Future[tuple[grpc.StatusCode, str]] = loop.create_future()
        self._push = push
        self._frames: asyncio.Future[FrameReader] = loop.create_future()
        self._inbox: BulkInbox | None = None

    async def send(self, message: ReceiverMessage) -> None:
        try:
            await self._push.write(receiver_message_to_proto(message))
        except grpc.aio.BaseError as error:
            raise LinkBroken(DropCause.PUSH_BROKEN, f"the control stream broke: {error}") from error

    async def receive(self) -> SenderMessage:
        try:
            message = await self._push.read()
            if isinstance(message, kv_pb2.PushMessage):
                return sender_message_from_proto(message)
        except (grpc.aio.BaseError, MalformedMessage) as error:
            raise LinkBroken(DropCause.PUSH_BROKEN, f"the control stream broke: {error}") from error
        raise LinkBroken(DropCause.PUSH_BROKEN, "the sender ended the control stream")

    async def read_frame(self) -> Arrival | None:
        frames = await asyncio.shield(self._frames)
        try:
            return await frames.read()
        except TransportFailed as error:
            raise LinkBroken(DropCause.PUSH_BROKEN, str(error)) from error

    def end(self, drop: Drop | None) -> None:
        if drop is None or drop.cause is DropCause.ENDED_AT_FIRST_TOKEN:
            self.end_with(grpc.StatusCode.OK, "")
        elif self._inbox is not None and self._inbox.broken.done():
            # The sender builds another pair, also if it has not heard yet that this one is broken.
            self.end_with(grpc.StatusCode.UNAVAILABLE, drop.detail)
        else:
            self.end_with(_CODE_OF_CAUSE.get(drop.cause, grpc.StatusCode.ABORTED), drop.detail)

    def end_with(self, code: grpc.StatusCode, detail: str) -> None:
        if not self.ended.done():
            self.ended.set_result((code, detail))

    def break_off(self, detail: str) -> None:
        """One of the two calls is known to be over."""
        if not self.broken.done():
            self.broken.set_result(detail)

    def join(self, frames: FrameReader) -> bool:
        """Takes the way for the frames of this hand-off. False: there is one already."""
        if self._frames.done():
            return False
        self._frames.set_result(frames)
        return True

    def join_bulk(self, inbox: BulkInbox) -> None:
        """The frames come by the pair's bulk; its end is the link's."""
        self.join(inbox)
        self._inbox = inbox
        inbox.broken.add_done_callback(lambda broken: self.break_off(broken.result()))


def secrets_match(expected: bytes, given: bytes) -> bool:
    """In constant time."""
    return hmac.compare_digest(expected, given)
