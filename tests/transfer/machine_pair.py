"""A sender and a receiver joined by a network that keeps the order of each stream and nothing else."""

from collections import deque

from hypothesis import strategies as st

from kv_transfer.frame import DamagedFrame, Frame, cut, decode, encode
from kv_transfer.messages import Accepted, Close, Commit, Credit, Drop, Grant, ReceiverMessage, SenderMessage
from kv_transfer.receiver import (
    AdmitDone,
    AdmitSequence,
    BlocksReserved,
    EndLink,
    FrameArrived,
    FrameDamaged,
    FramesFinished,
    FreeBlocks,
    HandoffReceiver,
    LinkEnded,
    ReceiverAction,
    RequestBlocks,
    ScatterDone,
    ScatterFrame,
    SendAccepted,
    SendCredit,
    SendGrant,
)
from kv_transfer.sender import (
    Closed,
    CommitRequested,
    FinishFrames,
    FrameLeft,
    HandoffSender,
    LinkFailed,
    ReleaseBlocks,
    ReportGranted,
    ReportOutcome,
    SendClose,
    SendCommit,
    SenderAction,
    SendFrame,
)
from tests.transfer.prompts import Prompt, empty_kv, write_slice


class Pair:
    """Both machines and what is under way between them: streams in order, engine work in any order."""

    def __init__(self, prompt: Prompt, chunk_tokens: int, terms: Grant) -> None:
        self.sender = HandoffSender(prompt.layout, prompt.num_tokens)
        self.receiver = HandoffReceiver(prompt.layout, prompt.num_tokens, terms)
        self.prompt = prompt
        self.kv = empty_kv(prompt.layout, prompt.num_tokens)
        self.caller: deque = deque()
        self.work = [*prompt.pieces(chunk_tokens), CommitRequested((3,))]
        self.streams: dict[str, deque] = {
            name: deque() for name in ("control", "frames", "replies", "breaks")
        }
        self.engine: list[BlocksReserved | AdmitDone | Frame] = []
        self.released = 0
        self.outcome: Accepted | Drop | Closed | None = None
        self.ends: list[str] = []
        self.on_sender(self.sender.start())
        self.on_receiver(self.receiver.start())

    def on_sender(self, actions: tuple[SenderAction, ...]) -> None:
        for action in actions:
            match action:
                case SendFrame(frame):
                    self.post_frame(encode(frame))
                    self.streams["replies"].append(FrameLeft(frame.number))
                case FinishFrames():
                    self.post_frame(None)
                case SendCommit(num_frames, first_token):
                    self.post_message("control", Commit(num_frames, first_token))
                case SendClose(reason, detail):
                    self.post_message("control", Close(reason, detail))
                case ReportGranted():
                    self.caller.extend(self.work)
                case ReportOutcome(outcome):
                    assert self.outcome is None
                    self.outcome = outcome
                    if isinstance(outcome, Drop):
                        # The link is aborted: that overtakes whatever is under way.
                        self.streams["breaks"].append(LinkEnded("the sender went"))
                case ReleaseBlocks():
                    self.released += 1

    def on_receiver(self, actions: tuple[ReceiverAction, ...]) -> None:
        for action in actions:
            match action:
                case RequestBlocks():
                    self.engine.append(BlocksReserved())
                case SendGrant(grant):
                    self.post_message("replies", grant)
                case SendCredit(frames):
                    self.post_message("replies", Credit(frames))
                case ScatterFrame(frame):
                    assert not self.ends, "a write outside the grant"
                    self.engine.append(frame)
                case AdmitSequence():
                    assert self.prompt.equals(self.kv), "a commit before everything was there"
                    self.engine.append(AdmitDone())
                case SendAccepted(kv_bytes):
                    self.post_message("replies", Accepted(kv_bytes))
                    self.ends.append("admitted")
                case EndLink(drop):
                    self.streams["replies"].append(LinkFailed(drop.cause, drop.detail))
                case FreeBlocks():
                    assert not any(isinstance(work, Frame) for work in self.engine), "freed under a scatter"
                    self.ends.append("freed")

    def post_message(self, stream: str, message: SenderMessage | ReceiverMessage) -> None:
        self.streams[stream].append(message)

    def post_frame(self, sealed: bytes | None) -> None:
        """None: no frame comes any more."""
        self.streams["frames"].append(sealed)

    def steps(self) -> list[str]:
        """What can happen next."""
        ready = [name for name, stream in self.streams.items() if stream]
        return ready + ["caller"] * bool(self.caller) + ["engine"] * bool(self.engine)

    def step(self, name: str, data: st.DataObject) -> None:
        match name:
            case "caller":
                self.on_sender(self.sender.handle(self.caller.popleft()))
            case "replies":
                self.on_sender(self.sender.handle(self.streams[name].popleft()))
            case "control" | "breaks":
                self.on_receiver(self.receiver.handle(self.streams[name].popleft()))
            case "frames":
                sealed = self.streams[name].popleft()
                self.on_receiver(self.receiver.handle(self._frame_event(sealed)))
            case "engine":
                done = self.engine.pop(data.draw(st.integers(0, len(self.engine) - 1)))
                if isinstance(done, Frame):
                    for piece in cut(done, self.prompt.layout):
                        write_slice(self.kv, piece, self.prompt.layout)
                    done = ScatterDone(done.number)
                self.on_receiver(self.receiver.handle(done))

    def _frame_event(self, sealed: bytes | None) -> FramesFinished | FrameArrived | FrameDamaged:
        if sealed is None:
            return FramesFinished()
        try:
            return FrameArrived(decode(sealed))
        except DamagedFrame as error:
            return FrameDamaged(str(error))

    def drain(self, data: st.DataObject) -> None:
        """Lets happen whatever can, in any order."""
        while steps := self.steps():
            self.step(data.draw(st.sampled_from(steps)), data)
