"""How pieces become frames."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kv_layout import KVLayout
from kv_transfer.frame import HEADER_BYTES, Frame, cut, decode, encode
from kv_transfer.packer import JOINED_BYTES, LAST_JOINED_BYTES, FrameLimitTooSmall, FramePacker
from tests.transfer.prompts import Prompt, empty_kv, make_layout, quantized, write_slice


def pack(prompt: Prompt, chunk_tokens: int, max_frame_bytes: int) -> list[Frame]:
    packer = FramePacker(prompt.layout, max_frame_bytes)
    return [frame for piece in prompt.pieces(chunk_tokens) for frame in packer.add(piece)] + packer.flush()


@given(
    layout=st.builds(make_layout, num_layers=st.integers(1, 5), block_size=st.integers(1, 5)).flatmap(
        lambda exact: st.sampled_from([exact, quantized(exact, "int8")])
    ),
    num_tokens=st.integers(1, 40),
    chunk_tokens=st.integers(1, 40),
    max_payload=st.integers(5 * 64, 2048),
)
def test_frames_hold_the_prompt_and_none_is_over_the_limit(
    layout: KVLayout, num_tokens: int, chunk_tokens: int, max_payload: int
) -> None:
    prompt = Prompt.random(layout, num_tokens)
    received = empty_kv(prompt.layout, num_tokens)
    frames = [encode(f) for f in pack(prompt, chunk_tokens, max_payload + HEADER_BYTES)]
    for number, sealed in enumerate(frames):
        assert len(sealed) <= max_payload + HEADER_BYTES
        assert decode(sealed).number == number
        for piece in cut(decode(sealed), prompt.layout):
            write_slice(received, piece, layout)
    assert prompt.equals(received)


def test_small_layers_of_a_chunk_join_into_one_frame() -> None:
    frames = pack(Prompt.random(make_layout(num_layers=4), 10), 10, 1 << 20)
    assert [(f.layer_start, f.layer_count, f.token_count) for f in frames] == [(0, 4, 10)]


def test_a_chunk_waits_for_no_other_chunk() -> None:
    """Frames leave while the prefill runs: with its last layer all of a chunk has left."""
    prompt = Prompt.random(make_layout(num_layers=4), 20)
    packer = FramePacker(prompt.layout, 1 << 20)
    first_chunk = [piece for piece in prompt.pieces(10) if piece.token_start == 0]
    frames = [frame for piece in first_chunk for frame in packer.add(piece)]
    assert sum(frame.layer_count for frame in frames) == 4


def test_a_frame_leaves_as_soon_as_it_is_large_enough() -> None:
    layout = make_layout(num_layers=4, num_heads=8, head_dim=64)
    tokens = JOINED_BYTES // layout.layer_token_bytes(0)
    frames = pack(Prompt.random(layout, tokens), tokens, 4 << 20)
    assert [f.layer_count for f in frames] == [1, 1, 1, 1]


def test_the_last_layer_leaves_alone_where_layers_are_not_small() -> None:
    """After the last layer there is no computing that hides what is sent."""
    layout = make_layout(num_layers=6, num_heads=8, head_dim=64)
    tokens = LAST_JOINED_BYTES // layout.layer_token_bytes(0)
    frames = pack(Prompt.random(layout, tokens), tokens, 4 << 20)
    assert [f.layer_count for f in frames] == [4, 1, 1]


def test_a_limit_below_one_block_is_refused() -> None:
    with pytest.raises(FrameLimitTooSmall, match="304 bytes"):
        FramePacker(make_layout(block_size=4), 303)
