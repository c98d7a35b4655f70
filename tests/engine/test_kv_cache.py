import pytest
import torch

from engine.kv_cache import KVCache
from engine.kv_layout import KVLayout, TensorLayout

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


@pytest.mark.parametrize("index", [0, 1])
def test_gathers_what_was_scattered(cache: KVCache, index: int):
    tensor = LAYOUT.layers[1][index]
    data = torch.randn(5, tensor.num_heads, tensor.head_dim)
    cache.scatter(1, index, SLOTS, data)
    assert torch.equal(cache.gather(1, index, SLOTS), data)
    assert torch.equal(cache.gather(1, index, SLOTS.flip(0)), data.flip(0))


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
