"""The sender's state machine."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kv_transfer.messages import Accepted, CloseReason, Credit, Drop, DropCause, Grant
from kv_transfer.packer import KVPiece
from kv_transfer.sender import (
    Closed,
    CloseRequested,
    CommitRequested,
    FinishFrames,
    FrameLeft,
    HandoffSender,
    LinkFailed,
    LinkGone,
    ReleaseBlocks,
    ReportGranted,
    ReportOutcome,
    SendClose,
    SendCommit,
    SenderAction,
    SenderEvent,
    SendFrame,
    SendOpen,
)
from tests.transfer.prompts import Prompt, make_layout

PROMPT = Prompt.random(make_layout(num_layers=2, block_size=1), 6)
# One token of one layer in a frame.
SMALL = 48 + PROMPT.layout.layer_token_bytes(0)
CANCEL = CloseRequested(CloseReason.CANCELLED, "")
BROKEN = LinkFailed(DropCause.PUSH_BROKEN, "broken")


class Sending:
    """A sender, and all that it did."""

    def __init__(self, prompt: Prompt = PROMPT) -> None:
        self.sender = HandoffSender(prompt.layout, prompt.num_tokens)
        self.actions: list[SenderAction] = [*self.sender.start()]

    def feed(self, *events: SenderEvent) -> list[SenderAction]:
        new = [action for event in events for action in self.sender.handle(event)]
        self.actions += new
        return new

    def count(self, kind: type) -> int:
        return sum(isinstance(action, kind) for action in self.actions)


def sent_all(credits: int) -> Sending:
    sending = Sending()
    sending.feed(Grant(credits, 1 << 20), *PROMPT.pieces(6), CommitRequested((7,)))
    return sending


def test_nothing_is_sent_before_the_grant_but_the_open() -> None:
    assert Sending().actions == [SendOpen()]


def test_a_piece_before_the_grant_is_the_callers_error() -> None:
    with pytest.raises(ValueError, match="grant"):
        Sending().feed(*PROMPT.pieces(6))


def test_a_commit_before_every_piece_is_the_callers_error() -> None:
    sending = Sending()
    sending.feed(Grant(1, 1 << 20), next(PROMPT.pieces(6)))
    with pytest.raises(ValueError, match="every layer"):
        sending.feed(CommitRequested((7,)))


def test_a_piece_of_the_wrong_length_is_the_callers_error() -> None:
    sending = Sending()
    sending.feed(Grant(1, 1 << 20))
    with pytest.raises(ValueError, match="the layout says 64"):
        sending.feed(KVPiece(0, 0, 1, memoryview(bytes(63))))


def test_frames_wait_for_credits() -> None:
    sending = Sending()
    sending.feed(Grant(2, SMALL), *PROMPT.pieces(6))
    assert sending.count(SendFrame) == 2
    sending.feed(Credit(3))
    assert sending.count(SendFrame) == 5


def test_the_first_chunk_leaves_before_the_second_is_there() -> None:
    sending = Sending()
    first_chunk = [piece for piece in PROMPT.pieces(3) if piece.token_start == 0]
    actions = sending.feed(Grant(4, 1 << 20), *first_chunk)
    assert [a.frame.layer_count for a in actions if isinstance(a, SendFrame)] == [2]


def test_the_commit_does_not_wait_for_credits() -> None:
    sending = Sending()
    sending.feed(Grant(1, SMALL), *PROMPT.pieces(6))
    assert sending.feed(CommitRequested((7,))) == [SendCommit(12, (7,))]


def test_blocks_are_released_when_the_last_frame_has_left() -> None:
    sending = sent_all(1)
    assert FinishFrames() in sending.actions and not sending.count(ReleaseBlocks)
    assert sending.feed(FrameLeft(0)) == [ReleaseBlocks()]
    assert sending.feed(Accepted(PROMPT.kv_bytes)) == [ReportOutcome(Accepted(PROMPT.kv_bytes))]


def test_blocks_stay_pinned_after_a_failure_until_the_link_is_gone() -> None:
    sending = sent_all(1)
    assert sending.feed(BROKEN) == [ReportOutcome(Drop(DropCause.PUSH_BROKEN, "broken"))]
    assert sending.feed(LinkGone()) == [ReleaseBlocks()]


def test_a_cancelled_sender_sends_no_waiting_frame() -> None:
    sending = Sending()
    sending.feed(Grant(1, SMALL), *PROMPT.pieces(6), CANCEL)
    assert not sending.feed(Credit(5), FrameLeft(1))
    assert sending.count(SendFrame) == 1


def test_a_close_without_frames_releases_at_once() -> None:
    assert Sending().feed(CANCEL) == [
        SendClose(CloseReason.CANCELLED, ""),
        ReportOutcome(Closed(CloseReason.CANCELLED)),
        ReleaseBlocks(),
    ]


def test_a_reply_after_the_end_is_ignored() -> None:
    """Conformance 3."""
    sending = sent_all(1)
    sending.feed(FrameLeft(0), CANCEL)
    assert not sending.feed(Accepted(1), Grant(1, 1 << 20), Credit(1), CANCEL, BROKEN, LinkGone())


@pytest.mark.parametrize("event", [Accepted(1), Grant(0, 1 << 20)], ids=["accepted", "empty grant"])
def test_a_reply_out_of_order_fails_the_hand_off(event: SenderEvent) -> None:
    """Conformance 3."""
    sending = Sending()
    sending.feed(event)
    assert isinstance(sending.sender.outcome, Drop)


def test_a_frame_limit_below_one_token_fails_with_both_numbers() -> None:
    sending = Sending()
    sending.feed(Grant(1, 100))
    assert isinstance(sending.sender.outcome, Drop)
    assert "112" in sending.sender.outcome.detail and "100" in sending.sender.outcome.detail


class SenderInterleavings(RuleBasedStateMachine):
    """Any order of what the caller, the receiver and the transport can do. Conformance 2, 3."""

    def __init__(self) -> None:
        super().__init__()
        self.sending = Sending()
        self.pieces = list(PROMPT.pieces(6))
        self.offered = 0
        self.committed = False
        self.granted = False
        self.leaving: list[int] = []
        self.credits = 0
        self.gone = False

    @initialize(chunk=st.integers(1, 6))
    def chunk(self, chunk: int) -> None:
        self.pieces = list(PROMPT.pieces(chunk))

    def feed(self, event: SenderEvent) -> None:
        over = self.sending.sender.outcome is not None
        for action in self.sending.feed(event):
            match action:
                case SendFrame(frame):
                    assert not over
                    assert self.credits > 0
                    self.credits -= 1
                    self.leaving.append(frame.number)
                case SendCommit() | FinishFrames() | ReportGranted() | SendOpen() | SendClose():
                    assert not over
                case ReportOutcome():
                    assert not over
                case ReleaseBlocks():
                    assert self.gone or not self.leaving

    @rule(credits=st.integers(0, 3), max_frame_bytes=st.sampled_from([50, SMALL, 1 << 20]))
    def grant(self, credits: int, max_frame_bytes: int) -> None:
        if not self.granted:
            self.credits = credits
        self.granted = True
        self.feed(Grant(credits, max_frame_bytes))

    @precondition(lambda self: self.granted)
    @rule(frames=st.integers(1, 3))
    def credit(self, frames: int) -> None:
        self.credits += frames
        self.feed(Credit(frames))

    @precondition(lambda self: self.sending.count(ReportGranted) and self.offered < len(self.pieces))
    @rule()
    def offer(self) -> None:
        self.offered += 1
        self.feed(self.pieces[self.offered - 1])

    @precondition(
        lambda self: (
            self.sending.count(ReportGranted) and self.offered == len(self.pieces) and not self.committed
        )
    )
    @rule()
    def commit(self) -> None:
        self.committed = True
        self.feed(CommitRequested((1,)))

    @precondition(lambda self: self.leaving)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.leaving))
        self.leaving.remove(number)
        self.feed(FrameLeft(number))

    @rule()
    def accept(self) -> None:
        self.feed(Accepted(PROMPT.kv_bytes))

    @rule(event=st.sampled_from([CANCEL, CloseRequested(CloseReason.ENDED_AT_FIRST_TOKEN, ""), BROKEN]))
    def end(self, event: SenderEvent) -> None:
        self.feed(event)

    @rule()
    def lose_the_link(self) -> None:
        self.gone = True
        self.feed(LinkGone())

    @invariant()
    def ends_at_most_once(self) -> None:
        assert self.sending.count(ReportOutcome) <= 1
        assert self.sending.count(ReleaseBlocks) <= 1

    def teardown(self) -> None:
        self.lose_the_link()
        assert self.sending.count(ReportOutcome) == 1
        assert self.sending.count(ReleaseBlocks) == 1


TestSenderInterleavings = SenderInterleavings.TestCase
TestSenderInterleavings.settings = settings(max_examples=200, stateful_step_count=40)
