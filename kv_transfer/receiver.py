"""The receiver's half of a hand-off: events in, actions out. It knows no transport, engine or clock."""

from dataclasses import dataclass, replace
from enum import Enum, auto

from engine.kv_layout import KVLayout
from kv_transfer.coverage import BadRegion, Coverage, Region
from kv_transfer.frame import HEADER_BYTES, Frame
from kv_transfer.messages import CLOSE_CAUSES, Close, Commit, Drop, DropCause, Grant


@dataclass(frozen=True, slots=True)
class BlocksReserved:
    """The engine set aside blocks for the whole prompt; those of its first tokens hold their KV already."""

    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ReserveFailed:
    drop: Drop


@dataclass(frozen=True, slots=True)
class FrameArrived:
    """Its checksum matched, or will be taken by who scatters it."""

    frame: Frame


@dataclass(frozen=True, slots=True)
class FrameDamaged:
    detail: str


@dataclass(frozen=True, slots=True)
class FramesFinished:
    """The sender said that no frame comes any more."""


@dataclass(frozen=True, slots=True)
class ScatterDone:
    """The engine copied the frame's bytes into its pages."""

    number: int


@dataclass(frozen=True, slots=True)
class ScatterFailed:
    number: int
    drop: Drop


@dataclass(frozen=True, slots=True)
class AdmitDone:
    """The engine runs the sequence."""


@dataclass(frozen=True, slots=True)
class AdmitFailed:
    drop: Drop


@dataclass(frozen=True, slots=True)
class LinkEnded:
    """The control stream or the frames' stream ended or broke."""

    detail: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """The receiver's own side gives the attempt up: cancelled, session over, leaving, engine failed."""

    drop: Drop


ReceiverEvent = (
    BlocksReserved
    | ReserveFailed
    | FrameArrived
    | FrameDamaged
    | FramesFinished
    | ScatterDone
    | ScatterFailed
    | AdmitDone
    | AdmitFailed
    | LinkEnded
    | Dropped
    | Commit
    | Close
)


@dataclass(frozen=True, slots=True)
class RequestBlocks:
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SendGrant:
    grant: Grant


@dataclass(frozen=True, slots=True)
class SendCredit:
    frames: int


@dataclass(frozen=True, slots=True)
class ScatterFrame:
    frame: Frame


@dataclass(frozen=True, slots=True)
class AdmitSequence:
    first_tokens: tuple[int, ...]
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class SendAccepted:
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class EndLink:
    """Tell the sender, if it is still there."""

    drop: Drop


@dataclass(frozen=True, slots=True)
class FreeBlocks:
    """Free what is held or asked for, and report the outcome. Nothing is being scattered."""

    drop: Drop


ReceiverAction = (
    RequestBlocks
    | SendGrant
    | SendCredit
    | ScatterFrame
    | AdmitSequence
    | SendAccepted
    | EndLink
    | FreeBlocks
)


class ReceiverState(Enum):
    RESERVING = auto()
    RECEIVING = auto()
    # The commit is complete. From here the sequence belongs to the engine, whatever the link does.
    ADMITTING = auto()
    ADMITTED = auto()
    # Over, but scatters are still under way.
    DRAINING = auto()
    FREED = auto()


