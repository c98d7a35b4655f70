"""A sender and a receiver joined by a network that keeps the order of each stream and nothing else."""

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.frame import Frame, cut, decode, encode
from kv_transfer.messages import Accepted, Close, CloseReason, Commit, Credit, Drop, Grant
from kv_transfer.receiver import (
    AdmitDone,
    AdmitSequence,
    BlocksReserved,
    FrameArrived,
    FramesFinished,
    FreeBlocks,
    HandoffReceiver,
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
    CloseRequested,
    CommitRequested,
    FinishFrames,
    FrameLeft,
    HandoffSender,
    LinkGone,
    ReleaseBlocks,
    ReportGranted,
    ReportOutcome,
    SendClose,
    SendCommit,
    SenderAction,
    SendFrame,
)
from tests.transfer.prompts import Prompt, empty_kv, make_layout, write_slice


class Pair:
    """Both machines and what is under way between them: streams in order, engine work in any order."""

    def __init__(self, prompt: Prompt, chunk_tokens: int, terms: Grant) -> None:
        self.sender = HandoffSender(prompt.layout, prompt.num_tokens)
        self.receiver = HandoffReceiver(prompt.layout, prompt.num_tokens, terms)
        self.layout = prompt.layout
        self.kv = empty_kv(prompt.layout, prompt.num_tokens)
        self.caller: deque = deque()
        self.work = [*prompt.pieces(chunk_tokens), CommitRequested((3,))]
        self.streams: dict[str, deque] = {name: deque() for name in ("control", "frames", "replies")}
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
                    self.streams["frames"].append(encode(frame))
                    self.streams["replies"].append(FrameLeft(frame.number))
                case FinishFrames():
                    self.streams["frames"].append(None)
                case SendCommit(num_frames, first_token):
                    self.streams["control"].append(Commit(num_frames, first_token))
                case SendClose(reason, detail):
                    self.streams["control"].append(Close(reason, detail))
                case ReportGranted():
                    self.caller.extend(self.work)
                case ReportOutcome(outcome):
                    assert self.outcome is None
                    self.outcome = outcome
                case ReleaseBlocks():
                    self.released += 1

    def on_receiver(self, actions: tuple[ReceiverAction, ...]) -> None:
        for action in actions:
            match action:
                case RequestBlocks():
                    self.engine.append(BlocksReserved())
                case SendGrant(grant):
                    self.streams["replies"].append(grant)
                case SendCredit(frames):
                    self.streams["replies"].append(Credit(frames))
                case ScatterFrame(frame):
                    self.engine.append(frame)
                case AdmitSequence():
                    self.engine.append(AdmitDone())
                case SendAccepted(kv_bytes):
                    self.streams["replies"].append(Accepted(kv_bytes))
                    self.ends.append("admitted")
                case FreeBlocks():
                    self.ends.append("freed")

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
            case "control":
                self.on_receiver(self.receiver.handle(self.streams[name].popleft()))
            case "frames":
                sealed = self.streams[name].popleft()
                event = FramesFinished() if sealed is None else FrameArrived(decode(sealed))
                self.on_receiver(self.receiver.handle(event))
            case "engine":
                done = self.engine.pop(data.draw(st.integers(0, len(self.engine) - 1)))
                if isinstance(done, Frame):
                    for piece in cut(done, self.layout):
                        write_slice(self.kv, piece)
                    done = ScatterDone(done.number)
                self.on_receiver(self.receiver.handle(done))


PAIRS = {
    "num_layers": st.integers(1, 3),
    "num_tokens": st.integers(1, 9),
    "chunk_tokens": st.integers(1, 9),
    "credits": st.integers(1, 5),
    "max_frame_bytes": st.sampled_from([112, 200, 1 << 20]),
}


@given(**PAIRS, data=st.data())
@settings(max_examples=100, deadline=None)
def test_every_hand_off_arrives_whatever_overtakes_what(
    num_layers: int,
    num_tokens: int,
    chunk_tokens: int,
    credits: int,
    max_frame_bytes: int,
    data: st.DataObject,
) -> None:
    prompt = Prompt.random(make_layout(num_layers=num_layers), num_tokens)
    pair = Pair(prompt, chunk_tokens, Grant(credits, max_frame_bytes))
    while steps := pair.steps():
        pair.step(data.draw(st.sampled_from(steps)), data)
    assert (pair.outcome, pair.ends, pair.released) == (Accepted(prompt.kv_bytes), ["admitted"], 1)
    assert prompt.equals(pair.kv)


@given(**PAIRS, cancel_after=st.integers(0, 60), data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_cancel_at_any_point_ends_both_sides_once(
    num_layers: int,
    num_tokens: int,
    chunk_tokens: int,
    credits: int,
    max_frame_bytes: int,
    cancel_after: int,
    data: st.DataObject,
) -> None:
    """Conformance 2, 3."""
    prompt = Prompt.random(make_layout(num_layers=num_layers), num_tokens)
    pair = Pair(prompt, chunk_tokens, Grant(credits, max_frame_bytes))
    for _ in range(cancel_after):
        if steps := pair.steps():
            pair.step(data.draw(st.sampled_from(steps)), data)
    pair.on_sender(pair.sender.handle(CloseRequested(CloseReason.CANCELLED, "")))
    while steps := pair.steps():
        pair.step(data.draw(st.sampled_from(steps)), data)
    pair.on_sender(pair.sender.handle(LinkGone()))
    assert len(pair.ends) == 1
    assert isinstance(pair.outcome, Accepted | Closed)
    assert pair.released == 1
