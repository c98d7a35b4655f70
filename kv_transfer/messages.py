"""What the two ends of a hand-off say to each other, as plain values."""

from dataclasses import dataclass, field
from enum import Enum


class DropCause(Enum):
    """Why a hand-off ended without its sequence running at the receiver."""

    ENDED_AT_FIRST_TOKEN = "ended_at_first_token"
    CANCELLED = "cancelled"
    # The stream ended, or its peer broke the protocol.
    PUSH_BROKEN = "push_broken"
    DAMAGED = "damaged"
    INCOMPATIBLE = "incompatible"
    # The request can never run at the receiver.
    INVALID = "invalid"
    DRAINING = "draining"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Drop:
    """The end of a hand-off whose sequence does not run at the receiver."""

    cause: DropCause
    detail: str


class CloseReason(Enum):
    """Why the sender ends a hand-off without a commit."""

    ENDED_AT_FIRST_TOKEN = "ended_at_first_token"
    CANCELLED = "cancelled"
    FAILED = "failed"


CLOSE_CAUSES = {
    CloseReason.ENDED_AT_FIRST_TOKEN: DropCause.ENDED_AT_FIRST_TOKEN,
    CloseReason.CANCELLED: DropCause.CANCELLED,
    CloseReason.FAILED: DropCause.PUSH_BROKEN,
}


@dataclass(frozen=True, slots=True)
class TransferId:
    """Names a hand-off: the router's session with the receiver, and the attempt's number in it."""

    session: str
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """The sender's first message.

    Attributes:
        receiver_epoch: the life of the receiver that the sender was told of.
        num_tokens: tokens whose K and V will come, at least one.
        bulk_token: of the pair's bulk that the frames will come by; empty: by the stream `Frames`.
        layout_id: of what comes, as the handshake named it.
    """

    transfer: TransferId
    secret: bytes = field(repr=False)
    receiver_epoch: int
    sender_id: str
    sender_epoch: int
    num_tokens: int
    bulk_token: bytes = field(default=b"", repr=False)
    layout_id: int = 0


@dataclass(frozen=True, slots=True)
class Grant:
    """Blocks for the whole prompt are set aside.

    Attributes:
        frame_credits: frames that may be under way at once, at least one.
        max_frame_bytes: of an encoded frame, header included.
        cached_tokens: the receiver has the KV of that many first tokens; only what follows is sent.
    """

    frame_credits: int
    max_frame_bytes: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Credit:
    """That many frames more may be sent."""

    frames: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Frames 0 to num_frames - 1 are needed; each sample goes on from its first token."""

    num_frames: int
    first_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Close:
    """The sender ends the hand-off without a commit, or takes its commit back."""

    reason: CloseReason
    detail: str


@dataclass(frozen=True, slots=True)
class Accepted:
    """The commit is complete and the sequence is admitted."""

    kv_bytes: int


SenderMessage = Open | Commit | Close
ReceiverMessage = Grant | Credit | Accepted
