"""The messages of a hand-off to and from protobuf."""

from kv_transfer.messages import (
    Accepted,
    Close,
    CloseReason,
    Commit,
    Credit,
    Grant,
    Open,
    ReceiverMessage,
    SenderMessage,
    TransferId,
)
from protos import kv_pb2

_REASON_TO_PROTO = {
    CloseReason.ENDED_AT_FIRST_TOKEN: kv_pb2.CLOSE_REASON_ENDED_AT_FIRST_TOKEN,
    CloseReason.CANCELLED: kv_pb2.CLOSE_REASON_CANCELLED,
    CloseReason.FAILED: kv_pb2.CLOSE_REASON_FAILED,
}
_REASON_FROM_PROTO = {proto: reason for reason, proto in _REASON_TO_PROTO.items()}


class MalformedMessage(ValueError):
    """A field that must be set is not, or is out of range."""


def sender_message_to_proto(message: SenderMessage) -> kv_pb2.PushMessage:
    match message:
        case Open():
            return kv_pb2.PushMessage(
                open=kv_pb2.Open(
                    transfer=kv_pb2.TransferId(
                        session=message.transfer.session, number=message.transfer.number
                    ),
                    secret=message.secret,
                    receiver_epoch=message.receiver_epoch,
                    sender_id=message.sender_id,
                    sender_epoch=message.sender_epoch,
                    num_tokens=message.num_tokens,
                    bulk_token=message.bulk_token,
                    layout_id=message.layout_id,
                )
            )
        case Commit(num_frames, first_tokens):
            return kv_pb2.PushMessage(commit=kv_pb2.Commit(num_frames=num_frames, first_tokens=first_tokens))
        case Close(reason, detail):
            return kv_pb2.PushMessage(close=kv_pb2.Close(reason=_REASON_TO_PROTO[reason], detail=detail))


def sender_message_from_proto(message: kv_pb2.PushMessage) -> SenderMessage:
    """
    Raises:
        MalformedMessage: see there.
    """
    match message.WhichOneof("message"):
        case "open":
            return _open_from_proto(message.open)
        case "commit":
            return Commit(message.commit.num_frames, tuple(message.commit.first_tokens))
        case "close":
            reason = _REASON_FROM_PROTO.get(message.close.reason, CloseReason.FAILED)
            return Close(reason, message.close.detail)
        case _:
            raise MalformedMessage("an empty PushMessage")


def _open_from_proto(opening: kv_pb2.Open) -> Open:
    if opening.num_tokens < 1:
        raise MalformedMessage("Open.num_tokens: at least 1")
    return Open(
        transfer=TransferId(opening.transfer.session, opening.transfer.number),
        secret=opening.secret,
        receiver_epoch=opening.receiver_epoch,
        sender_id=opening.sender_id,
        sender_epoch=opening.sender_epoch,
        num_tokens=opening.num_tokens,
        bulk_token=opening.bulk_token,
        layout_id=opening.layout_id,
    )


def receiver_message_to_proto(message: ReceiverMessage) -> kv_pb2.PushReply:
    match message:
        case Grant():
            return kv_pb2.PushReply(
                grant=kv_pb2.Grant(
                    frame_credits=message.frame_credits,
                    max_frame_bytes=message.max_frame_bytes,
                    cached_tokens=message.cached_tokens,
                )
            )
        case Credit(frames):
            return kv_pb2.PushReply(credit=kv_pb2.Credit(frames=frames))
        case Accepted(kv_bytes):
            return kv_pb2.PushReply(accepted=kv_pb2.Accepted(kv_bytes=kv_bytes))


def receiver_message_from_proto(message: kv_pb2.PushReply) -> ReceiverMessage:
    """
    Raises:
        MalformedMessage: see there.
    """
    match message.WhichOneof("message"):
        case "grant":
            return _grant_from_proto(message.grant)
        case "credit":
            return Credit(message.credit.frames)
        case "accepted":
            return Accepted(message.accepted.kv_bytes)
        case _:
            raise MalformedMessage("an empty PushReply")


def _grant_from_proto(grant: kv_pb2.Grant) -> Grant:
    return Grant(grant.frame_credits, grant.max_frame_bytes, grant.cached_tokens)
