"""The receiver's state machine."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kv_transfer.frame import Frame
from kv_transfer.messages import Close, CloseReason, Commit, Drop, DropCause, Grant
from kv_transfer.packer import FramePacker
from kv_transfer.receiver import (
    AdmitDone,
    AdmitFailed,
    AdmitSequence,
    BlocksReserved,
    Dropped,
    EndLink,
    FrameArrived,
    FrameDamaged,
    FramesFinished,
    FreeBlocks,
    HandoffReceiver,
    LinkEnded,
    ReceiverAction,
    ReceiverEvent,
    RequestBlocks,
    ReserveFailed,
    ScatterDone,
    ScatterFailed,
    ScatterFrame,
    SendAccepted,
    SendCredit,
    SendGrant,
)
from tests.transfer.prompts import Prompt, make_layout

PROMPT = Prompt.random(make_layout(num_layers=2, block_size=1), 4)
TOKEN_BYTES = PROMPT.layout.layer_token_bytes(0)
TERMS = Grant(frame_credits=4, max_frame_bytes=1 << 20)
LOST = Drop(DropCause.INTERNAL, "the engine failed")


def frame(number: int, layers: range, tokens: range, payload_bytes: int | None = None) -> Frame:
    size = len(layers) * len(tokens) * TOKEN_BYTES if payload_bytes is None else payload_bytes
    return Frame(number, layers.start, len(layers), tokens.start, len(tokens), (memoryview(bytes(size)),))


FIRST = frame(0, range(1), range(4))
SECOND = frame(1, range(1, 2), range(4))


class Receiving:
    """A receiver, and all that it did."""

    def __init__(self, terms: Grant = TERMS) -> None:
        self.receiver = HandoffReceiver(PROMPT.layout, PROMPT.num_tokens, terms)
        self.actions: list[ReceiverAction] = [*self.receiver.start()]

    def feed(self, *events: ReceiverEvent) -> list[ReceiverAction]:
        new = [action for event in events for action in self.receiver.handle(event)]
        self.actions += new
        return new

    def count(self, kind: type) -> int:
        return sum(isinstance(action, kind) for action in self.actions)

    def free(self) -> Drop:
        """The drop of the one FreeBlocks."""
        (drop,) = [action.drop for action in self.actions if isinstance(action, FreeBlocks)]
        return drop


def granted(terms: Grant = TERMS) -> Receiving:
    receiving = Receiving(terms)
    receiving.feed(BlocksReserved())
    return receiving


def test_it_asks_for_blocks_for_the_whole_prompt_and_then_grants() -> None:
    receiving = granted()
    assert receiving.actions == [RequestBlocks(4), SendGrant(TERMS)]


def test_the_sequence_is_admitted_after_the_last_scatter() -> None:
    receiving = granted()
    receiving.feed(FrameArrived(FIRST), FrameArrived(SECOND), Commit(2, (9,)), ScatterDone(1))
    assert receiving.feed(ScatterDone(0)) == [AdmitSequence((9,), PROMPT.kv_bytes)]
    assert receiving.feed(AdmitDone()) == [SendAccepted(PROMPT.kv_bytes)]


def test_a_commit_ahead_of_its_frames_waits_for_them() -> None:
    """Conformance 3."""
    receiving = granted()
    receiving.feed(Commit(2, (9,)), FrameArrived(SECOND), ScatterDone(1), FrameArrived(FIRST))
    assert receiving.feed(ScatterDone(0)) == [AdmitSequence((9,), PROMPT.kv_bytes)]


def test_credits_return_when_frames_are_scattered() -> None:
    receiving = granted(Grant(1, 1 << 20))
    receiving.feed(FrameArrived(FIRST))
    assert receiving.feed(ScatterDone(0)) == [SendCredit(1)]


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (frame(0, range(1, 2), range(4)), "number"),
        (frame(1, range(1), range(3, 4)), "there already"),
        (frame(1, range(2), range(3, 4)), "there already"),
        (frame(1, range(1, 3), range(4), 4 * TOKEN_BYTES), "not inside"),
        (frame(1, range(1, 2), range(1, 5)), "not inside"),
        (frame(1, range(1, 2), range(0)), "not inside"),
        (frame(1, range(1, 2), range(4), 3 * TOKEN_BYTES), "the layout says"),
    ],
)
def test_a_frame_that_does_not_fit_ends_the_grant(bad: Frame, problem: str) -> None:
    receiving = granted()
    receiving.feed(FrameArrived(FIRST), ScatterDone(0), FrameArrived(bad))
    assert receiving.count(ScatterFrame) == 1
    assert problem in receiving.free().detail


def test_a_frame_without_credit_ends_the_grant() -> None:
    receiving = granted(Grant(1, 1 << 20))
    receiving.feed(FrameArrived(FIRST), FrameArrived(SECOND), ScatterDone(0))
    assert "no credit" in receiving.free().detail


def test_a_frame_over_the_limit_ends_the_grant() -> None:
    receiving = granted(Grant(1, 100))
    receiving.feed(FrameArrived(FIRST))
    assert "longer than 100" in receiving.free().detail


def test_a_frame_before_the_grant_ends_the_hand_off() -> None:
    receiving = Receiving()
    receiving.feed(FrameArrived(FIRST))
    assert receiving.free().cause is DropCause.PUSH_BROKEN


@pytest.mark.parametrize(
    "events",
    [
        (FrameArrived(FIRST), ScatterDone(0), Commit(1, (9,))),
        (FrameArrived(FIRST), ScatterDone(0), FramesFinished(), Commit(2, (9,))),
        (FrameArrived(FIRST), ScatterDone(0), Commit(2, (9,)), FramesFinished()),
        (FrameArrived(FIRST), ScatterDone(0), FrameArrived(SECOND), Commit(1, (9,)), ScatterDone(1)),
        (Commit(2, (9,)), Commit(2, (9,))),
    ],
    ids=["too few", "missing", "missing later", "unnamed frame", "twice"],
)
def test_a_commit_that_is_not_complete_ends_the_grant(events: tuple[ReceiverEvent, ...]) -> None:
    """Conformance 3."""
    receiving = granted()
    receiving.feed(*events)
    assert receiving.free().cause is DropCause.PUSH_BROKEN
    assert not receiving.count(AdmitSequence)


def test_a_damaged_frame_ends_the_grant() -> None:
    """Conformance 18."""
    receiving = granted()
    receiving.feed(FrameArrived(FIRST), ScatterDone(0), FrameDamaged("bad"))
    assert receiving.free() == Drop(DropCause.DAMAGED, "bad")


def test_blocks_are_freed_only_after_the_scatters_under_way() -> None:
    """Conformance 1, 2."""
    receiving = granted()
    receiving.feed(FrameArrived(FIRST), FrameArrived(SECOND))
    assert receiving.feed(LinkEnded("gone")) == [EndLink(Drop(DropCause.PUSH_BROKEN, "gone"))]
    assert receiving.feed(ScatterDone(1)) == []
    assert receiving.feed(ScatterFailed(0, LOST)) == [FreeBlocks(Drop(DropCause.PUSH_BROKEN, "gone"))]


def test_a_close_tells_its_reason() -> None:
    receiving = granted()
    receiving.feed(Close(CloseReason.ENDED_AT_FIRST_TOKEN, ""))
    assert receiving.free().cause is DropCause.ENDED_AT_FIRST_TOKEN


@pytest.mark.parametrize("event", [LinkEnded("gone"), Close(CloseReason.CANCELLED, ""), Dropped(LOST)])
def test_after_a_complete_commit_the_sequence_runs_whatever_the_link_does(event: ReceiverEvent) -> None:
    """Conformance 3: an acknowledgement that is lost."""
    receiving = granted()
    receiving.feed(FrameArrived(FIRST), FrameArrived(SECOND), ScatterDone(0), ScatterDone(1), Commit(2, (9,)))
    receiving.feed(event, AdmitDone(), event)
    assert receiving.count(SendAccepted) == 1
    assert not receiving.count(FreeBlocks)


def test_an_admission_that_fails_frees_the_blocks() -> None:
    receiving = granted()
    receiving.feed(FrameArrived(FIRST), FrameArrived(SECOND), ScatterDone(0), ScatterDone(1), Commit(2, (9,)))
    receiving.feed(AdmitFailed(LOST), AdmitDone())
    assert receiving.free() == LOST
    assert not receiving.count(SendAccepted)


class ReceiverInterleavings(RuleBasedStateMachine):
    """Any order of what the sender, the transport and the engine can do. Conformance 1, 2, 3, 18."""

    def __init__(self) -> None:
        super().__init__()
        self.receiving = Receiving(Grant(2, 1 << 20))
        self.frames: list[Frame] = []
        self.reserving = True
        self.scattering: list[int] = []
        self.admitting = False
        self.cells: set[tuple[int, int]] = set()

    @initialize(chunk=st.integers(1, 4), max_frame_bytes=st.sampled_from([48 + TOKEN_BYTES, 1 << 20]))
    def pack(self, chunk: int, max_frame_bytes: int) -> None:
        packer = FramePacker(PROMPT.layout, max_frame_bytes)
        made = [frame for piece in PROMPT.pieces(chunk) for frame in packer.add(piece)]
        self.frames = [Frame(**{**_fields(f), "parts": (memoryview(b"".join(f.parts)),)}) for f in made]

    def feed(self, event: ReceiverEvent) -> None:
        over = self.receiving.count(FreeBlocks) or self.receiving.count(EndLink)
        for action in self.receiving.feed(event):
            match action:
                case ScatterFrame(frame):
                    assert not over
                    self._check_inside(frame)
                    self.scattering.append(frame.number)
                    assert len(self.scattering) <= 2
                case AdmitSequence():
                    assert not over
                    assert not self.scattering
                    assert len(self.cells) == 2 * PROMPT.num_tokens
                    self.admitting = True
                case FreeBlocks():
                    assert not self.scattering
                case SendGrant() | SendCredit() | SendAccepted():
                    assert not over
                case _:
                    pass

    def _check_inside(self, frame: Frame) -> None:
        cells = {
            (layer, token)
            for layer in range(frame.layer_start, frame.layer_start + frame.layer_count)
            for token in range(frame.token_start, frame.token_start + frame.token_count)
        }
        assert not self.reserving
        assert not cells & self.cells
        assert all(layer < 2 and token < PROMPT.num_tokens for layer, token in cells)
        self.cells |= cells

    @precondition(lambda self: self.reserving)
    @rule(event=st.sampled_from([BlocksReserved(), BlocksReserved(), BlocksReserved(), ReserveFailed(LOST)]))
    def reserve(self, event: ReceiverEvent) -> None:
        self.reserving = False
        self.feed(event)

    @precondition(lambda self: self.frames)
    @rule(data=st.data())
    def frame_comes(self, data: st.DataObject) -> None:
        frame = data.draw(st.sampled_from(self.frames))
        self.frames.remove(frame)
        self.feed(FrameArrived(frame))

    @rule(
        number=st.integers(0, 9), layers=st.integers(0, 3), start=st.integers(0, 4), tokens=st.integers(0, 4)
    )
    def strange_frame_comes(self, number: int, layers: int, start: int, tokens: int) -> None:
        self.feed(FrameArrived(frame(number, range(layers), range(start, start + tokens))))

    @precondition(lambda self: self.scattering)
    @rule(data=st.data(), failed=st.sampled_from([False, False, False, True]))
    def scattered(self, data: st.DataObject, failed: bool) -> None:
        number = data.draw(st.sampled_from(self.scattering))
        self.scattering.remove(number)
        self.feed(ScatterFailed(number, LOST) if failed else ScatterDone(number))

    @precondition(lambda self: self.admitting)
    @rule(event=st.sampled_from([AdmitDone(), AdmitFailed(LOST)]))
    def admit(self, event: ReceiverEvent) -> None:
        self.admitting = False
        self.feed(event)

    @rule(num_frames=st.integers(0, 9))
    def commit(self, num_frames: int) -> None:
        self.feed(Commit(num_frames, (1,)))

    @rule(
        event=st.sampled_from(
            [
                LinkEnded("gone"),
                Close(CloseReason.CANCELLED, ""),
                FrameDamaged("bad"),
                FramesFinished(),
                Dropped(LOST),
            ]
        )
    )
    def end(self, event: ReceiverEvent) -> None:
        self.feed(event)

    @invariant()
    def ends_at_most_once(self) -> None:
        assert self.receiving.count(FreeBlocks) + self.receiving.count(SendAccepted) <= 1
        assert self.receiving.count(AdmitSequence) <= 1
        assert self.receiving.count(EndLink) <= 1

    def teardown(self) -> None:
        self.feed(LinkEnded("the test is over"))
        for number in [*self.scattering]:
            self.scattering.remove(number)
            self.feed(ScatterDone(number))
        if self.admitting:
            self.feed(AdmitDone())
        assert self.receiving.count(FreeBlocks) + self.receiving.count(SendAccepted) == 1


def _fields(frame: Frame) -> dict[str, int]:
    names = ("number", "layer_start", "layer_count", "token_start", "token_count")
    return {name: getattr(frame, name) for name in names}


TestReceiverInterleavings = ReceiverInterleavings.TestCase
TestReceiverInterleavings.settings = settings(max_examples=200, stateful_step_count=40)
