"""The frame on the wire."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.frame import HEADER_BYTES, DamagedFrame, Frame, cut, decode, encode, reseal
from tests.transfer.prompts import make_layout

U32 = st.integers(0, 2**32 - 1)
FRAMES = st.builds(
    Frame,
    number=U32,
    layer_start=U32,
    layer_count=U32,
    token_start=U32,
    token_count=U32,
    parts=st.lists(st.binary(max_size=64).map(memoryview), max_size=4).map(tuple),
)


@given(FRAMES)
def test_a_frame_comes_back_as_it_was(frame: Frame) -> None:
    back = decode(encode(frame))
    assert (back.number, back.layer_start, back.layer_count, back.token_start, back.token_count) == (
        frame.number,
        frame.layer_start,
        frame.layer_count,
        frame.token_start,
        frame.token_count,
    )
    assert b"".join(back.parts) == b"".join(frame.parts)


@given(FRAMES, st.data())
def test_any_flipped_bit_is_found(frame: Frame, data: st.DataObject) -> None:
    """Conformance 18."""
    damaged = bytearray(encode(frame))
    bit = data.draw(st.integers(0, 8 * len(damaged) - 1))
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(DamagedFrame):
        decode(damaged)


@given(FRAMES, st.data())
def test_a_frame_cut_short_is_found(frame: Frame, data: st.DataObject) -> None:
    """Conformance 18."""
    whole = encode(frame)
    with pytest.raises(DamagedFrame):
        decode(whole[: data.draw(st.integers(0, len(whole) - 1))])


def test_an_altered_and_resealed_frame_passes() -> None:
    altered = bytearray(encode(Frame(0, 0, 1, 0, 1, (memoryview(b"abcd"),))))
    altered[HEADER_BYTES] ^= 1
    (payload,) = decode(reseal(altered)).parts
    assert payload == b"`bcd"


def test_a_resealed_foreign_header_is_refused() -> None:
    foreign = bytearray(encode(Frame(0, 0, 1, 0, 1, ())))
    foreign[0] ^= 1
    with pytest.raises(DamagedFrame, match="magic"):
        decode(reseal(foreign))


def test_a_resealed_wrong_length_is_refused() -> None:
    longer = encode(Frame(0, 0, 1, 0, 1, (memoryview(b"ab"),))) + b"c"
    with pytest.raises(DamagedFrame, match="payload"):
        decode(reseal(longer))


def test_a_frame_is_cut_into_its_layers() -> None:
    layout = make_layout(num_layers=3, num_heads=1, head_dim=1)
    frame = decode(encode(Frame(0, 1, 2, 5, 2, (memoryview(bytes(range(32))),))))
    assert [(*s[:3], bytes(s.data)) for s in cut(frame, layout)] == [
        (1, 5, 7, bytes(range(16))),
        (2, 5, 7, bytes(range(16, 32))),
    ]


def test_cutting_a_payload_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="the layout says 64"):
        cut(Frame(0, 0, 1, 0, 1, (memoryview(bytes(60)),)), make_layout())
