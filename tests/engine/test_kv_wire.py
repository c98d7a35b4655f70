"""The packed form of K and V: between caches, block tables, block sizes and dtypes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.kv_cache import KVCache
from engine.kv_conversion import convertible, in_dtype
from engine.kv_layout import KVLayout, TensorLayout
from engine.kv_wire import DevicePages, PageWire, kv_wire, spans
from tests.device import DEVICE

NUM_BLOCKS = 12
EXACT = KVLayout(
    "f", "float32", 4, ((TensorLayout("key", 3, 8, "float32"), TensorLayout("value", 3, 6, "float32")),) * 2
)
LAYOUTS = [EXACT, in_dtype(EXACT, "bfloat16"), in_dtype(EXACT, "int8"), in_dtype(EXACT, "fp8")]


def filled(layout: KVLayout) -> KVCache:
    """Every token of every block has other K and V."""
    cache = KVCache(layout, NUM_BLOCKS, DEVICE)
    slots = torch.arange(NUM_BLOCKS * layout.block_size, device=DEVICE)
    torch.manual_seed(0)
    for layer in range(len(layout.layers)):
        key, value = (
            torch.randn(len(slots), 3, 8, device=DEVICE),
            torch.randn(len(slots), 3, 6, device=DEVICE),
        )
        rows = cache.rows(slots, 3)
        dtype = torch.float32 if cache.is_quantized else layout.layers[0][0].torch_dtype
        cache.write(layer, rows, (key.to(dtype), value.to(dtype)))
    return cache


def rows_of(cache: KVCache, layer: int, index: int, table: np.ndarray, start: int, end: int) -> torch.Tensor:
    size = cache.layout.block_size
    positions = np.arange(start, end)
    slots = torch.from_numpy(table[positions // size] * size + positions % size).to(DEVICE)
    return cache.gather(layer, index, slots).float()


def table(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(NUM_BLOCKS)


RANGES = st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda r: (min(r), max(r) + 1))


@given(tokens=RANGES, block_size=st.integers(1, 9))
def test_spans_are_all_tokens_once_in_order(tokens: tuple[int, int], block_size: int) -> None:
    found = [
        block * block_size + row
        for span in spans(*tokens, block_size)
        for block in range(span.first_block, span.first_block + span.num_blocks)
        for row in range(span.rows.start, span.rows.stop)
    ]
    assert found == list(range(*tokens))
    assert len(list(spans(*tokens, block_size))) <= 3


@given(tokens=RANGES, layout=st.sampled_from(LAYOUTS), on_device=st.booleans())
def test_what_one_cache_packs_another_unpacks(
    tokens: tuple[int, int], layout: KVLayout, on_device: bool
) -> None:
    source, target = filled(layout), KVCache(layout, NUM_BLOCKS, DEVICE)
    ours, theirs = table(1), table(2)
    for layer in range(2):
        packed = kv_wire(source, layout).at(ours, *tokens).pack(layer)
        sent = packed if on_device else packed.cpu().numpy().tobytes()
        kv_wire(target, layout).at(theirs, *tokens).unpack(layer, sent)
    others = [token for token in range(NUM_BLOCKS * layout.block_size) if token not in range(*tokens)]
    for layer in range(2):
        for index in range(len(layout.layers[layer])):
            there = rows_of(target, layer, index, theirs, *tokens)
            assert torch.equal(there, rows_of(source, layer, index, ours, *tokens))
            every = rows_of(target, layer, index, theirs, 0, NUM_BLOCKS * layout.block_size)
            assert not every[others].any()


def test_packed_bytes_are_heads_of_each_block_in_turn() -> None:
    cache = filled(EXACT)
    blocks = table(1)
    key = rows_of(cache, 0, 0, blocks, 3, 9)
    expected = [key[:1], key[1:5], key[5:]]
    packed = kv_wire(cache, EXACT).at(blocks, 3, 9).pack(0)[: 6 * 3 * 8 * 4].view(torch.float32)
    assert torch.equal(packed, torch.cat([part.transpose(0, 1).reshape(-1) for part in expected]))


@given(tokens=RANGES, ours=st.integers(1, 7), theirs=st.integers(1, 7))
def test_block_sizes_may_differ(tokens: tuple[int, int], ours: int, theirs: int) -> None:
    source = filled(replace(EXACT, block_size=max(ours, 3)))
    target = KVCache(replace(EXACT, block_size=max(theirs, 3)), NUM_BLOCKS, DEVICE)
    packed = kv_wire(source, source.layout).at(table(1), *tokens).pack(1)
    kv_wire(target, source.layout).at(table(2), *tokens).unpack(1, packed)
    for index in range(2):
        there = rows_of(target, 1, index, table(2), *tokens)
        assert torch.equal(there, rows_of(source, 1, index, table(1), *tokens))


@pytest.mark.parametrize("target", LAYOUTS, ids=lambda layout: layout.dtype)
@pytest.mark.parametrize("source", LAYOUTS, ids=lambda layout: layout.dtype)
def test_dtypes_are_converted_to_within_the_coarser_ones_step(source: KVLayout, target: KVLayout) -> None:
    assert convertible(source.layers[0], target.layers[0])
    sender, receiver = filled(source), KVCache(target, NUM_BLOCKS, DEVICE)
    exact = filled(EXACT)
    packed = kv_wire(sender, source).at(table(1), 2, 15).pack(0)
    kv_wire(receiver, source).at(table(2), 2, 15).unpack(0, packed.cpu().numpy().data)
    read_back = KVCache(EXACT, NUM_BLOCKS, DEVICE)
    again = kv_wire(receiver, EXACT).at(table(2), 2, 15).pack(0)
    kv_wire(read_back, EXACT).at(table(3), 2, 15).unpack(0, again.cpu().numpy().data)
    for index in range(2):
        values = rows_of(exact, 0, index, table(1), 2, 15)
        error = (rows_of(read_back, 0, index, table(3), 2, 15) - values).abs().amax(-1)
        assert (error <= values.abs().amax(-1) * 0.1).all()


def test_a_sender_compresses_into_the_wires_dtype() -> None:
    """What a cache in 8 bits would hold is what comes."""
    compressed = in_dtype(EXACT, "int8")
    packed = kv_wire(filled(EXACT), compressed).at(table(1), 3, 14).pack(0)
    assert torch.equal(packed, kv_wire(filled(compressed), compressed).at(table(1), 3, 14).pack(0))


@pytest.mark.parametrize("layout", [EXACT, in_dtype(EXACT, "int8")], ids=lambda layout: layout.dtype)
def test_bytes_of_another_length_are_refused_and_nothing_is_written(layout: KVLayout) -> None:
    target = KVCache(EXACT, NUM_BLOCKS, DEVICE)
    with pytest.raises(ValueError, match="the layout says"):
        kv_wire(target, layout).at(table(2), 0, 8).unpack(0, bytes(100))
    assert not target.pages(0, 0).any()


@given(tokens=RANGES)
def test_pages_on_a_device_move_as_those_on_the_host(tokens: tuple[int, int]) -> None:
    """The same operations as on CUDA, here on a CPU."""
    source = filled(EXACT)
    wire = PageWire(source)
    expected = wire.at(table(1), *tokens).pack(0)
    wire.pages = tuple(
        tuple(DevicePages(source.pages(layer, index)) for index in range(2)) for layer in range(2)
    )
    assert torch.equal(wire.at(table(1), *tokens).pack(0), expected)
    target = KVCache(EXACT, NUM_BLOCKS, DEVICE)
    there = PageWire(target)
    there.pages = tuple(
        tuple(DevicePages(target.pages(layer, index)) for index in range(2)) for layer in range(2)
    )
    there.at(table(2), *tokens).unpack(0, expected.cpu().numpy().tobytes())
    assert torch.equal(PageWire(target).at(table(2), *tokens).pack(0), expected)
