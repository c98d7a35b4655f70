"""The sender's half of a hand-off: events in, actions out. It knows no transport, engine or clock."""

from collections import deque
from dataclasses import dataclass

from engine.kv_layout import KVLayout
from kv_transfer.coverage import Coverage, Region
from kv_transfer.frame import Frame
from kv_transfer.messages import Accepted, CloseReason, Credit, Drop, DropCause, Grant
from kv_transfer.packer import FrameLimitTooSmall, FramePacker, KVPiece


@dataclass(frozen=True, slots=True)
class CommitRequested:
    """The first token is sampled; the K and V of every token were ready before."""

    first_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CloseRequested:
    """The hand-off is not wanted any more."""

    reason: CloseReason
    detail: str


@dataclass(frozen=True, slots=True)
class FrameLeft:
    """The transport reads the frame's memory no more."""

    number: int


@dataclass(frozen=True, slots=True)
class LinkFailed:
    """The receiver ended the link, or it broke."""

    cause: DropCause
    detail: str


@dataclass(frozen=True, slots=True)
class LinkGone:
    """The transport is gone and reads no memory at all."""


# A KVPiece is the event that a layer of some tokens is ready.
SenderEvent = (
    Grant | Credit | Accepted | KVPiece | CommitRequested | CloseRequested | FrameLeft | LinkFailed | LinkGone
)


@dataclass(frozen=True, slots=True)
class SendOpen:
    pass


@dataclass(frozen=True, slots=True)
class SendFrame:
    """A credit is in hand for it."""

    frame: Frame


@dataclass(frozen=True, slots=True)
class FinishFrames:
    """No frame comes after this."""


@dataclass(frozen=True, slots=True)
class SendCommit:
    num_frames: int
    first_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendClose:
    reason: CloseReason
    detail: str


@dataclass(frozen=True, slots=True)
class ReportGranted:
    """Pieces of the tokens from `cached_tokens` on may come."""

    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Closed:
    """An outcome: the sender ended the hand-off itself."""

    reason: CloseReason


@dataclass(frozen=True, slots=True)
class ReportOutcome:
    """Once in a hand-off."""

    outcome: Accepted | Drop | Closed


@dataclass(frozen=True, slots=True)
class ReleaseBlocks:
    """Nothing of this hand-off reads the sender's blocks any more. Once in a hand-off."""


SenderAction = (
    SendOpen
    | SendFrame
    | FinishFrames
    | SendCommit
    | SendClose
    | ReportGranted
    | ReportOutcome
    | ReleaseBlocks
)


class HandoffSender:
    """Sends the K and V of one prompt under the receiver's credits.

    Invariants: one outcome; the blocks are released once, after every frame that was sent has left or the
    transport is gone; nothing is sent after the outcome but the Close that made it.
    """

    def __init__(self, layout: KVLayout, num_tokens: int) -> None:
        self._layout = layout
        self._num_tokens = num_tokens
        self._offered = Coverage(len(layout.layers), num_tokens)
        self._packer: FramePacker | None = None
        self._credits = 0
        self._queue: deque[Frame] = deque()
        self._leaving: set[int] = set()
        self._committed = False
        self._finished = False
        self._released = False
        self._outcome: Accepted | Drop | Closed | None = None
        self._actions: list[SenderAction] = []

    @property
    def outcome(self) -> Accepted | Drop | Closed | None:
        """None while the hand-off goes on."""
        return self._outcome

    def start(self) -> tuple[SenderAction, ...]:
        """Called once, before any event."""
        return (SendOpen(),)

    def handle(self, event: SenderEvent) -> tuple[SenderAction, ...]:
        """Takes what happened; returns what to do, in order. After the outcome nearly all is ignored.

        Raises:
            ValueError: the caller offers a piece before the grant, twice, out of range, of the wrong length
                or after the commit, or commits before every layer of every token was offered.
        """
        match event:
            case FrameLeft(number):
                self._leaving.discard(number)
            case LinkGone():
                self._end(Drop(DropCause.PUSH_BROKEN, "the link is gone"))
                self._leaving.clear()
            case _ if self._outcome is None:
                self._handle_live(event)
        self._release_if_left()
        actions, self._actions = tuple(self._actions), []
        return actions

    def _handle_live(self, event: SenderEvent) -> None:
        match event:
            case Grant():
                self._take_grant(event)
            case Credit(frames):
                self._credits += frames
                self._send_frames()
            case Accepted():
                self._take_acceptance(event)
            case KVPiece():
                self._take_piece(event)
            case CommitRequested(first_tokens):
                self._commit(first_tokens)
            case CloseRequested(reason, detail):
                self._actions.append(SendClose(reason, detail))
                self._end(Closed(reason))
            case LinkFailed(cause, detail):
                self._end(Drop(cause, detail))
            case FrameLeft() | LinkGone():
                pass

    def _take_grant(self, grant: Grant) -> None:
        has_sense = grant.frame_credits >= 1 and grant.cached_tokens <= self._num_tokens
        if self._packer is not None or not has_sense:
            self._end(
                Drop(DropCause.PUSH_BROKEN, f"the receiver sent a grant out of order or empty: {grant}")
            )
            return
        try:
            self._packer = FramePacker(self._layout, grant.max_frame_bytes)
        except FrameLimitTooSmall as error:
            self._actions.append(SendClose(CloseReason.FAILED, str(error)))
            self._end(Drop(DropCause.INCOMPATIBLE, str(error)))
            return
        self._credits = grant.frame_credits
        self._offered = Coverage(len(self._layout.layers), self._num_tokens, grant.cached_tokens)
        self._actions.append(ReportGranted(grant.cached_tokens))

    def _take_piece(self, piece: KVPiece) -> None:
        if self._packer is None or self._committed:
            raise ValueError(f"{piece} outside the time between grant and commit")
        self._offered.add(Region(piece.layer, 1, piece.token_start, piece.token_count))
        num_bytes = self._layout.layer_token_bytes(piece.layer) * piece.token_count
        if piece.data.nbytes != num_bytes:
            raise ValueError(f"{piece} has {piece.data.nbytes} bytes, the layout says {num_bytes}")
        self._queue.extend(self._packer.add(piece))
        self._send_frames()

    def _commit(self, first_tokens: tuple[int, ...]) -> None:
        if self._packer is None or self._committed or not self._offered.complete:
            raise ValueError("a commit needs every layer of every token, once")
        self._queue.extend(self._packer.flush())
        self._committed = True
        self._actions.append(SendCommit(self._packer.num_frames, first_tokens))
        self._send_frames()

    def _take_acceptance(self, accepted: Accepted) -> None:
        if not self._finished:
            self._end(Drop(DropCause.PUSH_BROKEN, "the receiver accepted what was not sent"))
            return
        self._end(accepted)

    def _send_frames(self) -> None:
        while self._credits > 0 and self._queue:
            frame = self._queue.popleft()
            self._credits -= 1
            self._leaving.add(frame.number)
            self._actions.append(SendFrame(frame))
        if self._committed and not self._queue and not self._finished:
            self._finished = True
            self._actions.append(FinishFrames())

    def _end(self, outcome: Accepted | Drop | Closed) -> None:
        if self._outcome is not None:
            return
        self._outcome = outcome
        self._queue.clear()
        self._actions.append(ReportOutcome(outcome))

    def _release_if_left(self) -> None:
        over = self._outcome is not None or self._finished
        if over and not self._leaving and not self._released:
            self._released = True
            self._actions.append(ReleaseBlocks())
