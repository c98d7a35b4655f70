"""K and V in 8 bits: what the cache stores of them, and how they are read back.

One scale per token and head. A scale per block and head would save little (2 of 66 bytes for heads of 64)
and would have to grow while a block fills, requantizing the tokens that are there already: then a token's
bytes would depend on how it came into the block. With a scale of its own a token is the same bytes
wherever it was computed, handed off to, or found again.
"""

import torch
from torch import Tensor

from engine.kv_layout import CACHED_DTYPES, TensorLayout

# The largest value of each stored dtype: int8 is symmetric, fp8 is e4m3 without infinities.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# Measured (bench/accuracy.py): no worse than float32 scales, as values are divided by the rounded scale.
SCALE_DTYPE = "bfloat16"
_SMALLEST_SCALE = torch.finfo(torch.bfloat16).tiny
# The exponents of float16 and e4m3 differ by 8.
_FLOAT16_FACTOR = 256.0


def quantized_layers(
    layers: tuple[tuple[TensorLayout, ...], ...], kv_dtype: str
) -> tuple[tuple[TensorLayout, ...], ...]:
    """The tensors of each layer in `kv_dtype`, and after them, in the same order, their scales.

    Args:
        kv_dtype: "int8" or "fp8".
    """
    return tuple(
        (
            *(TensorLayout(t.name, t.num_heads, t.head_dim, kv_dtype) for t in tensors),
            *(TensorLayout(f"{t.name}_scale", t.num_heads, 1, SCALE_DTYPE) for t in tensors),
        )
        for tensors in layers
    )


def quantize(data: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """
    Args:
        data: [num_tokens, num_heads, head_dim]. One that is not finite makes its head read back as NaN.
        dtype: a key of `LARGEST`.

    Returns:
        [num_tokens, num_heads, head_dim] in `dtype`, and the scales [num_tokens, num_heads, 1].
    """
    largest = LARGEST[dtype]
    data = data.float()
    scale = data.abs().amax(-1, keepdim=True).div_(largest).clamp_min_(_SMALLEST_SCALE)
    scale = scale.to(CACHED_DTYPES[SCALE_DTYPE])
    steps = data / scale
    if dtype is torch.int8:
        steps.round_()
    return steps.clamp_(-largest, largest).to(dtype), scale


def dequantize(stored: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """What `quantize` was given, to within half a step (int8) or 1/16 (fp8).

    Args:
        stored: [num_rows, head_dim].
        scale: [num_rows, 1].
        out: [num_rows, head_dim] float32, is overwritten.

    Returns:
        `out`.
    """
    if stored.dtype is torch.float8_e4m3fn and stored.device.type == "cpu":
        # torch converts one element at a time here: a tenth of this speed.
        return out.copy_(_as_float16(stored)).mul_(scale.float() * _FLOAT16_FACTOR)
    return out.copy_(stored).mul_(scale.float())


def _as_float16(stored: Tensor) -> Tensor:
    """e4m3 values, divided by `_FLOAT16_FACTOR`: sign and exponent moved to where float16 has them."""
    bits = stored.view(torch.int8).to(torch.int16)
    # The sign was extended: of its copies only the first, bit 15, stays.
    return bits.mul_(1 << 7).bitwise_and_(~(1 << 14)).view(torch.float16)
