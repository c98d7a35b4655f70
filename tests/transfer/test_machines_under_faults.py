"""Any faults on the way between the two state machines: blocks, grants, commits and outcomes stay right."""

from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.messages import (
    Accepted,
    CloseReason,
    DropCause,
    Grant,
    ReceiverMessage,
    SenderMessage,
)
from kv_transfer.receiver import LinkEnded
from kv_transfer.sender import CloseRequested, LinkFailed, LinkGone
from tests.transfer.fault_injection import (
    POINTS,
    Disturber,
    Effect,
    Fault,
    LinkCut,
    Point,
    damaged_bytes,
    damaged_message,
)
from tests.transfer.machine_pair import Pair
from tests.transfer.prompts import Prompt, make_layout

# Both machines are told in order what a stream carries, so a delay is an interleaving, which any draw makes.
FAULTS = st.builds(
    Fault,
    st.sampled_from([point for point in Point if point is not Point.OPEN]),
    st.sampled_from([effect for effect in Effect if effect is not Effect.DELAY]),
    st.integers(0, 4),
)


class FaultyPair(Pair):
    """A pair over a network with faults."""

    def __init__(self, prompt: Prompt, chunk_tokens: int, terms: Grant, faults: Iterable[Fault]) -> None:
        self._disturbed = {name: Disturber.of(faults) for name in ("control", "frames", "replies")}
        self._is_cut = False
        super().__init__(prompt, chunk_tokens, terms)

    @property
    def struck(self) -> bool:
        return any(disturber.done for disturber in self._disturbed.values())

    def post_message(self, stream: str, message: SenderMessage | ReceiverMessage) -> None:
        self._post(stream, POINTS[type(message)], message, damaged_message(message))

    def post_frame(self, sealed: bytes | None) -> None:
        if sealed is None:
            self._post("frames", Point.FRAMES_END, None, None)
        else:
            self._post("frames", Point.FRAME, sealed, damaged_bytes(sealed))

    def _post(self, stream: str, point: Point, item: object, damaged: object) -> None:
        if self._is_cut:
            return
        disturber = self._disturbed[stream]
        try:
            self.streams[stream].extend(disturber.after(disturber.strike(point), item, damaged))
        except LinkCut:
            self._is_cut = True
            self.streams["breaks"].append(LinkEnded("cut"))
            self.streams["replies"].append(LinkFailed(DropCause.PUSH_BROKEN, "cut"))


@given(
    num_tokens=st.integers(1, 9),
    chunk_tokens=st.integers(1, 9),
    credits=st.integers(1, 5),
    max_frame_bytes=st.sampled_from([304, 600, 1 << 20]),
    faults=st.lists(FAULTS, min_size=1, max_size=3),
    data=st.data(),
)
@settings(max_examples=400)
def test_whatever_happens_on_the_way_the_books_are_right(
    num_tokens: int,
    chunk_tokens: int,
    credits: int,
    max_frame_bytes: int,
    faults: list[Fault],
    data: st.DataObject,
) -> None:
    """Conformance 1, 2, 3, 18: one outcome, blocks freed once; `Pair` itself sees that nothing is
    written outside the grant and that a sequence runs only on the very bytes that were sent."""
    prompt = Prompt.random(make_layout(num_layers=2), num_tokens)
    pair = FaultyPair(prompt, chunk_tokens, Grant(credits, max_frame_bytes), faults)
    pair.drain(data)
    # What waits for something that was lost waits until its router gives it up.
    pair.on_sender(pair.sender.handle(CloseRequested(CloseReason.CANCELLED, "the deadline")))
    pair.drain(data)
    pair.on_sender(pair.sender.handle(LinkGone()))
    pair.on_receiver(pair.receiver.handle(LinkEnded("the link is gone")))
    pair.drain(data)
    assert len(pair.ends) == 1
    assert pair.released == 1
    assert pair.outcome is not None
    if isinstance(pair.outcome, Accepted):
        assert pair.ends == ["admitted"]
    if not pair.struck:
        assert pair.outcome == Accepted(prompt.kv_bytes)