class HandoffReceiver:
    """Receives the K and V of one prompt into blocks that it granted.

    Invariants: it ends in ADMITTED or in FREED, once, and never both; the sequence is admitted only when
    the commit and every layer of every token are there and scattered; no frame is scattered before the
    grant, outside it, twice or after the end; blocks are freed only when nothing is being scattered.
    """

    def __init__(self, layout: KVLayout, num_tokens: int, terms: Grant) -> None:
        self._token_bytes = tuple(layout.layer_token_bytes(layer) for layer in range(len(layout.layers)))
        self._num_tokens = num_tokens
        self._terms = terms
        self._state = ReceiverState.RESERVING
        self._coverage = Coverage(len(layout.layers), num_tokens)
        self._numbers: set[int] = set()
        self._kv_bytes = 0
        self._credits = terms.frame_credits
        self._credits_held_back = 0
        self._scattering: set[int] = set()
        self._frames_finished = False
        self._commit: Commit | None = None
        self._drop: Drop | None = None
        self._actions: list[ReceiverAction] = []

    @property
    def state(self) -> ReceiverState:
        return self._state

    def start(self) -> tuple[ReceiverAction, ...]:
        """Called once, before any event."""
        return (RequestBlocks(self._num_tokens),)

    def handle(self, event: ReceiverEvent) -> tuple[ReceiverAction, ...]:
        """Takes what happened; returns what to do, in order. What comes too late is ignored."""
        match self._state:
            case ReceiverState.RESERVING:
                self._while_reserving(event)
            case ReceiverState.RECEIVING:
                self._while_receiving(event)
            case ReceiverState.ADMITTING:
                self._while_admitting(event)
            case ReceiverState.DRAINING:
                self._while_draining(event)
            case ReceiverState.ADMITTED | ReceiverState.FREED:
                pass
        actions, self._actions = tuple(self._actions), []
        return actions

    def _while_reserving(self, event: ReceiverEvent) -> None:
        match event:
            case BlocksReserved(cached_tokens):
                self._state = ReceiverState.RECEIVING
                self._coverage = Coverage(len(self._token_bytes), self._num_tokens, cached_tokens)
                self._actions.append(SendGrant(replace(self._terms, cached_tokens=cached_tokens)))
            case ReserveFailed(drop):
                self._end(drop)
            case FrameArrived() | FrameDamaged() | FramesFinished() | Commit():
                self._refuse(f"{type(event).__name__} before the grant")
            case _:
                self._take_ending(event)

    def _while_receiving(self, event: ReceiverEvent) -> None:
        match event:
            case FrameArrived(frame):
                self._take_frame(frame)
            case FrameDamaged(detail):
                self._end(Drop(DropCause.DAMAGED, detail))
            case FramesFinished():
                self._frames_finished = True
            case ScatterDone(number):
                self._scattering.discard(number)
                self._give_credit()
            case ScatterFailed(number, drop):
                self._scattering.discard(number)
                self._end(drop)
            case Commit():
                self._take_commit(event)
            case _:
                self._take_ending(event)
        self._admit_if_complete()

    def _while_admitting(self, event: ReceiverEvent) -> None:
        match event:
            case AdmitDone():
                self._state = ReceiverState.ADMITTED
                self._actions.append(SendAccepted(self._kv_bytes))
            case AdmitFailed(drop):
                self._end(drop)
            case _:
                pass

    def _while_draining(self, event: ReceiverEvent) -> None:
        match event:
            case ScatterDone(number) | ScatterFailed(number, _):
                self._scattering.discard(number)
                self._free_if_drained()
            case _:
                pass

    def _take_ending(self, event: ReceiverEvent) -> None:
        match event:
            case Close(reason, detail):
                self._end(Drop(CLOSE_CAUSES[reason], detail or f"the sender closed: {reason.value}"))
            case LinkEnded(detail):
                self._end(Drop(DropCause.PUSH_BROKEN, detail))
            case Dropped(drop):
                self._end(drop)
            case _:
                pass

    def _take_frame(self, frame: Frame) -> None:
        problem = self._problem_with(frame)
        if problem is not None:
            self._refuse(f"{frame}: {problem}")
            return
        self._numbers.add(frame.number)
        self._kv_bytes += frame.payload_bytes
        self._credits -= 1
        self._scattering.add(frame.number)
        self._actions.append(ScatterFrame(frame))

    def _problem_with(self, frame: Frame) -> str | None:
        """Why the frame is refused. Takes it into the coverage if it is not."""
        if self._frames_finished:
            return "after the last frame"
        if self._credits == 0:
            return "no credit"
        if frame.payload_bytes + HEADER_BYTES > self._terms.max_frame_bytes:
            return f"longer than {self._terms.max_frame_bytes} bytes"
        if frame.number in self._numbers:
            return "its number was there already"
        if self._commit is not None and frame.number >= self._commit.num_frames:
            return "the commit does not name it"
        region = Region(frame.layer_start, frame.layer_count, frame.token_start, frame.token_count)
        num_bytes = sum(self._token_bytes[region.layers.start : region.layers.stop]) * region.token_count
        if frame.payload_bytes != num_bytes:
            return f"{frame.payload_bytes} bytes of payload, the layout says {num_bytes}"
        try:
            self._coverage.add(region)
        except BadRegion as error:
            return str(error)
        return None

    def _take_commit(self, commit: Commit) -> None:
        if self._commit is not None:
            self._refuse("a second commit")
        elif any(number >= commit.num_frames for number in self._numbers):
            self._refuse(f"frames beyond the commit's {commit.num_frames} came")
        else:
            self._commit = commit

    def _admit_if_complete(self) -> None:
        if self._state is not ReceiverState.RECEIVING or self._commit is None:
            return
        if len(self._numbers) < self._commit.num_frames:
            if self._frames_finished:
                self._refuse(f"{len(self._numbers)} of the commit's {self._commit.num_frames} frames came")
        elif not self._coverage.complete:
            self._refuse("the commit's frames leave tokens or layers out")
        elif not self._scattering:
            self._state = ReceiverState.ADMITTING
            self._actions.append(AdmitSequence(self._commit.first_tokens, self._kv_bytes))

    def _give_credit(self) -> None:
        """Credits go back a quarter of the window at a time: fewer messages, and the sender never stalls."""
        self._credits_held_back += 1
        if self._coverage.complete or self._credits_held_back < max(1, self._terms.frame_credits // 4):
            return
        self._actions.append(SendCredit(self._credits_held_back))
        self._credits += self._credits_held_back
        self._credits_held_back = 0

    def _refuse(self, detail: str) -> None:
        self._end(Drop(DropCause.PUSH_BROKEN, detail))

    def _end(self, drop: Drop) -> None:
        self._drop = drop
        self._state = ReceiverState.DRAINING
        self._actions.append(EndLink(drop))
        self._free_if_drained()

    def _free_if_drained(self) -> None:
        if self._drop is not None and not self._scattering:
            self._state = ReceiverState.FREED
            self._actions.append(FreeBlocks(self._drop))
