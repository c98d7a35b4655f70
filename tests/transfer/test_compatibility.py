"""Layouts over the wire, and what keeps two of them apart."""

from dataclasses import replace

import pytest

from engine.kv_layout import KVLayout, TensorLayout
from kv_transfer.compatibility import (
    PROTOCOL_VERSION,
    IncompatiblePeers,
    check_compatible,
    layout_from_proto,
    layout_to_proto,
)
from kv_transfer.transport_choice import TransferConfigError, TransportName, check_frame_limit, check_slots
from tests.transfer.prompts import make_layout, quantized


@pytest.mark.parametrize(
    "layout", [make_layout(), make_layout(dtype="bfloat16"), quantized(make_layout(), "int8")]
)
def test_a_layout_comes_back_from_the_wire_as_it_was(layout: KVLayout) -> None:
    assert layout_from_proto(layout_to_proto(layout)) == layout


def test_a_tensor_without_a_dtype_has_the_layouts() -> None:
    message = layout_to_proto(make_layout(dtype="bfloat16"))
    for layer in message.layers:
        for tensor in layer.tensors:
            tensor.ClearField("dtype")
    assert layout_from_proto(message) == make_layout(dtype="bfloat16")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (make_layout(), quantized(make_layout(), "int8")),
        (quantized(make_layout(), "int8"), quantized(make_layout(), "fp8")),
        (quantized(make_layout(), "fp8"), make_layout(dtype="bfloat16")),
    ],
)
def test_another_kv_dtype_is_refused_with_both_values(ours: KVLayout, theirs: KVLayout) -> None:
    with pytest.raises(IncompatiblePeers) as refusal:
        check_compatible(ours, theirs, PROTOCOL_VERSION)
    assert f"dtype: {ours.dtype} here, {theirs.dtype} there" in str(refusal.value)


@pytest.mark.parametrize(
    "theirs",
    [make_layout(dtype="bfloat16"), quantized(make_layout(), "int8"), quantized(make_layout(), "fp8")],
)
def test_another_kv_dtype_is_taken_by_a_receiver_that_converts(theirs: KVLayout) -> None:
    check_compatible(make_layout(), theirs, PROTOCOL_VERSION, converts=True)
    check_compatible(theirs, make_layout(), PROTOCOL_VERSION, converts=True)


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (make_layout(dtype="float4"), "dtype: float32 here, float4 there"),
        (make_layout(dtype="bfloat16", num_heads=3), "2 heads of 4 float32.*3 heads of 4 bfloat16"),
        (quantized(make_layout(head_dim=8), "int8"), "2 heads of 4 float32.*2 heads of 8 int8"),
    ],
)
def test_what_cannot_be_converted_is_refused_with_both_values(theirs: KVLayout, words: str) -> None:
    with pytest.raises(IncompatiblePeers, match=words):
        check_compatible(make_layout(), theirs, PROTOCOL_VERSION, converts=True)


def test_a_frame_limit_below_one_block_is_refused_when_a_worker_starts() -> None:
    check_frame_limit(make_layout(), 304)
    with pytest.raises(TransferConfigError, match="4 tokens needs 304 bytes in one layer, not 303"):
        check_frame_limit(make_layout(), 303)


@pytest.mark.parametrize("choice", ["shm", "ipc", "gloo"])
def test_slots_that_hold_no_block_are_refused_when_a_worker_starts(choice: TransportName) -> None:
    check_slots(make_layout(), 256, choice)
    check_slots(make_layout(), 255, "auto")
    with pytest.raises(TransferConfigError, match="4 tokens needs 256 bytes in one layer, not 255"):
        check_slots(make_layout(), 255, choice)


def test_blocks_of_another_size_are_no_difference() -> None:
    check_compatible(make_layout(block_size=16), make_layout(block_size=7), PROTOCOL_VERSION)


def test_another_dtype_of_one_tensor_is_refused_with_both_values() -> None:
    ours = quantized(make_layout(), "int8")
    *others, scale = ours.layers[0]
    wider = (*others, TensorLayout(scale.name, scale.num_heads, scale.head_dim, "float32"))
    theirs = replace(ours, layers=(wider, *ours.layers[1:]))
    with pytest.raises(IncompatiblePeers, match=r"layers\[0\].*1 bfloat16\] here.*1 float32\] there"):
        check_compatible(ours, theirs, PROTOCOL_VERSION)
