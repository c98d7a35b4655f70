"""Values in 8 bits read back as what they were, to within the dtype's error."""

import pytest
import torch
from torch import Tensor

from engine.kv_layout import TensorLayout
from engine.kv_quantization import dequantize, quantize, quantized_layers

INT8, FP8 = torch.int8, torch.float8_e4m3fn
# Of a head's largest value: half a step of 127, and half of e4m3's spacing below 448. bfloat16 scales may be
# 1/256 too small, which clamps.
ERROR = {INT8: 0.5 / 127 + 1 / 256, FP8: 16 / 448 + 1 / 256}
DTYPES = pytest.mark.parametrize("dtype", [INT8, FP8], ids=["int8", "fp8"])


def read_back(data: Tensor, dtype: torch.dtype) -> Tensor:
    stored, scale = quantize(data, dtype)
    assert stored.dtype is dtype
    assert (stored.shape, scale.shape) == (data.shape, (*data.shape[:2], 1))
    rows = stored.view(-1, stored.shape[-1])
    out = torch.full(rows.shape, torch.nan)
    return dequantize(rows, scale.view(-1, 1), out).view(data.shape)


def random_heads(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@DTYPES
@pytest.mark.parametrize("computed_in", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [1e-30, 1e-3, 1.0, 1e4, 1e37])
def test_values_of_any_size_read_back_within_the_dtypes_error(
    dtype: torch.dtype, computed_in: torch.dtype, factor: float
):
    data = (random_heads(50, 3, 64) * factor).to(computed_in)
    largest = data.float().abs().amax(-1, keepdim=True)
    assert ((read_back(data, dtype) - data.float()).abs() <= largest * ERROR[dtype]).all()


@DTYPES
def test_the_largest_float_reads_back_finite(dtype: torch.dtype):
    data = torch.full((1, 1, 4), torch.finfo(torch.float32).max)
    # As near as a bfloat16 scale comes.
    torch.testing.assert_close(read_back(data, dtype), data, rtol=1 / 128, atol=0.0)


@DTYPES
def test_zeros_and_what_is_smaller_than_any_normal_number_read_back_as_nearly_zero(dtype: torch.dtype):
    data = torch.tensor([[[0.0, 0.0]], [[1e-40, -1e-42]]])
    found = read_back(data, dtype)
    assert not found[0].any()
    assert found[1].abs().max() < 1e-37


@DTYPES
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_what_is_not_finite_breaks_its_own_head_and_no_other(dtype: torch.dtype, broken: float):
    data = random_heads(4, 3, 8)
    sound = read_back(data, dtype)
    data[1, 2, 3] = broken
    found = read_back(data, dtype)
    assert not found[1, 2].isfinite().any()
    found[1, 2] = sound[1, 2]
    assert torch.equal(found, sound)


@DTYPES
def test_a_head_is_the_same_bytes_in_any_company(dtype: torch.dtype):
    data = random_heads(40, 3, 64)
    stored, scale = quantize(data, dtype)
    alone, alone_scale = quantize(data[7:8].clone(), dtype)
    assert torch.equal(alone.view(torch.uint8), stored[7:8].view(torch.uint8))
    assert torch.equal(alone_scale, scale[7:8])


@DTYPES
def test_every_stored_byte_reads_back_as_its_value_times_the_scale(dtype: torch.dtype):
    stored = torch.arange(256, dtype=torch.uint8).view(dtype)
    stored = stored[stored.float().isfinite()].view(-1, 1)
    scale = torch.full((len(stored), 1), 0.3125, dtype=torch.bfloat16)
    found = dequantize(stored, scale, torch.empty(stored.shape))
    assert torch.equal(found, stored.float() * 0.3125)


def test_the_scales_of_a_layers_tensors_follow_them():
    layer = (TensorLayout("key", 3, 64, "float32"), TensorLayout("value", 3, 32, "float32"))
    (found,) = quantized_layers((layer,), "fp8")
    assert found == (
        TensorLayout("key", 3, 64, "fp8"),
        TensorLayout("value", 3, 32, "fp8"),
        TensorLayout("key_scale", 3, 1, "bfloat16"),
        TensorLayout("value_scale", 3, 1, "bfloat16"),
    )
    assert sum(tensor.token_bytes for tensor in found) == 3 * (64 + 32 + 2 + 2)
