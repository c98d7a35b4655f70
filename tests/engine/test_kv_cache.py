import pytest
import torch

from engine.kv_cache import KVCache
from engine.kv_layout import KVLayout, TensorLayout
from engine.kv_quantization import quantize, quantized_layers

LAYOUT = KVLayout(
    "f",
    "float32",
    4,
    ((TensorLayout("key", 3, 8, "float32"), TensorLayout("value", 2, 6, "float32")),) * 2,
)
SLOTS = torch.tensor([17, 3, 8, 0, 19])


@pytest.fixture
def cache() -> KVCache:
    return KVCache(LAYOUT, 5, torch.device("cpu"))


WHOLE_BLOCKS = torch.tensor([16, 17, 18, 19, 4, 5, 6, 7])
ACROSS_BLOCKS = torch.tensor([6, 7, 8, 9])
BLOCK_BACKWARDS = torch.tensor([11, 10, 9, 8])


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("slots", [SLOTS, WHOLE_BLOCKS, ACROSS_BLOCKS, BLOCK_BACKWARDS], ids=str)
def test_gathers_what_was_scattered(cache: KVCache, index: int, slots: torch.Tensor):
    tensor = LAYOUT.layers[1][index]
    data = torch.randn(len(slots), tensor.num_heads, tensor.head_dim)
    cache.scatter(1, index, slots, data)
    assert torch.equal(cache.gather(1, index, slots), data)
    assert torch.equal(cache.gather(1, index, slots.flip(0)), data.flip(0))


def test_scatter_touches_nothing_else(cache: KVCache):
    cache.scatter(1, 0, SLOTS, torch.ones(5, 3, 8))
    others = torch.tensor([s for s in range(20) if s not in SLOTS.tolist()])
    assert not cache.gather(1, 0, others).any()
    assert not cache.pages(0, 0).any() and not cache.pages(1, 1).any()


def test_a_slot_is_a_place_in_a_block(cache: KVCache):
    data = torch.randn(1, 3, 8)
    cache.scatter(0, 0, torch.tensor([2 * 4 + 3]), data)
    assert torch.equal(cache.pages(0, 0)[2, :, 3], data[0])


def test_takes_strided_data(cache: KVCache):
    data = torch.randn(5, 9, 8)[:, 2:5]
    cache.scatter(0, 0, SLOTS, data)
    assert torch.equal(cache.gather(0, 0, SLOTS), data)


@pytest.mark.parametrize(
    "data", [torch.zeros(4, 3, 8), torch.zeros(5, 2, 8), torch.zeros(5, 3, 8, dtype=torch.bfloat16)]
)
def test_refuses_data_of_another_layout(cache: KVCache, data: torch.Tensor):
    with pytest.raises(ValueError, match="key of layer 0"):
        cache.scatter(0, 0, SLOTS, data)


def test_copies_a_block_in_every_layer_and_tensor_and_changes_no_other(cache: KVCache):
    places = [(layer, index) for layer in range(2) for index in range(2)]
    for layer, index in places:
        cache.pages(layer, index).normal_()
    before = {place: cache.pages(*place).clone() for place in places}
    cache.copy_block(3, 1)
    for place in places:
        assert torch.equal(cache.pages(*place)[1], before[place][3])
        others = [0, 2, 3, 4]
        assert torch.equal(cache.pages(*place)[others], before[place][others])


@pytest.fixture(params=["int8", "fp8"])
def small(request: pytest.FixtureRequest) -> KVCache:
    """A quantized cache; K and V have 2 heads of 8."""
    kv = tuple(TensorLayout(name, 2, 8, "float32") for name in ("key", "value"))
    return KVCache(
        KVLayout("f", request.param, 4, quantized_layers((kv,) * 2, request.param)), 5, torch.device("cpu")
    )


def fill(cache: KVCache, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
    key, value = torch.randn(2, len(slots), 2, 8)
    cache.write(layer, cache.rows(slots, 2), (key, value))
    dtype = cache.layout.layers[layer][0].torch_dtype
    (stored_key, key_scale), (stored_value, value_scale) = quantize(key, dtype), quantize(value, dtype)
    return stored_key, stored_value, key_scale, value_scale


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_a_quantized_cache_holds_quantized_rows_and_their_scales(small: KVCache):
    cached = fill(small, 1, SLOTS)
    assert len(cached) == len(small.layout.layers[1]) == 4
    for index, tensor in enumerate(cached):
        assert torch.equal(bits(small.gather(1, index, SLOTS)), bits(tensor))
        assert not small.pages(0, index).view(torch.uint8).any()


def test_tokens_gathered_from_one_quantized_cache_are_the_same_bytes_in_another(small: KVCache):
    fill(small, 0, SLOTS)
    other, places = KVCache(small.layout, 5, small.device), torch.tensor([1, 2, 3, 10, 11])
    for index in range(4):
        moved = small.gather(0, index, SLOTS)
        other.scatter(0, index, places, moved)
        assert torch.equal(bits(other.gather(0, index, places)), bits(moved))


def test_copies_a_quantized_block_with_its_scales(small: KVCache):
    every_slot = torch.arange(20)
    for layer in range(2):
        fill(small, layer, every_slot)
    small.copy_block(3, 1)
    for layer in range(2):
        for index in range(4):
            pages = bits(small.pages(layer, index))
            assert torch.equal(pages[1], pages[3])
            assert not torch.equal(pages[1], pages[2])
