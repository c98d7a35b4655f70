"""Any hand-off over a network that keeps the order of each stream and nothing else."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.messages import Accepted, CloseReason, Grant
from kv_transfer.sender import Closed, CloseRequested, LinkGone
from tests.transfer.machine_pair import Pair
from tests.transfer.prompts import Prompt, make_layout

PAIRS = {
    "num_layers": st.integers(1, 3),
    "num_tokens": st.integers(1, 9),
    "chunk_tokens": st.integers(1, 9),
    "credits": st.integers(1, 5),
    "max_frame_bytes": st.sampled_from([304, 600, 1 << 20]),
}


@given(**PAIRS, data=st.data())
@settings(max_examples=100)
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
    pair.drain(data)
    assert (pair.outcome, pair.ends, pair.released) == (Accepted(prompt.kv_bytes), ["admitted"], 1)
    assert prompt.equals(pair.kv)


@given(**PAIRS, cancel_after=st.integers(0, 60), data=st.data())
@settings(max_examples=100)
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
    pair.drain(data)
    pair.on_sender(pair.sender.handle(LinkGone()))
    assert len(pair.ends) == 1
    assert isinstance(pair.outcome, Accepted | Closed)
    assert pair.released == 1
